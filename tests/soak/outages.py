"""Network outages while ranks on two hosts exchange data: which lengths cost nothing, and how a longer one ends the job.

    python tests/soak/outages.py [--seconds 2 5 10 15 20] [--count 10]

Each length has two hosts of its own (network namespaces, needs root) and one run of `megaclass run` with the default limits,
which all of its outages meet in turn: the cable is pulled, or the packets vanish, in alternation, at a random moment of a step.
The lengths are tried at the same time. An outage is survived when the ranks go on in the same start; a run that ended is
started again for the next one. Prints one row per length. Then the cable of one of three hosts is pulled for good, under a
program of torch.distributed and one of hvd: prints the seconds until the driver and the ranks of the lost host have ended, the
exit code, and the headline, which must name the host that is gone.
"""

import argparse
import importlib.util
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

PROGRAM = """
import time, torch, torch.distributed as dist
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import world_from_environment
with process_group(world_from_environment(), device="cpu"):
    while True:
        dist.all_reduce(torch.ones(100_000))
        print("step", flush=True)
        time.sleep(0.2)
"""


HVD_PROGRAM = """
import time, torch
import horovod.torch as hvd
hvd.init()
while True:
    hvd.allreduce(torch.ones(100_000), name="step")
    print("step", flush=True)
    time.sleep(0.2)
"""


def launch_fixtures() -> ModuleType:
    """tests/launch/conftest.py: several hosts on one machine."""
    spec = importlib.util.spec_from_file_location("launch_fixtures", Path(__file__).parents[1] / "launch/conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(length_s: float, count: int) -> tuple[int, list[float], list[str]]:
    """Outages survived, seconds from the end of each of them to the next step, and the last words of runs that ended."""
    folder = Path(tempfile.mkdtemp(prefix="megaclass-outage-"))
    (folder / "job.py").write_text(PROGRAM)
    bed = launch_fixtures().Bed(folder)
    bed.start_in_background("up", "2")
    recovered: list[float] = []
    ends: list[str] = []
    run = None
    try:
        for outage in range(count):
            if run is None:
                run = bed.start("-H", "h1:1,h2:1", "python", str(folder / "job.py"))
                run.says("step", times=10, timeout_s=120)
            time.sleep(2 + random.random())
            bed.do("blackhole" if outage % 2 else "cut", "h2")
            time.sleep(length_s)
            bed.do("unblackhole" if outage % 2 else "mend", "h2")
            mended, num_steps = time.monotonic(), run.out.count("step")
            while run.process.poll() is None and run.out.count("step") < num_steps + 4:
                time.sleep(0.05)
            if run.process.poll() is None:
                recovered.append(time.monotonic() - mended)
                # So that the heartbeats of ssh's connection have come through, too: it may take longer than the data's.
                watched_until = time.monotonic() + max(3.0, 1.5 * length_s - recovered[-1])
                while run.process.poll() is None and time.monotonic() < watched_until:
                    time.sleep(0.1)
            if run.process.poll() is not None:
                run.wait()
                ends.append(run.err[-600:])
                run = None
    finally:
        if run is not None:
            run.send(15)
            run.wait()
        bed.start_in_background("down")
        shutil.rmtree(folder, ignore_errors=True)
    return count - len(ends), recovered, ends


def measure_end(name: str, program: str) -> str:
    """Pulls the cable of the second of three hosts for good; returns a row: seconds of driver and ranks, code, headline."""
    folder = Path(tempfile.mkdtemp(prefix="megaclass-outage-"))
    (folder / "job.py").write_text(program)
    bed = launch_fixtures().Bed(folder)
    bed.start_in_background("up", "3")
    try:
        run = bed.start("-H", "h1:1,h2:1,h3:1", "python", str(folder / "job.py"))
        run.says("step", times=12, timeout_s=120)
        bed.do("cut", "h2")
        cut = time.monotonic()
        code = run.wait(90)
        driver_s = time.monotonic() - cut
        gone_s = driver_s + bed.seconds_until_nothing_is_left(60.0, apart_from="sshd")
        headline = next((line for line in run.err.splitlines() if line.startswith("megaclass: ")), "none")
    finally:
        bed.start_in_background("down")
        shutil.rmtree(folder, ignore_errors=True)
    return f"| {name} | {driver_s:.1f} | {gone_s:.1f} | {code} | {headline} |"


def _report(length_s: float, count: int) -> None:
    survived, recovered, ends = measure(length_s, count)
    later = f"{sorted(recovered)[len(recovered) // 2]:.1f} | {max(recovered):.1f}" if recovered else "— | —"
    print(f"| {length_s:g} | {survived} of {count} | {later} |", flush=True)
    for end in ends:
        print(f"{length_s:g} s ended a run: …{end}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[2, 5, 10, 15, 20])
    parser.add_argument("--count", type=int, default=10)
    given = parser.parse_args()
    print("| outage, s | survived | to the next step, s, median | slowest |\n|---|---|---|---|", flush=True)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_report, args=(length_s, given.count)) for length_s in given.seconds]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("\n| cut for good | driver, s | all ranks, s | exit code | headline |\n|---|---|---|---|---|", flush=True)
    for name, program in (("torch.distributed", PROGRAM), ("hvd", HVD_PROGRAM)):
        print(measure_end(name, program), flush=True)


if __name__ == "__main__":
    main()
