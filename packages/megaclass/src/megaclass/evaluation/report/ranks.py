"""The report's pictures over time: the time of each rank, with the slow ones (a heat map), and the events of the run."""

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from markupsafe import Markup

from megaclass.evaluation.report.charts import linear_axis
from megaclass.phases import OWN_PHASES, SlowRank, find_slow_rank, usual_of_others

SHOWN_PHASES = (*OWN_PHASES, "exchange")
"""In the order of the bars."""
_LEVELS = (1.05, 1.1, 1.2, 1.5, 2.0)
"""Ratios to the median of the other ranks at which the colour changes; from the third on (20 %) a rank counts as slow."""
_MOST_COLUMNS, _MOST_ROWS, _MOST_BARS = 96, 64, 16
_WIDTH, _ROW, _LEFT, _BOTTOM = 960, 14, 66, 34


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """One row of metrics.jsonl: how long each rank took for its own part of a step."""

    step: int
    own_s: tuple[float, ...]
    slowest_phase: tuple[str, ...]
    """Per rank, the phase in which it is furthest above the median of all ranks."""
    slow: SlowRank | None = None
    seconds: tuple[tuple[float, ...], ...] = ()
    """Per rank, the seconds in each of SHOWN_PHASES; empty if the row does not have them."""


def rank_rows(rows: Sequence[Mapping[str, Any]]) -> list[RankRow]:
    """Reads the times of all ranks from rows of metrics; rows without them, or with anything else there, are left out."""
    found = []
    for row in rows:
        table = row.get("rank_seconds")
        if not isinstance(table, dict):
            continue
        columns = [column for phase in OWN_PHASES if _is_column(column := table.get(phase))]
        if len(columns) < len(OWN_PHASES) or len({len(column) for column in columns}) != 1:
            continue
        medians = [statistics.median(column) for column in columns]
        by_rank = list(zip(*columns, strict=True))
        phases = []
        for values in by_rank:
            excess = [value - median for value, median in zip(values, medians, strict=True)]
            phases.append(OWN_PHASES[excess.index(max(excess))])
        exchange = table.get("exchange")
        seconds: tuple[tuple[float, ...], ...] = ()
        if _is_column(exchange) and len(exchange) == len(by_rank):
            seconds = tuple(zip(*columns, exchange, strict=True))
        found.append(
            RankRow(
                step=int(row["step"]),
                own_s=tuple(map(sum, by_rank)),
                slowest_phase=tuple(phases),
                slow=find_slow_rank(dict(zip(OWN_PHASES, columns, strict=True))),
                seconds=seconds,
            )
        )
    return found


def rank_section(
    name: str, rows: Sequence[RankRow], profiles: Sequence[Path], page: Path | None
) -> dict[str, Any] | None:
    """Returns the content of the section about one run; None if there is nothing to show.

    profiles: traces and snapshots of the run. page: the file of the report, to which the links are relative.
    """
    size = max((len(row.own_s) for row in rows), default=0)
    bars = rank_bars(rows)
    if not bars and not profiles:
        return None
    return {
        "title": f"Ranks of {name}",
        "svg": heat_map(rows) if size > 1 else Markup(),
        "text": _summary(rows, size) if size > 1 else "",
        "phases": SHOWN_PHASES,
        "bars": bars,
        "levels": [f"up to {level:g}" for level in _LEVELS] + [f"above {_LEVELS[-1]:g}"],
        "profiles": [(path.name, _link(path, page)) for path in profiles],
    }


