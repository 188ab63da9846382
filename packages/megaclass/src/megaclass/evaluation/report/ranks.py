"""The report's pictures over time: the time of each rank, with the slow ones (a heat map), and the events of the run."""

import functools
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from megaclass.evaluation.report.charts import bars, linear_axis
from megaclass.phases import OWN_PHASES, find_slow_rank, usual_of_others

SHOWN_PHASES = (*OWN_PHASES, "exchange")
"""In the order of the bars."""
_LEVELS = (1.05, 1.1, 1.2, 1.5, 2.0)
"""Ratios to the median of the other ranks at which the colour changes; from the third on (20 %) a rank counts as slow."""
_MOST_COLUMNS, _MOST_ROWS, _MOST_BARS = 96, 64, 16


@dataclass(frozen=True)
class RankRow:
    """One row of metrics.jsonl: the seconds per step of every rank."""

    step: int
    seconds: Mapping[str, Sequence[float]]
    """By phase."""

    @functools.cached_property
    def own_s(self) -> list[float]:
        """How long each rank took for its own part of a step."""
        return [sum(own) for own in zip(*(self.seconds[phase] for phase in OWN_PHASES), strict=True)]

    def slowest_phase(self, rank: int) -> str:
        """Returns the phase in which the rank is furthest above the median of all ranks."""
        return max(OWN_PHASES, key=lambda one: self.seconds[one][rank] - statistics.median(self.seconds[one]))


def rank_rows(rows: Sequence[Mapping[str, Any]]) -> list[RankRow]:
    """Reads the times of all ranks from rows of metrics; rows without them, or with anything else there, are left out."""
    found = []
    for row in rows:
        table = row.get("rank_seconds")
        columns: dict[str, Any] = {phase: table.get(phase) for phase in SHOWN_PHASES} if isinstance(table, dict) else {}
        if columns and all(map(_is_column, columns.values())) and len(set(map(len, columns.values()))) == 1:
            found.append(RankRow(int(row["step"]), columns))
    return found


def rank_section(
    name: str, rows: Sequence[RankRow], profiles: Sequence[Path], page: Path | None
) -> dict[str, Any] | None:
    """Returns the content of the section about one run; None if there is nothing to show.

    profiles: traces and snapshots of the run. page: the file of the report, to which the links are relative.
    """
    size = max((len(row.own_s) for row in rows), default=0)
    mean_seconds = rank_seconds(rows)
    if not mean_seconds and not profiles:
        return None
    return {
        "name": name,
        "heat": heat_map(rows) if size > 1 else [],
        "steps": [row.step for row in rows],
        "text": slow_rank(rows)[1],
        "bars": bars(mean_seconds),
        "levels": [f"up to {level:g}" for level in _LEVELS] + [f"above {_LEVELS[-1]:g}"],
        "profiles": [
            (path.name, os.path.relpath(path.absolute(), page.absolute().parent) if page else str(path))
            for path in profiles
        ],
    }


def rank_seconds(rows: Sequence[RankRow]) -> list[tuple[str, dict[str, float]]]:
    """Returns the mean seconds per step in each phase of each rank, or group of ranks."""
    # The number of ranks may have changed; the means are those of the last one.
    size = len(rows[-1].own_s) if rows else 0
    rows = [row for row in rows if len(row.own_s) == size]
    means = {phase: np.mean([row.seconds[phase] for row in rows], axis=0) for phase in SHOWN_PHASES if rows}
    return [
        (_names(ranks), {phase: float(mean_W[ranks.start : ranks.stop].mean()) for phase, mean_W in means.items()})
        for ranks in _groups(size, _MOST_BARS)
    ]


def _groups(size: int, most: int) -> list[range]:
    """Divides so many ranks, or rows, into at most so many ranges."""
    number = min(size, most)
    return [range(place * size // number, (place + 1) * size // number) for place in range(number)]


def _names(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"


def heat_map(rows: Sequence[RankRow]) -> list[tuple[str, list[tuple[int, str]]]]:
    """Returns a line per rank, or group of ranks: its name, and level and description of each cell, time to the right.

    The level rises with the time relative to the median of the other ranks.
    """
    columns = [rows[some.start : some.stop] for some in _groups(len(rows), _MOST_COLUMNS)]
    lines = []
    for ranks in _groups(max(len(row.own_s) for row in rows), _MOST_ROWS):
        worst = [_worst(shown, ranks) for shown in columns]
        lines.append((_names(ranks), [(sum(ratio > limit for limit in _LEVELS), words) for ratio, words in worst]))
    return lines


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
                words = f"rank {rank}, step {row.step:,}: {worst:.2f} × the median, most in {row.slowest_phase(rank)}"
    return worst, words


def slow_rank(rows: Sequence[RankRow]) -> tuple[float, str]:
    """Returns the rank that was slow most often: its share of the reports, and a sentence about it. 0 if none was slow."""
    found = [one for row in rows if (one := find_slow_rank(row.seconds)) is not None]
    if not found:
        return 0.0, "no rank was more than 20 % slower than the others in any report"
    rank, number = Counter(one.rank for one in found).most_common(1)[0]
    phase, _ = Counter(one.phase for one in found if one.rank == rank).most_common(1)[0]
    return number / len(rows), (
        f"rank {rank} is slow, most in {phase}: in {number:,} of {len(rows):,} reports it needed more than 20 % longer than "
        f"the others, which wait for it"
    )


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


def time_line_picture(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the template draws: a lane per kind of event and a mark per event, time to the right, from 0 to 1."""
    events = [event for event in events if event["event"] in _LANES]
    if not events:
        return {}
    begun, passed = float(events[0]["time"]), float(events[-1]["time"]) - float(events[0]["time"])
    _, unit, unit_name = next(one for one in _UNITS if passed >= one[0])
    axis = linear_axis(f"{unit_name} since the start", [0.0, max(passed, 1.0) / unit], is_tight=True)
    lanes = []
    for kind in _LANES:
        alike = [event for event in events if event["event"] == kind]
        marks = []
        # Of very many, every n-th is drawn: more would lie on top of each other.
        for event in alike[:: -(-len(alike) // _MOST_MARKS) or 1]:
            after = float(event["time"]) - begun
            step = _step(event.get("step"))
            words = f"{_clock(after)}: {kind.replace('_', ' ')}" + (f" at step {step}" if step else "")
            is_bad = kind in _BAD or event.get("outcome") == "failed"
            marks.append((min(max(axis.share(after / unit), 0.0), 1.0), is_bad, words))
        if marks:
            lanes.append((kind.replace("_", " "), marks))
    ticks = [(axis.share(tick), axis.tick_text(tick)) for tick in axis.ticks]
    return {"label": axis.label, "ticks": ticks, "lanes": lanes}


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
