"""The report's section on training: curves with their healthy ranges, and where the time went.

Values that jump from row to row are drawn as a running mean, with the values themselves faint behind it; the script of the
page changes how many values a mean takes.

Healthy range of the target cosine. With margin, the own class must win against classes that the image has nothing to do with,
whose cosines are about 0. Half of the softmax belongs to it when its logit is ln(C - 1), so the cosine c is needed for which

    scale * (cos(m1 * arccos(c) + m2) - m3) = ln(C - 1)

A run ends above it. Far below it the images are still closer to no class than to their own.

Healthy range of the gradient norm. Its size depends on the scale, the batch and the length of the centres, so no number suits
all runs; its course is telling. After a steep fall in the first tenth it stays within a factor of ten of its median.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaclass.config.schema import HeadConfig
from megaclass.evaluation.report.charts import (
    NARROW,
    Axis,
    Figure,
    Series,
    colour,
    linear_axis,
    log_axis,
    smoothed,
    with_epochs,
)
from megaclass.head.margins import MARGINS
from megaclass.phases import PHASES

GRADIENT_FACTOR = 10.0
_MOST_NEEDED = 0.9


@dataclass(frozen=True, slots=True)
class HealthyRange:
    """Expected range of a metric in a healthy run, and the reason."""

    low: float
    high: float
    words: str


def cosine_range(head: HeadConfig, num_classes: int | None) -> HealthyRange:
    """Returns the target cosines that suffice for the own class to win. num_classes: None if it is not known yet."""
    m1, m2, m3 = _margin_of(head)
    needed = m3 + math.log(max(2, num_classes or 2) - 1) / head.scale
    angle = max(0.0, math.acos(min(needed, 1.0)) - m2) / m1
    low = min(math.cos(min(angle, math.pi)), _MOST_NEEDED)
    classes = f" among {num_classes:,} classes" if num_classes else ""
    return HealthyRange(
        low,
        1.0,
        f"Healthy: it starts near 0, rises all the time and ends in the shaded range, from {low:.2f} on. There the own class "
        f"has more than half of the softmax{classes}, with its margin ({head.margin}) and scale {head.scale:g}.",
    )


def loss_without_knowledge(head: HeadConfig, num_classes: int | None) -> float | None:
    """Returns the loss of a network for which every cosine is 0, so it tells no class from another; None if it is not known.

    It counts all classes: with sampled negatives the loss of such a network is lower.
    """
    # Other margins differ from image to image, or change the other classes as well.
    is_known = head.margin in ("softmax", "arcface", "cosface", "combined") and head.loss in (None, "softmax")
    if not is_known or head.max_labels > 1 or num_classes is None:
        return None
    m1, m2, m3 = _margin_of(head)
    own = head.scale * (math.cos(min(m1 * math.pi / 2 + m2, math.pi)) - m3)
    return float(np.logaddexp(0.0, math.log(max(2, num_classes) - 1) - own))


def gradient_range(norms: Sequence[float]) -> HealthyRange | None:
    """Returns the range of a factor of ten around the median without the first tenth; None for too few values."""
    later = [norm for norm in norms[len(norms) // 10 :] if math.isfinite(norm) and norm > 0]
    if len(later) < 3:
        return None
    middle = statistics.median(later)
    return HealthyRange(
        middle / GRADIENT_FACTOR,
        middle * GRADIENT_FACTOR,
        "Healthy: it falls steeply at first and then stays in the shaded range, a factor of ten around its median. Growth "
        "from row to row announces values that are not finite; a fall towards 0 means that nothing is learned any more.",
    )


def _margin_of(head: HeadConfig) -> tuple[float, float, float]:
    """Returns m1, m2, m3 of cos(m1 * angle + m2) - m3; the margins that vary per image count with their usual size."""
    if head.margin == "combined":
        return head.m1 or 1.0, head.margin_size or head.m2 or 0.0, head.m3 or 0.0
    # What a margin of the user needs is not known: this is what any margin needs.
    if head.margin == "softmax" or head.margin not in MARGINS:
        return 1.0, 0.0, 0.0
    margin, size_field = MARGINS[head.margin]
    defaults = {one.name: one.default for one in dataclasses.fields(margin)}  # type: ignore[arg-type]
    # MagFace chooses between 0.45 and 0.8 radians by the length of the embedding; the least suffices here.
    usual = defaults.get(size_field or "", 0.45)
    size = head.margin_size if head.margin_size is not None else float(usual)  # type: ignore[arg-type]
    return (1.0, 0.0, size) if head.margin == "cosface" else (1.0, size, 0.0)


Rows = Sequence[Mapping[str, Any]]
Runs = Sequence[tuple[int, str, Rows]]
"""Place (which is its colour), name and rows of metrics of each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chart:
    """A column of the metrics and how it is drawn."""

    key: str
    title: str
    label: str
    is_summed: bool = False
    """The values of the rows are added up."""
    is_smoothed: bool = False
    is_always_shown: bool = False


