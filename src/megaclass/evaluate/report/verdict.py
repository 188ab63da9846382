"""The verdict on a run in words, from its metrics and events. The table `RULES` has all rules, docs/evaluation.md reasons."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaclass.evaluate.report.charts import smoothed

_FEWEST_ROWS = 8
"""With fewer rows of metrics no curve can be judged."""
_RISEN = 1.15
"""A smoothed loss this many times its own minimum has risen; noise of a smoothed curve is far smaller."""
_HARDLY_FALLEN = 0.98
_WAITING = 0.1
"""A tenth of the time is what more reader threads would win back."""
_SLOW_SHARE = 0.2

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One sentence of the verdict."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class History:
    """Metrics and events of a run, at which the rules look."""

    rows: Sequence[Row]
    events: Sequence[Row]

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Returns steps and finite values."""
        found = [(row["step"], row[key]) for row in self.rows if _is_finite(row.get(key)) and "step" in row]
        return [int(step) for step, _ in found], [float(value) for _, value in found]

    def smooth_loss(self) -> tuple[list[int], list[float]]:
        steps, losses = self.column("loss")
        return steps, smoothed(losses, span=max(1, len(losses) // 20))


def verdict(rows: Sequence[Row], events: Sequence[Row] = ()) -> list[Finding]:
    """Returns what is wrong with the run, the most serious first; one finding "healthy" if nothing is."""
    history = History(rows, events)
    found = [Finding(rule=name, text=text) for name, rule in RULES.items() if (text := rule(history)) is not None]
    if found:
        return found
    if len(history.column("loss")[0]) < _FEWEST_ROWS:
        return [Finding(rule="short", text="too short to judge: fewer than 8 rows of metrics")]
    return [Finding(rule="healthy", text="healthy")]


def _hang(history: History) -> str | None:
    hangs = [event for event in history.events if event.get("event") == "hang"]
    if not hangs:
        return None
    step = hangs[-1].get("step")
    return "the run hung" + (f" at step {step:,}" if isinstance(step, int) else "") + ": see the time line"


def _not_finite(history: History) -> str | None:
    steps, skipped = history.column("skipped_steps")
    total = int(sum(skipped))
    if not total:
        return None
    first = next(step for step, count in zip(steps, skipped, strict=True) if count)
    return f"{total:,} steps were skipped because values were not finite, the first before step {first:,}"


def _rising_loss(history: History) -> str | None:
    steps, losses = history.smooth_loss()
    if len(losses) < _FEWEST_ROWS:
        return None
    lowest = min(range(len(losses)), key=losses.__getitem__)
    later = losses[lowest:]
    if len(later) < 3 or min(later[-3:]) < _RISEN * losses[lowest]:
        return None
    return (
        f"learning rate too high: loss rose from step {steps[lowest]:,}, from {losses[lowest]:.2f} to {losses[-1]:.2f}"
    )


def _flat_loss(history: History) -> str | None:
    _, losses = history.smooth_loss()
    if len(losses) < _FEWEST_ROWS or losses[-1] < _HARDLY_FALLEN * losses[0] or _rising_loss(history):
        return None
    return f"the run hardly learns: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; check labels and learning rate"


def _waiting_for_data(history: History) -> str | None:
    # The first row contains the start of the loader.
    _, shares = history.column("data_wait_share")
    shares = shares[1:]
    if not shares or (mean := sum(shares) / len(shares)) <= _WAITING:
        return None
    return (
        f"loader is the bottleneck: {mean:.0%} waiting; raise data.threads, or keep the data in memory with data.stage"
    )


def _slow_rank(history: History) -> str | None:
    slow = [event for event in history.events if event.get("event") == "slow_rank"]
    num_rows = sum("rank_seconds" in row for row in history.rows)
    if not slow or len(slow) < _SLOW_SHARE * num_rows:
        return None
    return f"a rank was slow {len(slow):,} times: see the map of ranks"


RULES: dict[str, Callable[[History], str | None]] = {
    "hang": _hang,
    "not finite": _not_finite,
    "rising loss": _rising_loss,
    "flat loss": _flat_loss,
    "waiting for data": _waiting_for_data,
    "slow rank": _slow_rank,
}
"""The rules, the most serious first: each returns a sentence where it applies."""


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
