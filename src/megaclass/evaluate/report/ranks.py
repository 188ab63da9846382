"""The section about ranks: a heat map of rank × time that shows which rank was slow and when, and links to profiles."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from markupsafe import Markup

OWN_PHASES = ("data", "forward", "backward", "update")
"""Phases in which a rank works; in exchanges it waits for the others."""
_LEVELS = (1.05, 1.1, 1.2, 1.5, 2.0)
"""Ratios to the median rank at which the colour changes; from the third on (20 %) a rank counts as slow."""
_MOST_COLUMNS, _MOST_ROWS = 96, 64
_WIDTH, _ROW, _LEFT, _BOTTOM = 960, 14, 66, 34


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """One row of metrics.jsonl: how long each rank took for its own part of a step."""

    step: int
    own_s: tuple[float, ...]
    slowest_phase: tuple[str, ...]
    """Per rank, the phase in which it is furthest above the median of all ranks."""


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
        own_s = tuple(map(sum, by_rank))
        found.append(RankRow(step=int(row["step"]), own_s=own_s, slowest_phase=tuple(phases)))
    return found


def rank_section(
    name: str, rows: Sequence[RankRow], profiles: Sequence[Path], page: Path | None
) -> dict[str, Any] | None:
    """Returns the content of the section about one run; None if there is nothing to show.

    profiles: traces and snapshots of the run. page: the file of the report, to which the links are relative.
    """
    size = max((len(row.own_s) for row in rows), default=0)
    if size < 2 and not profiles:
        return None
    return {
        "title": f"Ranks of {name}",
        "svg": heat_map(rows) if size > 1 else Markup(),
        "text": _summary(rows, size) if size > 1 else "",
        "levels": [f"up to {level:g}" for level in _LEVELS] + [f"above {_LEVELS[-1]:g}"],
        "profiles": [(path.name, _link(path, page)) for path in profiles],
    }


def heat_map(rows: Sequence[RankRow]) -> Markup:
    """Draws the time of each rank relative to the median rank: one line per rank (or group of ranks), time to the right."""
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
    """Returns the largest ratio to the median rank among some ranks and rows, and its description."""
    worst, words = 0.0, "no such rank then"
    for row in rows:
        usual = statistics.median(row.own_s)
        for rank in ranks:
            if rank < len(row.own_s) and usual and row.own_s[rank] / usual > worst:
                worst = row.own_s[rank] / usual
                words = f"rank {rank}, step {row.step:,}: {worst:.2f} × the median, most in {row.slowest_phase[rank]}"
    return worst, words


def _summary(rows: Sequence[RankRow], size: int) -> str:
    """Names the rank that was slow most often."""
    counts: dict[tuple[int, str], int] = {}
    for row in rows:
        rank = max(range(len(row.own_s)), key=row.own_s.__getitem__)
        others = [own for other, own in enumerate(row.own_s) if other != rank]
        if others and row.own_s[rank] > _LEVELS[2] * statistics.median(others):
            key = (rank, row.slowest_phase[rank])
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return "No rank was more than 20 % slower than the others in any report."
    (rank, phase), number = max(counts.items(), key=lambda item: item[1])
    return (
        f"In {sum(counts.values())} of {len(rows)} reports one of the {size} ranks was more than 20 % slower than the others; "
        f"most often rank {rank}, in {phase} ({number})."
    )


def _link(path: Path, page: Path | None) -> str:
    return str(path) if page is None else os.path.relpath(path.absolute(), page.absolute().parent)


def _is_column(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and bool(values) and all(map(_is_time, values))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
