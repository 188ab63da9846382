"""The verdict on a run in words, from its metrics and events. The table `RULES` has all rules.

docs/tutorials/healthy-run.md gives the reason of each;
tests/megaclass/evaluation/recorded/make_runs.py trains a run that shows it.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaclass.evaluation.report.charts import smoothed
from megaclass.evaluation.report.from_runs import ModelReport
from megaclass.evaluation.report.ranks import slow_rank
from megaclass.metrics_file import is_number

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
"""Loss of accuracy since the best two evaluations that is not due to chance with a few hundred pairs or more."""
_CHANCE = 0.6
"""Share of pairs that even raw pixels judge correctly; a model that stays below has learned nothing about identities."""
_LEARNED = 0.7
"""Share of its first value below which a loss has fallen enough for the accuracy to show it."""
_LONGEST_TEXT = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinding:
    """One sentence of the verdict."""

    rule: str
    text: str


def column(run: ModelReport, key: str) -> tuple[list[int], list[float]]:
    """Returns steps and finite values of one kind of metric."""
    rows = [row for row in run.metrics if is_number(row.get(key)) and math.isfinite(row[key]) and "step" in row]
    return [int(row["step"]) for row in rows], [float(row[key]) for row in rows]


def smooth_loss(run: ModelReport) -> tuple[list[int], list[float]]:
    steps, losses = column(run, "loss")
    return steps, smoothed(losses, span=max(1, len(losses) // 20))


def last_cosine(run: ModelReport) -> float | None:
    """Returns the mean target cosine of the last tenth of the rows, at least three; None if there are fewer."""
    _, cosines = column(run, "target_cosine")
    last = cosines[-max(3, len(cosines) // 10) :]
    return sum(last) / len(last) if len(cosines) >= _FEWEST_ROWS else None


def end_of_last_start(run: ModelReport) -> Mapping[str, Any]:
    """Returns the end since the run was last started or resumed: what happened before has been overcome."""
    ends = [event for event in run.events if event.get("event") in ("start", "resume", "end")]
    return ends[-1] if ends and ends[-1]["event"] == "end" else {}


def verdict(run: ModelReport) -> list[RunFinding]:
    """Returns what is wrong with the run, the most serious first; one finding "healthy" if nothing is."""
    found = [RunFinding(rule=name, text=text) for name, rule in RULES.items() if (text := rule(run)) is not None]
    if found:
        return found
    if len(column(run, "loss")[0]) < _FEWEST_ROWS:
        return [RunFinding(rule="short", text="too short to judge: fewer than 8 rows of metrics")]
    return [RunFinding(rule="healthy", text="healthy")]


def _failed(run: ModelReport) -> str | None:
    end = end_of_last_start(run)
    if end.get("outcome") != "failed":
        return None
    return f"the run failed: {_cut(str(end.get('text') or 'see the messages of the run'))}"


def _hang(run: ModelReport) -> str | None:
    hangs = [event for event in run.events if event.get("event") == "hang"]
    if not hangs:
        return None
    step, text = hangs[-1].get("step"), hangs[-1].get("text")
    said = _cut(str(text).removeprefix("the job hangs: ")) if text else "see the time line"
    return "the run hung" + (f" at step {step:,}" if isinstance(step, int) else "") + f": {said}"


def _not_finite(run: ModelReport) -> str | None:
    steps, skipped = column(run, "skipped_steps")
    total = int(sum(skipped))
    if not total:
        return None
    first = next(step for step, count in zip(steps, skipped, strict=True) if count)
    return f"{total:,} steps were skipped because values were not finite, the first before step {first:,}; lower optimizer.lr"


def _rising_loss(run: ModelReport) -> str | None:
    steps, losses = smooth_loss(run)
    if len(losses) < _FEWEST_ROWS:
        return None
    lowest = min(range(len(losses)), key=losses.__getitem__)
    later = losses[lowest:]
    if len(later) < 3 or min(later[-3:]) < _RISEN * losses[lowest]:
        return None
    return (
        f"learning rate too high: loss rose from step {steps[lowest]:,}, from {losses[lowest]:.2f} to {losses[-1]:.2f}"
    )


def _flat_loss(run: ModelReport) -> str | None:
    _, losses = smooth_loss(run)
    if len(losses) < _FEWEST_ROWS or losses[-1] < _HARDLY_FALLEN * losses[0]:
        return None
    if _rising_loss(run) or _not_finite(run):
        return None
    cosine = last_cosine(run)
    if cosine is not None and run.cosines is not None and cosine >= run.cosines.low:
        # It began from weights that were good already.
        return None
    return (
        f"the run hardly learns: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; raise optimizer.lr, and check "
        f"that the labels fit the images"
    )


def _low_cosine(run: ModelReport) -> str | None:
    cosine = last_cosine(run)
    if cosine is None or run.cosines is None or cosine >= run.cosines.low:
        return None
    if _rising_loss(run) or _flat_loss(run) or not _is_finished(run):
        return None
    _, losses = smooth_loss(run)
    # Such a loss can come with a cosine that is not so low: then the images are as close to other classes as to their own.
    knows_nothing = run.loss_without_knowledge is not None and bool(losses) and losses[-1] > run.loss_without_knowledge
    if cosine >= _FAR_BELOW * run.cosines.low and not knows_nothing:
        return None
    return (
        f"the run stays on a plateau: loss {losses[-1]:.2f} at last, cosine with the own centre only {cosine:.2f}, but "
        f"{run.cosines.low:.2f} is needed; lower optimizer.lr, or start with a smaller margin"
    )


def _overfitting(run: ModelReport) -> str | None:
    steps, accuracies = column(run, "verification_accuracy")
    _, losses = smooth_loss(run)
    if len(accuracies) < _FEWEST_EVALUATIONS or len(losses) < _FEWEST_ROWS or losses[-1] > _LEARNED * losses[0]:
        return None
    change = "more identities, more augmentation or more weight decay would help; check the labels"
    if max(accuracies) < _CHANCE:
        return (
            f"the classes are learned by heart: loss fell to {losses[-1]:.2f}, but the accuracy on pairs never passed "
            f"{max(accuracies):.1%}; {change}"
        )
    # A single evaluation may be high by chance, above all while the learning rate is high.
    means = [(first + second) / 2 for first, second in itertools.pairwise(accuracies)]
    best = max(range(len(means)), key=means.__getitem__)
    if means[-1] > means[best] - _WORSE:
        return None
    return (
        f"overfitting: the accuracy on pairs, as the mean of two evaluations, fell from {means[best]:.1%} at step "
        f"{steps[best + 1]:,} to {means[-1]:.1%} while the loss fell; {change}"
    )


def _waiting_for_data(run: ModelReport) -> str | None:
    # The first row contains the start of the loader.
    _, shares = column(run, "data_wait_share")
    shares = shares[1:]
    if not shares or (mean := sum(shares) / len(shares)) <= _WAITING:
        return None
    return (
        f"loader is the bottleneck: {mean:.0%} waiting; raise data.workers or data.threads, pack smaller images, or keep the "
        f"data in memory with data.stage"
    )


def _slow_rank(run: ModelReport) -> str | None:
    share, text = slow_rank(run.rank_rows)
    return text if share >= _SLOW_SHARE else None


RULES: dict[str, Callable[[ModelReport], str | None]] = {
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


def _is_finished(run: ModelReport) -> bool:
    """True if the run did its last step, or has no events: until then the cosine still rises."""
    return not run.events or end_of_last_start(run).get("outcome") == "finished"


def _cut(text: str) -> str:
    """Returns the text without its last full stop, which the page adds, and not longer than some lines."""
    return text.rstrip(". ") if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT].rstrip() + "…"
