"""Keeps the stacks of a hang in the run folder: hang/<time>/rank-N.txt and verdict.txt, and an event in events.jsonl."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megaclass_launch.events_file import append_event
from megaclass_launch.files import make_private_folder, write_private
from megaclass_launch.hang.stacks import RankReport

_HANG_FOLDER = "hang"
_WRITE_S = 1.5
"""The run folder may be on the very disk that hangs: after this time the writer is left alone."""


def new_name() -> str:
    """Returns the name of the folder of one hang: the time, in UTC."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def keep_stacks(run_folder: Path, name: str, reports: Sequence[RankReport]) -> Path | None:
    """Writes a file per rank; returns their folder, or None if that fails or takes too long."""

    def write() -> None:
        for report in reports:
            write_private(_made_folder(run_folder, name) / f"rank-{report.rank}.txt", _text_of(report))

    return run_folder / _HANG_FOLDER / name if _done_in_time(write) else None


def keep_verdict(
    run_folder: Path, name: str, sentence: str, groups: str, ranks: Sequence[int], step: int | None
) -> None:
    """Writes verdict.txt next to the stacks, and the event. groups: see describe_groups; ranks: the suspects."""

    def write() -> None:
        write_private(_made_folder(run_folder, name) / "verdict.txt", f"{sentence}\n\n{groups}\n")
        stacks = f"{_HANG_FOLDER}/{name}"
        append_event(run_folder, "hang", step=step, text=sentence, ranks=list(ranks), stacks=stacks)

    _done_in_time(write)


def _made_folder(run_folder: Path, name: str) -> Path:
    folder = run_folder / _HANG_FOLDER / name
    make_private_folder(folder.parent)
    make_private_folder(folder)
    return folder


def _text_of(report: RankReport) -> str:
    lines = [f"rank {report.rank} on {report.host}, pid {report.pid}: {report.state}"]
    for title, value in (
        ("steps done", str(report.step) if report.step >= 0 else ""),
        ("phase", " ".join(part for part in (report.phase, report.detail) if part)),
        ("main thread waits in", report.waits_for),
        ("another thread or process waits in", report.file_wait),
    ):
        if value:
            lines.append(f"{title}: {value}")
    return "\n".join([*lines, "", report.stacks or "(no Python stacks)", ""])


def _done_in_time(action: Callable[[], None]) -> bool:
    """Runs the action in a thread that is left behind if it takes too long."""
    is_done = threading.Event()

    def run() -> None:
        try:
            action()
        except OSError:
            return
        is_done.set()

    threading.Thread(target=run, daemon=True, name="megaclass-hang-record").start()
    # The thread cannot be ended if the disk never answers, but as a daemon it does not keep the process.
    return is_done.wait(_WRITE_S)
