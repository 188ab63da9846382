"""What `megaclass run` costs at the start against torchrun, and how soon everything is gone after a fault.

    python benchmarks/launch.py [--pairs 15] [--out benchmarks/launch.md]

Start: the same command, two ranks on this machine, by both in turn, from the call to the exit; which of them goes first changes
from pair to pair, and the difference is within pairs. Ends: what tests/launch/test_several_hosts.py records (it needs root).
"""

import argparse
import datetime
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--no-python", "--nproc-per-node", "2"],
    "megaclass run": [str(BIN / "megaclass"), "run", "-np", "2"],
}
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
ENDS = "tests/launch/test_several_hosts.py"


def seconds(launcher: str, command: list[str]) -> float:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    subprocess.run([*LAUNCHERS[launcher], *command], env=env, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - begun


def pairs_of(command: list[str], num_pairs: int) -> list[tuple[float, float]]:
    """(torchrun, megaclass run) a pair; a first pair warms the disk cache and does not count."""
    found = []
    for pair in range(num_pairs + 1):
        order = list(LAUNCHERS) if pair % 2 else list(LAUNCHERS)[::-1]
        took = {launcher: seconds(launcher, command) for launcher in order}
        found.append((took["torchrun"], took["megaclass run"]))
    return found[1:]


def interval(differences: list[float]) -> tuple[float, float]:
    """95 % of the medians of 10,000 resamples."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(differences, k=len(differences))) for _ in range(10_000))
    return medians[249], medians[9749]


def start_rows(num_pairs: int) -> list[str]:
    rows = [
        "| command, 2 ranks | torchrun, s | megaclass run, s | difference, s (95 % interval) |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "all_reduce.py"
        program.write_text(ALL_REDUCE)
        for name, command in {"`true`": ["true"], "one gloo all-reduce": [sys.executable, str(program)]}.items():
            pairs = pairs_of(command, num_pairs)
            differences = [ours - theirs for theirs, ours in pairs]
            low, high = interval(differences)
            theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
            rows.append(
                f"| {name} | {theirs:.2f} | {ours:.2f} | {statistics.median(differences):+.2f} ({low:+.2f} to {high:+.2f}) |"
            )
            print(rows[-1], file=sys.stderr)
    return rows


def end_rows(repeats: int) -> list[str]:
    """Slowest and median of the times that the tests record."""
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            selected = ["-k", "(killed or sigterm or third or cut_off) and not whatever"]
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    ENDS,
                    *selected,
                    "-o",
                    "junit_family=xunit1",
                    f"--junitxml={report}",
                ],
                check=True,
                stdout=2,
            )
            for found in ElementTree.parse(report).iter("property"):
                fault = found.get("name", "").removeprefix("seconds from ").removesuffix(" to nothing left")
                times.setdefault(fault.rstrip(","), []).append(float(found.get("value", "nan")))
    rows = ["| fault | seconds to nothing left on any host, median | slowest |", "|---|---|---|"]
    return rows + [f"| {fault} | {statistics.median(found):.1f} | {max(found):.1f} |" for fault, found in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of starts (15)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of the tests that record ends; 0 leaves them out (3)"
    )
    parser.add_argument("--out", type=Path, help="file for the table; otherwise it is printed")
    options = parser.parse_args()
    import torch

    where = f"{platform.machine()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}"
    lines = ["# Starting and ending", "", f"{datetime.date.today()}, {where}.", ""]
    lines += [f"Start to exit, medians of {options.pairs} alternating pairs:", "", *start_rows(options.pairs)]
    if options.repeats:
        ends = f"Three hosts (network namespaces, an sshd each), 2 + 1 + 1 ranks; {options.repeats} runs of {ENDS}:"
        lines += ["", ends, "", *end_rows(options.repeats)]
    text = "\n".join(lines) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
