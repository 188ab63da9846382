"""The whole catalogue of faults (kinds.py), at random moments of a training run, for as many rounds as asked for.

    python tests/soak/faults.py [--rounds 6] [--kinds kill-a-rank …] [--jobs 2] [--results R] [--out benchmarks/soak.md]

A round meets every kind of fault once. A trial starts a training run of two ranks under `megaclass run --restarts 3`, on this
machine or on two hosts (network namespaces), lets the fault happen at a random moment, and waits for the end. It passes when

- nothing is left of it: no process on any host;
- the newest checkpoint is whole;
- the run ended with 0, by itself, after a restart or after `--resume`, and its curve is that of an undisturbed run, bit by bit;
- and, where the fault must be reported, the report says what happened; no attack has run code.

A trial whose run had ended before the fault is repeated, and counted as such. With --results (JSON lines, appended) the script
can be stopped and started again: trials that are in that file are not repeated. Needs root, for small disks and for hosts.
"""

import argparse
import contextlib
import fcntl
import json
import multiprocessing
import os
import platform
import queue
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from jobs import LAUNCH, NUM_STEPS, Job, kill
from kinds import KINDS, Kind, owned

import megaclass
from megaclass.checkpoint.load import newest_whole

LONGEST_S = 240.0
MAX_LATE = 3
"""Repetitions of a trial whose run had ended before the fault."""
ROOT = Path(__file__).parents[2]


@dataclass
class Trial:
    """Outcome of one trial, one line of --results."""

    kind: str
    round: int
    num_late: int = 0
    """Attempts in which the run had ended before the fault."""
    was_met: bool = False
    seconds: float = 0.0
    """From the fault to the end of the run, restarts included."""
    error: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Plan:
    """What all trials share."""

    folder: Path
    curves: dict[bool, dict[int, float]]
    """Curves of undisturbed runs: False, training; True, hvd."""
    seed: int
    lock: Path | None
    results: Path
    commit: str


# ---- one trial ----


def finish(job: Job) -> None:
    """Waits for the end; a run that was ended by a signal, or lost its driver, is resumed by hand as its user would."""
    for _ in range(4):
        code = job.run.wait(LONGEST_S)
        if code == 0:
            return
        LAUNCH.assert_nothing_is_left(job.place.processes)
        job.earlier_err += job.run.err
        job.start("--resume") if job.checkpoints() else job.start("--overwrite")
    raise AssertionError(f"not finished after four starts by hand, the last with exit code {code}")


def check(job: Job, kind: Kind, expected: dict[int, float]) -> None:
    LAUNCH.assert_nothing_is_left(job.place.processes)
    assert not owned(job).exists(), "an attack has run code"
    assert "Traceback (most recent call last)" not in job.err or kind.report, "a traceback where nothing failed"
    is_said = re.search(kind.report, f"{job.err}\n{job.run.out}") is not None
    assert not job.was_met or is_said, f"no {kind.report!r} in the output"
    found = job.curve()
    different = sorted(step for step in expected.keys() | found.keys() if expected.get(step) != found.get(step))
    assert not different, f"the curve differs at steps {different[:5]}"
    if not kind.is_horovod:
        newest, damaged = newest_whole(job.run_dir / "checkpoints")
        assert newest is not None and newest.name == f"step-{NUM_STEPS:09d}", f"the newest whole checkpoint is {newest}"
        assert not damaged, f"damaged checkpoints: {damaged}"


def attempt(kind: Kind, job: Job, expected: dict[int, float], trial: Trial) -> None:
    job.start()
    try:
        kind.fault(job)
        trial.was_met = job.was_met
        finish(job)
        trial.seconds = time.monotonic() - (job.struck_at or time.monotonic())
        check(job, kind, expected)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        trial.error = f"{error}\n{job.err[-2000:]}"
        for run in job.place.runs:
            if run.process.poll() is None:
                run.process.kill()
        kill(list(job.processes()), 9)


def perform(name: str, number: int, plan: Plan) -> Trial:
    """One trial; again, up to three times, if the run had ended before the fault."""
    kind, trial = KINDS[name], Trial(name, number, commit=plan.commit)
    rng = random.Random(f"{plan.seed} {number} {name}")
    while True:
        with _place(kind, plan) as (place, disk):
            data = plan.folder / "data"
            if kind.has_own_data:
                data = Path(shutil.copytree(data, disk / "data"))
            hosts = ("-H", "h1:1,h2:1") if kind.on_hosts else ("-np", "2")
            shape = {"is_horovod": kind.is_horovod, "is_behind_shell": kind.is_behind_shell}
            job = Job(place, hosts, disk, data, rng, **shape)
            attempt(kind, job, plan.curves[kind.is_horovod], trial)
        if trial.was_met or trial.error or trial.num_late == MAX_LATE:
            return trial
        trial.num_late += 1


@contextlib.contextmanager
def _place(kind: Kind, plan: Plan) -> Iterator[tuple[object, Path]]:
    """Where a trial runs, and a folder of its own."""
    if not kind.on_hosts:
        with small_disk(plan.folder) as disk:
            yield LAUNCH.Here(), disk
        return
    # Hosts do not see mounts that are made later: an ordinary folder.
    with locked(plan.lock), tempfile.TemporaryDirectory(prefix="hosts-", dir=plan.folder) as folder:
        bed = LAUNCH.Bed(Path(folder) / "bed")
        bed.folder.mkdir()
        disk = Path(folder) / "disk"
        disk.mkdir()
        try:
            bed.start_in_background("up", "2")
            (bed.folder / "h3").mkdir()
            (bed.folder / "h3" / "outer.pid").write_text("0")
            yield bed, disk
        finally:
            bed.start_in_background("down")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="disk-", dir=folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Waits while another process has locked the file, as with `flock FILE command`."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- all trials ----


