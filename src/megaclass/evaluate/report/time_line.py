"""The time line of a run: its events as rows of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_ROWS = 60
_LONGEST = 160


def time_line(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Returns time since the first event, step, event and details; of many events the first and the last are kept."""
    if not events:
        return []
    begun = float(events[0]["time"])
    rows = [
        (_duration(float(event["time"]) - begun), _step(event.get("step")), str(event["event"]), _details(event))
        for event in events
    ]
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        left_out = ("", "", "…", f"{len(rows) - 2 * half:,} events are left out here")
        rows = [*rows[:half], left_out, *rows[-half:]]
    return rows


def _details(event: Mapping[str, Any]) -> str:
    others = {key: value for key, value in event.items() if key not in ("time", "event", "step")}
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in others.values())
    text = ", ".join(f"{key} {value}" for key, value in zip(others, shown, strict=True))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _step(step: object) -> str:
    return f"{step:,}" if isinstance(step, int) else ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
