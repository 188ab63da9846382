"""Reads and writes events.jsonl, the event log of a run: one JSON object per line, each with its time, event and step.

docs/formats.md lists the events and their fields. Standard library only, because the launcher's agent writes hangs into it.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megaclass_launch.files import open_private, read_json_lines

EVENTS_NAME = "events.jsonl"
_MAX_TEXT = 4000
_LAST_TIME = 2.0**37
"""Around the year 6300. Later times are damage, and NaN is never before it."""


def append_event(folder: Path, event: str, *, step: int | None = None, **fields: Any) -> bool:
    """Appends one event of the run in `folder`; returns False if the disk refuses it, because no event is worth a run.

    step: number of steps done when it happened; None if the writer does not know it. Texts are cut after 4,000 characters.
    """
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
            # Half a line would also make the next one unreadable.
            with suppress(OSError):
                os.truncate(path, size)
            raise
    except OSError:
        return False
    return True


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the events of the run in `folder`, oldest first, and the number of lines that are not events.

    Damaged lines do not stop a reader. A folder without the file has no events. Events that this version does not know are
    also returned.
    """
    events, num_others = read_json_lines(folder / EVENTS_NAME, _is_event)
    return sorted(events, key=lambda event: float(event["time"])), num_others


def _is_event(row: dict[str, Any]) -> bool:
    is_timed = isinstance(row.get("time"), int | float) and not isinstance(row["time"], bool)
    is_timed = is_timed and 0 <= row["time"] < _LAST_TIME
    has_step = row.get("step") is None or isinstance(row["step"], int)
    return isinstance(row.get("event"), str) and is_timed and has_step
