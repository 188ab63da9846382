"""Text for people: one progress bar per job, lines of a terminal's width, sizes and durations.

A bar is drawn by rich on a terminal, otherwise (or without rich) as plain lines.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

OnProgress = Callable[[int, int], None]
"""Takes what is done, and all that there is to do."""

# Interval of lines in a log file: often enough to show progress, rarely enough not to fill the log.
_LINE_EVERY_S = 10.0


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


def continued(on_progress: OnProgress, before: int, total: int) -> OnProgress:
    """Returns the progress of a part of the work, before which something was done."""
    return lambda done, _: on_progress(before + done, total)


def size_text(num_bytes: float) -> str:
    """Returns a size in the largest unit that it fills, such as `1.50 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"


def duration_text(seconds: float) -> str:
    """Returns a duration in one unit, such as `90 s`, `45 min`, `3.5 h` or `2.1 days`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


class Bar(Protocol):
    """A progress bar that its caller moves."""

    def advance_to(self, done: int, detail: str = "") -> None: ...


@contextmanager
def progress_bar(title: str, total: int, *, start: int = 0, is_shown: bool = True) -> Iterator[Bar]:
    """Draws a bar from `start` to `total` on standard error, which the caller moves with advance_to.

    If the messages of the package are turned off (--quiet), nothing is drawn. is_shown: False on all ranks but rank 0.
    """
    if not is_shown or logging.getLogger("megaclass").level > logging.INFO:
        yield _NoBar()
        return
    if not sys.stderr.isatty():
        yield _Lines(title, total, start)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column
    except ImportError:
        yield _Lines(title, total, start)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        # A narrow terminal cuts off the end of the detail instead of wrapping the line.
        TextColumn("{task.fields[detail]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total, completed=start, detail="")

        class _Rich:
            def advance_to(self, done: int, detail: str = "") -> None:
                shown = detail or str(progress.tasks[task].fields["detail"])
                progress.update(task, completed=done, detail=shown)

        yield _Rich()


@contextmanager
def bar_on_demand(title: str) -> Iterator[OnProgress]:
    """Yields a function of (done, total); the bar appears with its first call.

    A call with another total starts a new bar, because something else is being counted.
    """
    with ExitStack() as held:
        bars: dict[int, Bar] = {}

        def on_progress(done: int, total: int) -> None:
            if total not in bars:
                held.close()
                bars.clear()
                bars[total] = held.enter_context(progress_bar(title, total))
            bars[total].advance_to(done)

        yield on_progress


class _NoBar:
    def advance_to(self, done: int, detail: str = "") -> None:
        pass


class _Lines:
    def __init__(self, title: str, total: int, start: int) -> None:
        self._title, self._total, self._start = title, total, start
        self._begun = self._last = time.monotonic()
        self._detail = ""

    def advance_to(self, done: int, detail: str = "") -> None:
        self._detail = detail or self._detail
        now = time.monotonic()
        if now - self._last < _LINE_EVERY_S and done < self._total:
            return
        self._last = now
        # Steps done before a resume do not count for the speed.
        left_s = (now - self._begun) / max(1, done - self._start) * (self._total - done)
        text = f"{self._title} {done}/{self._total}, {left_s:.0f} s left"
        print(f"{text}, {self._detail}" if self._detail else text, file=sys.stderr, flush=True)
