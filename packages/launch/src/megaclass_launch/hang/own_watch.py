"""Looks for hangs from inside a rank, for starters without an agent of ours: torchrun, srun, mpirun, Ray, one process.

A thread per rank reads the rank's own page once per second. A rank that is late writes its stacks into the run folder, which
all hosts share, waits for the others to do the same, and the lowest rank that has written prints the verdict. If a rank waits
for another, all end with exit code 134, upon which the launcher ends the rest; otherwise, as always with a single process, they
go on. Ranks that write nothing are the suspects: they are stopped, their host is lost, or native code holds the interpreter
lock, without which this thread cannot run.
"""

import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaclass_launch.exit_codes import EXIT_HUNG
from megaclass_launch.files import write_text
from megaclass_launch.hang.record import HANG_FOLDER, done_in_time, keep_stacks, keep_verdict
from megaclass_launch.hang.stacks import (
    MAX_STACK_BYTES,
    LookClock,
    RankReport,
    ask_loaders,
    file_wait,
    have_answered,
    loader_stacks,
    main_thread_waits_for,
)
from megaclass_launch.hang.verdict import find_verdict, hang_sentence, slow_sentence, steps_done
from megaclass_launch.rank_status import OwnStatus, RankStatus
from megaclass_launch.world import World

_LOOK_S = 1.0
_OTHERS_S = 5.0
"""How long a rank waits for the reports of the others: their pages are looked at once per second, and disks take a moment."""
_LOADERS_S = 1.0
"""How long its loader processes have for their stacks."""
_PRINT_FIRST_S = 2.0
"""Ranks that do not print the verdict stay so much longer: launchers end all ranks as soon as one is gone."""
_MAX_ERROR = 500
_NO_SIGN = "wrote no stacks: it is stopped, in native code that keeps the interpreter lock, or its host is lost"

_CLOSED = re.compile(
    r"closed by (the )?(remote )?peer|reset by peer|Broken pipe|Connection (reset|aborted)", re.IGNORECASE
)
"""Errors of gloo, NCCL and the kernel after the process at the other end of a connection has ended."""


@contextmanager
def watched_from_inside(status: OwnStatus, world: World) -> Iterator[None]:
    """Watches this rank while the block runs, unless an agent or parent does."""
    # An agent sees all ranks of its host, and also those that cannot run this thread.
    if status.has_reader:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(status, world, is_over), daemon=True, name="megaclass-hang-watch")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_LOOK_S)


def _watch(status: OwnStatus, world: World, is_over: threading.Event) -> None:
    said, clock = "", LookClock(time.monotonic())
    while not is_over.wait(_LOOK_S):
        seen = status.read()
        now = time.monotonic()
        if seen.late_s(now, since=clock.since(now)) > 0:
            said = _report_late_rank(seen, world, said)
            # The next report comes when the rank has been late as long again.
            clock.restart(time.monotonic())


def _report_late_rank(seen: RankStatus, world: World, said: str) -> str:
    """Reports this rank, and as the lowest one that can, prints the verdict, if it differs from `said`, the last one.

    Ends the process if a rank waits for another; otherwise returns the verdict.
    """
    silent_s = time.monotonic() - seen.progress_at
    own = _report(seen, world)
    reports = [own]
    # The step is the same on all ranks, so that they find each other's files without exchanging anything.
    name = f"step-{seen.step}"
    folder = Path(seen.folder) if seen.folder else None
    begun = time.time()
    # The disk of the run folder may be what hangs: then no rank can learn of the others, and each speaks for itself.
    is_kept = folder is not None and keep_stacks(folder, name, [own]) is not None
    is_shared = folder is not None and is_kept and world.size > 1 and _share(folder / HANG_FOLDER / name, own)
    if folder is not None and is_shared:
        deadline = time.monotonic() + _OTHERS_S
        while len(reports) < world.size and time.monotonic() < deadline:
            time.sleep(0.2)
            reports = _reports_of(folder / HANG_FOLDER / name, begun - _OTHERS_S, own)
    is_speaker = own.rank == min(report.rank for report in reports)
    if is_shared:
        found = {report.rank for report in reports}
        missing = [rank for rank in range(world.size) if rank not in found]
        sign = _NO_SIGN
        if any(_CLOSED.search(report.error) for report in reports):
            sign = "wrote no stacks, and its connection was closed: it has ended, or its host is lost"
        reports += [RankReport(rank=rank, host="?", pid=0, state="lost", detail=sign) for rank in missing]
    # Without a run folder that answers, only this rank's report is here, which ends nothing: storage may have stalled.
    verdict = find_verdict(reports)
    if is_speaker and (verdict.may_end or verdict.text != said):
        sentence = (hang_sentence if verdict.may_end else slow_sentence)(silent_s, verdict)
        where = f" Stacks: {folder / HANG_FOLDER / name}." if folder is not None and is_kept else ""
        # Not logged: the thread that hangs may hold the lock of a logging handler.
        print(f"megaclass: {sentence}{where}", file=sys.stderr, flush=True)
        if folder is not None and is_kept and verdict.may_end:
            keep_verdict(folder, name, sentence, verdict, steps_done(reports))
    if not verdict.may_end:
        return verdict.text
    if not is_speaker:
        time.sleep(_PRINT_FIRST_S)
    # Not sys.exit(): the main thread is inside a call that does not return, and finalising would wait for it.
    os._exit(EXIT_HUNG)


def _share(folder: Path, own: RankReport) -> bool:
    """Writes this rank's report for the others; returns whether the disk took it in time."""
    return done_in_time(lambda: write_text(folder / f"rank-{own.rank}.json", json.dumps(asdict(own)), is_private=True))


def _report(seen: RankStatus, world: World) -> RankReport:
    loaders, deadline = ask_loaders(os.getpid()), time.monotonic() + _LOADERS_S
    while not have_answered(loaders) and time.monotonic() < deadline:
        time.sleep(0.05)
    with tempfile.TemporaryFile() as file:
        # Needs a real file: it writes to the descriptor, from C.
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read(MAX_STACK_BYTES).decode(errors="replace")
    return RankReport(
        rank=world.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        state="answered",
        step=seen.step,
        phase=seen.phase,
        detail=seen.detail,
        main_thread=seen.main_thread,
        waits_for=main_thread_waits_for(os.getpid()),
        file_wait=file_wait(os.getpid()),
        package=seen.package,
        stacks=stacks + loader_stacks(loaders),
        error=_error_in_main_thread(),
    )


def _error_in_main_thread() -> str:
    """Returns the error that the main thread is handling while it hangs, in a clean-up for example; empty if there is none."""
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # Until Python 3.11 a triple, as sys.exc_info() returns.
    error = found[1] if isinstance(found, tuple) else found
    return str(error)[:_MAX_ERROR] if error is not None else ""


def _reports_of(folder: Path, not_before: float, own: RankReport) -> list[RankReport]:
    """Reads the reports of this hang; those of an earlier one at the same step are older."""
    found = {own.rank: own}
    for file in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            # Clocks of hosts may differ by seconds; a hang at the same step of an earlier start is older by more.
            if file.stat().st_mtime >= not_before:
                report = RankReport(**json.loads(file.read_text(encoding="utf-8")))
                found[report.rank] = report
    return list(found.values())
