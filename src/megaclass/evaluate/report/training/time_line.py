"""The time line of a run: its events as marks over time and as rows of a table."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from megaclass.evaluate.report.charts import linear_axis

_MOST_ROWS = 60
_LONGEST = 160
_LANES = (
    "start",
    "resume",
    "rank_change",
    "save",
    "evaluation",
    "profile",
    "slow_rank",
    "skip",
    "warning",
    "hang",
    "end",
)
_BAD = ("slow_rank", "skip", "warning", "hang")
_MOST_MARKS = 400
_WIDTH, _LEFT, _RIGHT, _LANE = 960, 96, 24, 18
_UNITS = ((172_800.0, 86_400.0, "days"), (7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From how many seconds on each unit of the axis is used."""


def time_line(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Returns time since the first event, step, event and details; of many events the first and the last are kept."""
    if not events:
        return []
    begun = float(events[0]["time"])
    rows = [
        (_clock(float(event["time"]) - begun), _step(event.get("step")), str(event["event"]), _details(event))
        for event in events
    ]
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        left_out = ("", "", "…", f"{len(rows) - 2 * half:,} events are left out here")
        rows = [*rows[:half], left_out, *rows[-half:]]
    return rows


def time_line_picture(events: Sequence[Mapping[str, Any]]) -> Markup:
    """Draws a lane per kind of event and a mark per event, time to the right; empty if there are no events."""
    events = [event for event in events if event["event"] in _LANES]
    if not events:
        return Markup()
    begun, ended = float(events[0]["time"]), float(events[-1]["time"])
    _, unit, unit_name = next(one for one in _UNITS if ended - begun >= one[0])
    axis = linear_axis(f"{unit_name} since the start", [0.0, max(ended - begun, 1.0) / unit], is_tight=True)
    lanes = [kind for kind in _LANES if any(event["event"] == kind for event in events)]
    bottom = _LANE * len(lanes) + 4

    def x(value: float) -> float:
        return _LEFT + axis.share(value) * (_WIDTH - _LEFT - _RIGHT)

    parts = [f'<svg class="heat" viewBox="0 0 {_WIDTH} {bottom + 42}" role="img" aria-label="Events over time">']
    for tick in axis.ticks:
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="0" y2="{bottom}"/>')
        text = escape(axis.tick_text(tick))
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="axis-label" x="{middle:g}" y="{bottom + 36}" text-anchor="middle">{axis.label}</text>')
    for place, kind in enumerate(lanes):
        y = _LANE * place + _LANE / 2 + 2
        name = kind.replace("_", " ")
        parts.append(f'<text class="tick" x="{_LEFT - 12}" y="{y + 4:g}" text-anchor="end">{name}</text>')
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}"/>')
        alike = [event for event in events if event["event"] == kind]
        # Of very many, every n-th is drawn: more would lie on top of each other.
        for event in alike[:: -(-len(alike) // _MOST_MARKS)]:
            passed = float(event["time"]) - begun
            words = f"{_clock(passed)}: {name}" + (f" at step {event['step']:,}" if event.get("step") else "")
            css = "event bad" if kind in _BAD or event.get("outcome") == "failed" else "event"
            parts.append(
                f'<circle class="{css}" cx="{x(passed / unit):.1f}" cy="{y:g}" r="4"><title>{escape(words)}</title></circle>'
            )
    return Markup("".join([*parts, "</svg>"]))


def _details(event: Mapping[str, Any]) -> str:
    others = {key: value for key, value in event.items() if key not in ("time", "event", "step")}
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in others.values())
    # A text speaks for itself; numbers need their names.
    text = ", ".join(value if key == "text" else f"{key} {value}" for key, value in zip(others, shown, strict=True))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _step(step: object) -> str:
    return f"{step:,}" if isinstance(step, int) else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
