"""Receivers of metrics: metrics.jsonl, which is authoritative, and on request copies for other services."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from megaclass.config.schema import Config
from megaclass.errors import CheckpointError
from megaclass.train.observe.trackers import TRACKERS, SendNumbers, numbers_of
from megaclass.train.run.folder import RunFolder
from megaclass_launch.errors import UserError, is_transient

Sink = Callable[[Mapping[str, Any]], None]
_logger = logging.getLogger("megaclass.train")


@contextmanager
def open_sinks(config: Config, run: RunFolder, *, is_new: bool) -> Iterator[Sink]:
    """Yields one function that sends a row of metrics to every sink. Rank 0 alone calls it.

    is_new: nothing was trained yet. If a sink cannot be opened, the run folder is then cleared for the next attempt.
    """
    with ExitStack() as opened:
        write = opened.enter_context(_metrics_file(run))
        copies: list[tuple[str, SendNumbers]] = []
        try:
            # The packages are installed: start/restart.py:require_packages has checked that before the first step.
            copies += [
                (tracker.title, opened.enter_context(tracker.open_session(config, run.path)))
                for tracker in TRACKERS
                if tracker.is_wanted(config.train)
            ]
        except (UserError, OSError):
            if is_new:
                opened.close()
                run.clear()
            raise

        def send(row: Mapping[str, Any]) -> None:
            write(row)
            for title, copy in list(copies):
                try:
                    copy(numbers_of(row), int(row["step"]))
                except OSError as error:
                    # A copy for display only is not worth the run.
                    copies.remove((title, copy))
                    _logger.warning(
                        f"the copy of the metrics for {title} cannot be written ({error}); the run continues without it."
                    )

        yield send


@contextmanager
def _metrics_file(run: RunFolder) -> Iterator[Sink]:
    """Yields the sink for metrics.jsonl. Rows that a full disk refuses are kept in memory and written with the next one."""
    waiting: deque[Mapping[str, Any]] = deque()

    def send(row: Mapping[str, Any]) -> None:
        waiting.append(dict(row))
        try:
            # Oldest first: rows stay in the order of their steps.
            while waiting:
                run.append_metrics(waiting[0])
                waiting.popleft()
        except CheckpointError as error:
            if not is_transient(error):
                raise
            if len(waiting) == 1:
                _logger.warning(
                    f"{error} Training continues; rows of metrics are kept and written as soon as possible."
                )

    try:
        yield send
    finally:
        # One more attempt at the end: the disk may have room by now.
        if waiting:
            last = waiting.pop()
            send(last)
        if waiting:
            _logger.warning(f"the last {len(waiting)} rows of metrics could not be written.")


@contextmanager
def no_sinks() -> Iterator[Sink]:
    """Yields a sink that ignores every row, for the ranks that do not report."""
    yield lambda row: None