def rank_bars(rows: Sequence[RankRow]) -> list[dict[str, Any]]:
    """Returns a bar per rank, or group of ranks: its mean seconds per step in each phase, as shares of the longest bar."""
    rows = [row for row in rows if row.seconds]
    if not rows:
        return []
    size = len(rows[-1].seconds)
    # The number of ranks may have changed; the bars are those of the last one.
    rows = [row for row in rows if len(row.seconds) == size]
    means = [[statistics.fmean(row.seconds[rank][phase] for row in rows) for phase in range(5)] for rank in range(size)]
    num_bars = min(size, _MOST_BARS)
    groups = [range(place * size // num_bars, (place + 1) * size // num_bars) for place in range(num_bars)]
    bars = [[statistics.fmean(means[rank][phase] for rank in ranks) for phase in range(5)] for ranks in groups]
    longest = max(map(sum, bars)) or 1.0
    return [
        {
            "name": f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}",
            "text": ", ".join(f"{name} {_time(value)}" for name, value in zip(SHOWN_PHASES, seconds, strict=True)),
            "total": _time(sum(seconds)),
            "shares": [f"{100 * value / longest:.2f}" for value in seconds],
        }
        for ranks, seconds in zip(groups, bars, strict=True)
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def heat_map(rows: Sequence[RankRow]) -> Markup:
    """Draws the time of each rank relative to the median of the others: a line per rank (or group), time to the right."""
    size = max(len(row.own_s) for row in rows)
    num_rows, num_columns = min(size, _MOST_ROWS), min(len(rows), _MOST_COLUMNS)
    cell = (_WIDTH - _LEFT) / num_columns
    height = num_rows * _ROW + _BOTTOM
    parts = [
        f'<svg class="heat" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Time per rank, relative to the median">'
    ]
    for line in range(num_rows):
        ranks = range(line * size // num_rows, (line + 1) * size // num_rows)
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{line * _ROW + 11}" text-anchor="end">{label}</text>')
        for column in range(num_columns):
            shown = rows[column * len(rows) // num_columns : (column + 1) * len(rows) // num_columns]
            ratio, words = _worst(shown, ranks)
            level = sum(ratio > limit for limit in _LEVELS)
            parts.append(
                f'<rect class="heat-{level}" x="{_LEFT + column * cell:.1f}" y="{line * _ROW}" width="{cell:.1f}" '
                f'height="{_ROW - 1}"><title>{escape(words)}</title></rect>'
            )
    first, last = rows[0].step, rows[-1].step
    below = num_rows * _ROW + 14
    parts.append(f'<text class="tick" x="{_LEFT}" y="{below}">step {first:,}</text>')
    parts.append(f'<text class="tick" x="{_WIDTH}" y="{below}" text-anchor="end">step {last:,}</text></svg>')
    return Markup("".join(parts))


def _worst(rows: Sequence[RankRow], ranks: range) -> tuple[float, str]:
    """Returns the largest ratio to the median of the others among some ranks and rows, and its description."""
    worst, words = 0.0, "no such rank then"
    for row in rows:
        for rank in ranks:
            if rank >= len(row.own_s):
                continue
            usual = usual_of_others(row.own_s, rank)
            if usual and row.own_s[rank] / usual > worst:
                worst = row.own_s[rank] / usual
                words = f"rank {rank}, step {row.step:,}: {worst:.2f} × the median, most in {row.slowest_phase[rank]}"
    return worst, words


def slow_reports(rows: Sequence[RankRow]) -> Counter[tuple[int, str]]:
    """Returns in how many reports each rank was slow, by rank and the phase in which it lost most."""
    return Counter((row.slow.rank, row.slow.phase) for row in rows if row.slow is not None)


def _summary(rows: Sequence[RankRow], size: int) -> str:
    """Names the rank that was slow most often."""
    counts = slow_reports(rows)
    if not counts:
        return "No rank was more than 20 % slower than the others in any report."
    (rank, phase), number = counts.most_common(1)[0]
    return (
        f"In {counts.total()} of {len(rows)} reports one of the {size} ranks was more than 20 % slower than the others; "
        f"most often rank {rank}, in {phase} ({number})."
    )


def _link(path: Path, page: Path | None) -> str:
    return str(path) if page is None else os.path.relpath(path.absolute(), page.absolute().parent)


def _is_column(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and bool(values) and all(map(_is_time, values))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


_MOST_EVENTS = 60
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
_LINE_WIDTH, _LINE_LEFT, _RIGHT, _LANE = 960, 96, 24, 18
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
    if len(rows) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
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
        return _LINE_LEFT + axis.share(value) * (_LINE_WIDTH - _LINE_LEFT - _RIGHT)

    parts = [f'<svg class="heat" viewBox="0 0 {_LINE_WIDTH} {bottom + 42}" role="img" aria-label="Events over time">']
    for tick in axis.ticks:
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="0" y2="{bottom}"/>')
        text = escape(axis.tick_text(tick))
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    middle = (_LINE_LEFT + _LINE_WIDTH - _RIGHT) / 2
    parts.append(f'<text class="axis-label" x="{middle:g}" y="{bottom + 36}" text-anchor="middle">{axis.label}</text>')
    for place, kind in enumerate(lanes):
        y = _LANE * place + _LANE / 2 + 2
        name = kind.replace("_", " ")
        parts.append(f'<text class="tick" x="{_LINE_LEFT - 12}" y="{y + 4:g}" text-anchor="end">{name}</text>')
        parts.append(f'<line class="grid" x1="{_LINE_LEFT}" x2="{_LINE_WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}"/>')
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
