"""The verdict on a run in words, from its metrics and events. The table `RULES` has all rules.

docs/tutorials/healthy-run.md gives the reason of each;
tests/megaclass/evaluation/recorded/make_runs.py trains a run that shows it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaclass.evaluation.report.charts import smoothed
from megaclass.evaluation.report.curves import HealthyRange
from megaclass.evaluation.report.ranks import RankRow, slow_reports

_FEWEST_ROWS = 8
"""With fewer rows of metrics no curve can be judged."""
_RISEN = 1.15
"""A smoothed loss this many times its own minimum has risen; noise of a smoothed curve is far smaller."""
_HARDLY_FALLEN = 0.9
_FAR_BELOW = 0.5
"""Share of the needed target cosine below which a run has not begun to separate its classes."""
_WAITING = 0.1
"""A tenth of the time is what more loader processes or threads would win back."""
_SLOW_SHARE = 0.2
_FEWEST_EVALUATIONS = 4
_WORSE = 0.03
"""Loss of accuracy since the best evaluation that is not due to chance with a few hundred pairs or more."""
_CHANCE = 0.6
"""Share of pairs that even raw pixels judge correctly; a model that stays below has learned nothing about identities."""
_LEARNED = 0.7
"""Share of its first value below which a loss has fallen enough for the accuracy to show it."""
_LONGEST_TEXT = 240

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinding:
    """One sentence of the verdict."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class History:
    """The part of a run that the rules look at."""

    rows: Sequence[Row]
    events: Sequence[Row] = ()
    rank_rows: Sequence[RankRow] = ()
    cosines: HealthyRange | None = None
    """Healthy range of the target cosine; None if the settings of the run are not known."""

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Returns steps and finite values."""
        found = [(row["step"], row[key]) for row in self.rows if _is_finite(row.get(key)) and "step" in row]
        return [int(step) for step, _ in found], [float(value) for _, value in found]

    def smooth_loss(self) -> tuple[list[int], list[float]]:
        steps, losses = self.column("loss")
        return steps, smoothed(losses, span=max(1, len(losses) // 20))

    def last_cosine(self) -> float | None:
        """Returns the mean target cosine of the last tenth of the rows, at least three; None if there are fewer."""
        _, cosines = self.column("target_cosine")
        last = cosines[-max(3, len(cosines) // 10) :]
        return sum(last) / len(last) if len(cosines) >= _FEWEST_ROWS else None

    def last_start(self) -> Sequence[Row]:
        """Returns the events since the run was last started or resumed: what happened before has been overcome."""
        starts = [place for place, event in enumerate(self.events) if event.get("event") in ("start", "resume")]
        return self.events[starts[-1] if starts else 0 :]


def verdict(history: History) -> list[RunFinding]:
    """Returns what is wrong with the run, the most serious first; one finding "healthy" if nothing is."""
    found = [RunFinding(rule=name, text=text) for name, rule in RULES.items() if (text := rule(history)) is not None]
    if found:
        return found
    if len(history.column("loss")[0]) < _FEWEST_ROWS:
        return [RunFinding(rule="short", text="too short to judge: fewer than 8 rows of metrics")]
    return [RunFinding(rule="healthy", text="healthy")]


def _failed(history: History) -> str | None:
    ends = [event for event in history.last_start() if event.get("event") == "end"]
    if not ends or ends[-1].get("outcome") != "failed":
        return None
    return f"the run failed: {_cut(str(ends[-1].get('text') or 'see the messages of the run'))}"


def _hang(history: History) -> str | None:
    hangs = [event for event in history.events if event.get("event") == "hang"]
    if not hangs:
        return None
    step, text = hangs[-1].get("step"), hangs[-1].get("text")
    said = _cut(str(text).removeprefix("the job hangs: ")) if text else "see the time line"
    return "the run hung" + (f" at step {step:,}" if isinstance(step, int) else "") + f": {said}"


def _not_finite(history: History) -> str | None:
    steps, skipped = history.column("skipped_steps")
    total = int(sum(skipped))
    if not total:
        return None
    first = next(step for step, count in zip(steps, skipped, strict=True) if count)
    return f"{total:,} steps were skipped because values were not finite, the first before step {first:,}; lower optimizer.lr"


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
    if len(losses) < _FEWEST_ROWS or losses[-1] < _HARDLY_FALLEN * losses[0]:
        return None
    if _rising_loss(history) or _not_finite(history):
        return None
    cosine = history.last_cosine()
    if cosine is not None and history.cosines is not None and cosine >= history.cosines.low:
        # It began from weights that were good already.
        return None
    return (
        f"the run hardly learns: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; raise optimizer.lr, and check "
        f"that the labels fit the images"
    )


def _low_cosine(history: History) -> str | None:
    cosine = history.last_cosine()
    if cosine is None or history.cosines is None or cosine >= _FAR_BELOW * history.cosines.low:
        return None
    if _rising_loss(history) or _flat_loss(history) or not _is_finished(history):
        return None
    _, losses = history.smooth_loss()
    return (
        f"the run stays on a plateau: loss {losses[-1]:.2f} at last, cosine with the own centre only {cosine:.2f}, but "
        f"{history.cosines.low:.2f} is needed; lower optimizer.lr, or start with a smaller margin"
    )


def _overfitting(history: History) -> str | None:
    steps, accuracies = history.column("verification_accuracy")
    _, losses = history.smooth_loss()
    if len(accuracies) < _FEWEST_EVALUATIONS or len(losses) < _FEWEST_ROWS or losses[-1] > _LEARNED * losses[0]:
        return None
    best = max(range(len(accuracies)), key=accuracies.__getitem__)
    change = "more identities, more augmentation or more weight decay would help; check the labels"
    if accuracies[best] < _CHANCE:
        return (
            f"the classes are learned by heart: loss fell to {losses[-1]:.2f}, but the accuracy on pairs never passed "
            f"{accuracies[best]:.1%}; {change}"
        )
    if max(accuracies[-2:]) > accuracies[best] - _WORSE:
        return None
    return (
        f"overfitting: the accuracy on pairs fell from {accuracies[best]:.1%} at step {steps[best]:,} to "
        f"{accuracies[-1]:.1%} while the loss fell; {change}"
    )


def _waiting_for_data(history: History) -> str | None:
    # The first row contains the start of the loader.
    _, shares = history.column("data_wait_share")
    shares = shares[1:]
    if not shares or (mean := sum(shares) / len(shares)) <= _WAITING:
        return None
    return (
        f"loader is the bottleneck: {mean:.0%} waiting; raise data.workers or data.threads, pack smaller images, or keep the "
        f"data in memory with data.stage"
    )


def _slow_rank(history: History) -> str | None:
    slow = slow_reports(history.rank_rows)
    by_rank = Counter(rank for rank, _ in slow.elements())
    if not by_rank:
        return None
    rank, number = by_rank.most_common(1)[0]
    if number < _SLOW_SHARE * len(history.rank_rows):
        return None
    phase = Counter({phase: count for (one, phase), count in slow.items() if one == rank}).most_common(1)[0][0]
    return (
        f"rank {rank} is slow, most in {phase}: in {number:,} of {len(history.rank_rows):,} reports it needed more than 20 % "
        f"longer than the others, which wait for it"
    )


RULES: dict[str, Callable[[History], str | None]] = {
    "failed": _failed,
    "hang": _hang,
    "not finite": _not_finite,
    "rising loss": _rising_loss,
    "flat loss": _flat_loss,
    "low cosine": _low_cosine,
    "overfitting": _overfitting,
    "waiting for data": _waiting_for_data,
    "slow rank": _slow_rank,
}
"""The rules, the most serious first: each returns a sentence if it applies."""


def _is_finished(history: History) -> bool:
    """True if the run did its last step, or has no events: until then the cosine still rises."""
    ends = [event.get("outcome") for event in history.last_start() if event.get("event") == "end"]
    return not history.events or "finished" in ends


def _cut(text: str) -> str:
    """Returns the text without its last full stop, which the page adds, and not longer than some lines."""
    return text.rstrip(". ") if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT].rstrip() + "…"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
