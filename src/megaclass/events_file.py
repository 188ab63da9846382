"""Reads and writes events.jsonl, the diary of a run: one JSON object per line, each with its time, event and step.

docs/formats.md lists the events and their fields. Standard library only, because the launcher's agent writes hangs into it.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megaclass.files import open_private
from megaclass.metrics_file import object_in

EVENTS_NAME = "events.jsonl"
EVENTS = (
    "start",
    "resume",
    "rank_change",
    "save",
    "evaluation",
    "skip",
    "slow_rank",
    "profile",
    "warning",
    "hang",
    "end",
)
"""All events that are written, in the order of docs/formats.md."""
_MAX_TEXT = 4000
_LAST_TIME = 2.0**37
"""Around the year 6300. Later times are damage, and NaN is never before it."""


def append_event(folder: Path, event: str, *, step: int | None = None, **fields: Any) -> bool:
    """Appends one event of the run in `folder`; returns False if the disk refuses it, because no event is worth a run.

    step: number of steps done when it happened; None if the writer does not know it. Texts are cut after 4,000 characters.
    """
    assert event in EVENTS, event
    row: dict[str, Any] = {"time": time.time(), "event": event, "step": step}
    row |= {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in fields.items()}
    path = folder / EVENTS_NAME
    try:
        size = path.stat().st_size if path.exists() else 0
        try:
            # One write of one line: lines of several writers (rank 0, an agent) do not mix.
            with open_private(path, "ab", follows_links=False, buffering=0) as file:
                line = (json.dumps(row) + "\n").encode()
                if file.write(line) != len(line):
                    raise OSError("the disk is full")
        except OSError:
            # Half a line would make the next one unreadable, too.
            with suppress(OSError):
                os.truncate(path, size)
            raise
    except OSError:
        return False
    return True


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the events of the run in `folder`, oldest first, and the number of lines that are not events.

    A crash can cut off the last line, and a power cut can damage others; neither stops a reader. A folder without the file
    has no events. Events that this version does not know are returned, too.
    """
    path = folder / EVENTS_NAME
    if not path.is_file():
        return [], 0
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    events = [event for event in map(_event, lines) if event is not None]
    return sorted(events, key=lambda event: float(event["time"])), len(lines) - len(events)


def _event(line: str) -> dict[str, Any] | None:
    row = object_in(line)
    if row is None or not isinstance(row.get("event"), str):
        return None
    is_timed = isinstance(row.get("time"), int | float) and not isinstance(row["time"], bool)
    is_timed = is_timed and 0 <= row["time"] < _LAST_TIME
    has_step = row.get("step") is None or isinstance(row["step"], int)
    return row if is_timed and has_step else None