def undisturbed(folder: Path, *, is_horovod: bool) -> dict[int, float]:
    with small_disk(folder) as disk:
        job = Job(LAUNCH.Here(), ("-np", "2"), disk, folder / "data", random.Random(0), is_horovod=is_horovod)
        job.start()
        assert job.run.wait(LONGEST_S) == 0, job.run.story()
        return job.curve()


def work(plan: Plan, waiting: "multiprocessing.Queue[tuple[str, int]]", ends_at: float) -> None:
    """Performs trials until none is left; each is written down at once."""
    while time.time() < ends_at:
        try:
            name, number = waiting.get(timeout=1)
        except queue.Empty:
            return
        trial = perform(name, number, plan)
        with plan.results.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
        said = f"failed: {trial.error}" if trial.error else f"passed, {trial.seconds:.0f} s"
        print(f"{time.strftime('%H:%M:%S')} {name}, round {number}: {said}", flush=True)


def read_results(path: Path) -> list[Trial]:
    return [Trial(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


HEADER = """tests/soak/faults.py, which `make soak` runs, writes this file. A trial passes when no process is left on any host,
the last checkpoint is whole, the fault was reported, no attack has run code, and the run ended with 0 (by itself, by
`--restarts`, or by `--resume` after a signal or the loss of its driver) with the curve of an undisturbed run, bit by bit.
"Repeated" counts attempts in which the run had ended before the fault, "not met" trials in which that happened four times."""


def table(trials: list[Trial]) -> str:
    by_kind: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_kind[trial.kind].append(trial)
    failed = [trial for trial in trials if trial.error]
    commits = list(dict.fromkeys(trial.commit for trial in trials))
    lines = [
        "# Soak: every kind of fault at a random moment",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {platform.machine()}, {os.cpu_count()} CPU cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}, torch {torch.__version__}, megaclass "
        f"{megaclass.__version__} (revision {', '.join(commits)}). {len(by_kind)} kinds of fault, {len(trials)} trials, "
        f"{len(failed)} failed.",
        "",
        HEADER,
        "",
        "| fault | trials | passed | repeated | not met | median s from the fault to the end of training | slowest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, some in sorted(by_kind.items()):
        seconds = [trial.seconds for trial in some if not trial.error and trial.was_met]
        times = f"{statistics.median(seconds):.0f} | {max(seconds):.0f}" if seconds else "— | —"
        passed = sum(not trial.error and trial.was_met for trial in some)
        late, missed = sum(trial.num_late for trial in some), sum(not trial.was_met for trial in some)
        lines.append(f"| {name} | {len(some)} | {passed} | {late} | {missed} | {times} |")
    for trial in failed:
        lines += ["", f"Failed: {trial.kind}, round {trial.round}: {trial.error.splitlines()[0]}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", help="faults whose names contain one of these; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=int, default=2, help="trials at a time on this machine (2); one on hosts is added"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start no trial after this time")
    parser.add_argument("--local", action="store_true", help="leave out the faults that need several hosts")
    parser.add_argument("--lock", type=Path, help="file that is locked during trials on several hosts")
    parser.add_argument("--results", type=Path, help="JSON lines of all trials; what is in it is not repeated")
    parser.add_argument("--out", type=Path, help="file for the table")
    given = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("small disks and hosts need root")
    # Hundreds of processes are started: byte code is kept.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    folder = Path(tempfile.mkdtemp(prefix="megaclass-soak-"))
    results = given.results or folder / "results.jsonl"
    ends_at = time.time() + 60 * given.minutes
    names = [
        name
        for name, kind in KINDS.items()
        if not (given.local and kind.on_hosts) and (not given.kinds or any(part in name for part in given.kinds))
    ]
    done = {(trial.kind, trial.round) for trial in read_results(results)}
    context = multiprocessing.get_context("fork")
    # Trials on several hosts have a process of their own, which may have to wait for the lock.
    queues: dict[bool, multiprocessing.Queue[tuple[str, int]]] = {
        on_hosts: context.Queue() for on_hosts in (False, True)
    }
    try:
        curves = {is_horovod: undisturbed(folder, is_horovod=is_horovod) for is_horovod in (False, True)}
        plan = Plan(folder, curves, given.seed, given.lock, results, commit.strip())
        for number in range(given.rounds):
            for name in random.Random(f"{given.seed} {number}").sample(names, len(names)):
                if (name, number) not in done:
                    queues[KINDS[name].on_hosts].put((name, number))
        shares = [*[queues[False]] * given.jobs, queues[True]]
        workers = [context.Process(target=work, args=(plan, waiting, ends_at)) for waiting in shares]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(5)
            if given.out and results.exists():
                given.out.write_text(table(read_results(results)))
        trials = read_results(results)
        print(table(trials))
        if given.out:
            given.out.write_text(table(trials))
    finally:
        for waiting in queues.values():
            # Trials that were not started must not keep this process.
            waiting.cancel_join_thread()
        shutil.rmtree(folder, ignore_errors=True)
    return int(any(trial.error for trial in trials) or any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    sys.exit(main())