_COSINE, _GRADIENT = "target_cosine", "head_gradient_norm"
_CHARTS = (
    _Chart(key="loss", title="Loss", label="loss", is_smoothed=True, is_always_shown=True),
    _Chart(key="verification_accuracy", title="Verification during training", label="accuracy"),
    _Chart(key="learning_rate", title="Learning rate", label="learning rate", is_always_shown=True),
    _Chart(key=_COSINE, title="Cosine with the own centre", label="cosine", is_smoothed=True),
    _Chart(key=_GRADIENT, title="Gradient norm of the centres", label="norm", is_smoothed=True),
    _Chart(key="skipped_steps", title="Skipped steps", label="steps since the start", is_summed=True),
    _Chart(key="images_per_second", title="Throughput", label="images / s", is_smoothed=True, is_always_shown=True),
)
_SMOOTHED_PERCENT = 3
"""Share of all rows before and after a value that its mean takes; the page's slider begins there."""
_LOG_FROM = 30.0
"""A gradient norm that falls by more than this factor is drawn on a logarithmic axis."""


def training_figures(runs: Runs, cosines: Mapping[str, HealthyRange]) -> list[Figure]:
    """Returns one figure per measure that the runs recorded. cosines: healthy range of the target cosine of each run."""
    return [
        _figure(chart, runs, cosines)
        for chart in _CHARTS
        if chart.is_always_shown or any(row.get(chart.key) for _, _, rows in runs for row in rows)
    ]


def _figure(chart: _Chart, runs: Runs, cosines: Mapping[str, HealthyRange]) -> Figure:
    is_alone = len(runs) == 1
    faint, series, healthy = [], [], {}
    for place, name, rows in runs:
        steps, values = _column(rows, chart.key)
        if chart.is_summed:
            values = np.nancumsum(values).tolist()
        if chart.key == _GRADIENT:
            healthy[name] = gradient_range(values)
        elif chart.key == _COSINE:
            healthy[name] = cosines.get(name)
        if chart.is_smoothed:
            title = "each row" if is_alone else f"{name}, each row"
            faint.append(Series(name=title, xs=steps, ys=values, css=f"{colour(place)} faint"))
            values = smoothed(values, span=max(1, len(values) * _SMOOTHED_PERCENT // 100))
        title = "running mean" if is_alone and chart.is_smoothed else name
        series.append(Series(name=title, xs=steps, ys=values, css=colour(place)))
    drawn = [*faint, *series]
    if not any(math.isfinite(value) for one in drawn for value in one.ys):
        return Figure(title=chart.title)
    x = linear_axis("step", [step for one in drawn for step in one.xs], is_tight=True)
    if steps_per_epoch := _steps_per_epoch(runs):
        x = with_epochs(x, steps_per_epoch)
    # Ranges of several runs overlap, because their settings are alike: the page shades all of them as one.
    ranges = {name: one for name, one in healthy.items() if one is not None}
    band = (min(one.low for one in ranges.values()), max(one.high for one in ranges.values())) if ranges else None
    shown = drawn if is_alone else series
    legend = [(one.name, one.css) for one in shown] if len(shown) > 1 else []
    note = next((one.words if is_alone else f"{name}: {one.words}" for name, one in ranges.items()), "")
    return Figure(
        title=chart.title,
        lines=drawn,
        x=x,
        y=_y_axis(chart, drawn, band),
        size=NARROW,
        band=band,
        legend=legend + [("healthy", "band")] * bool(band),
        has_toggles=not is_alone,
        note=note,
    )


def _y_axis(chart: _Chart, drawn: Sequence[Series], band: tuple[float, float] | None) -> Axis:
    values = [value for one in drawn for value in one.ys if math.isfinite(value)]
    positive = [value for value in values if value > 0]
    if chart.key == _GRADIENT and positive and max(positive) > _LOG_FROM * min(positive):
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return log_axis(chart.label, 10.0**low, 10.0 ** max(high, low + 1))
    if chart.is_summed and max(values, default=0.0) <= 1:
        return linear_axis(chart.label, [0.0, 1.0], step=1.0)
    if chart.key == _COSINE and band is not None:
        # The whole way to the range is shown, also by a run that stays far below it.
        values += [0.0, min(1.0, band[0] + 0.1)]
    return linear_axis(chart.label, values, from_zero=True)


def _steps_per_epoch(runs: Runs) -> float | None:
    """Returns the steps of an epoch if they are known and the same in all runs."""
    last = [rows[-1] for _, _, rows in runs if rows]
    found = {round(row["step"] / row["epoch"], 1) for row in last if row.get("epoch") and row.get("step")}
    return found.pop() if len(found) == 1 else None


def _column(metrics: Rows, key: str) -> tuple[list[float], list[float]]:
    """Returns steps and values of the rows that have the value; JSON's null stands for a value that was not finite."""
    rows = [row for row in metrics if "step" in row and key in row]
    return [float(row["step"]) for row in rows], [math.nan if row[key] is None else float(row[key]) for row in rows]


def passed_s(metrics: Rows, events: Rows = ()) -> list[float]:
    """Returns the seconds of training that each row adds. The clock of a run begins again at 0 when it is resumed."""
    steps = [int(event.get("step") or 0) for event in events if event.get("event") == "resume"]
    # A later resume from an earlier checkpoint took back the rows of those before it.
    resumed = [step for place, step in enumerate(steps) if step <= min(steps[place:])]
    found, before, step_before = [], 0.0, 0
    for row in metrics:
        elapsed, step = row.get("elapsed_s"), int(row.get("step") or 0)
        # Not a number is neither.
        if elapsed is None or not elapsed >= 0:
            found.append(0.0)
            continue
        is_new_start = elapsed < before or any(step_before <= one < step for one in resumed)
        found.append(elapsed if is_new_start else elapsed - before)
        before, step_before = elapsed, step
    return found


def time_parts(metrics: Rows, events: Rows = ()) -> dict[str, float]:
    """Returns the seconds of each phase of the steps, of evaluating and of all else. Phases are means over the ranks.

    Empty if the rows have no phases, as in runs of version 0.1.
    """
    seconds = dict.fromkeys([*PHASES, "evaluating", "saving and other"], 0.0)
    step_before = 0
    for row, passed in zip(metrics, passed_s(metrics, events), strict=True):
        phases = {phase: row.get(f"{phase}_s") for phase in PHASES}
        if not passed or not all(isinstance(value, int | float) and value >= 0 for value in phases.values()):
            continue
        num_steps = max(0, int(row.get("step") or 0) - step_before)
        step_before = int(row.get("step") or 0)
        evaluating = min(passed, max(0.0, float(row.get("evaluation_s") or 0.0)))
        spent = {phase: float(value or 0.0) * num_steps for phase, value in phases.items()}
        # Clocks of several ranks may add up to slightly more than the time that passed on rank 0.
        scale = min(1.0, (passed - evaluating) / (sum(spent.values()) or 1.0))
        for phase, value in spent.items():
            seconds[phase] += scale * value
        seconds["evaluating"] += evaluating
        seconds["saving and other"] += passed - evaluating - scale * sum(spent.values())
    return {name: value for name, value in seconds.items() if value} if any(seconds.values()) else {}
