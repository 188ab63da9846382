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

from megaclass.config.schema import HeadConfig
from megaclass.evaluation.report.charts import (
    NARROW,
    Axis,
    Figure,
    Series,
    colour,
    fixed_axis,
    line_chart,
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


def training_figures(runs: Runs, cosines: Mapping[str, HealthyRange] | None = None) -> list[Figure]:
    """Returns one figure per measure that the runs recorded. cosines: healthy range of the target cosine of each run."""
    figures = []
    for chart in _CHARTS:
        if chart.is_always_shown or any(chart.key in row for _, _, rows in runs for row in rows):
            columns = [(place, name, *_column(rows, chart.key)) for place, name, rows in runs]
            healthy: list[tuple[str, HealthyRange]] = []
            if chart.key == _COSINE:
                healthy = [(name, cosines[name]) for _, name, _ in runs if cosines and name in cosines]
            elif chart.key == _GRADIENT:
                found = [(name, gradient_range(values)) for _, name, _, values in columns]
                healthy = [(name, one) for name, one in found if one is not None]
            figures.append(_figure(chart, columns, healthy, runs))
    return figures


def _figure(
    chart: _Chart,
    columns: Sequence[tuple[int, str, list[float], list[float]]],
    healthy: Sequence[tuple[str, HealthyRange]],
    runs: Runs,
) -> Figure:
    is_alone = len(columns) == 1
    faint, series = [], []
    for place, name, steps, given in columns:
        values = _summed(given) if chart.is_summed else given
        if chart.is_smoothed:
            title = "each row" if is_alone else f"{name}, each row"
            faint.append(Series(name=title, xs=steps, ys=values, css=f"{colour(place)} faint"))
            values = smoothed(values, span=max(1, len(values) * _SMOOTHED_PERCENT // 100))
        title = "running mean" if is_alone and chart.is_smoothed else name
        series.append(Series(name=title, xs=steps, ys=values, css=colour(place)))
    drawn = [*faint, *series]
    if not any(math.isfinite(value) for one in drawn for value in one.ys):
        return Figure(title=chart.title)
    x_axis = linear_axis("step", [step for one in drawn for step in one.xs], is_tight=True)
    if steps_per_epoch := _steps_per_epoch(runs):
        x_axis = with_epochs(x_axis, steps_per_epoch)
    # Ranges of several runs overlap, because their settings are alike: the page shades all of them as one.
    band = (min(one.low for _, one in healthy), max(one.high for _, one in healthy)) if healthy else None
    svg = line_chart(drawn, x_axis, _y_axis(chart, drawn, band), title=chart.title, size=NARROW, band=band)
    shown = drawn if is_alone else series
    legend = [(one.name, one.css) for one in shown] if len(shown) > 1 else []
    legend += [("healthy", "band")] * bool(healthy)
    return Figure(title=chart.title, svg=svg, legend=legend, has_toggles=not is_alone, note=_note(healthy))


def _note(healthy: Sequence[tuple[str, HealthyRange]]) -> str:
    """Returns the words about the ranges; if they differ, those of the first run and the limits of the others."""
    if not healthy:
        return ""
    words = healthy[0][1].words
    others = [(name, one.low) for name, one in healthy[1:] if one.words != words]
    if not others:
        return words
    return f"{healthy[0][0]}: {words} " + ", ".join(f"{name}: from {low:.2f} on" for name, low in others) + "."


def _y_axis(chart: _Chart, drawn: Sequence[Series], band: tuple[float, float] | None) -> Axis:
    values = [value for one in drawn for value in one.ys if math.isfinite(value)]
    positive = [value for value in values if value > 0]
    if chart.key == _GRADIENT and positive and max(positive) > _LOG_FROM * min(positive):
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return log_axis(chart.label, 10.0**low, 10.0 ** max(high, low + 1))
    if chart.is_summed and max(values, default=0.0) <= 1:
        return fixed_axis(chart.label, [0.0, 1.0])
    if chart.key == _COSINE and band is not None:
        # The whole way to the range is shown, also by a run that stays far below it.
        values += [0.0, min(1.0, band[0] + 0.1)]
    return linear_axis(chart.label, values, from_zero=True)


def _summed(values: Sequence[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += 0.0 if math.isnan(value) else value
        sums.append(total)
    return sums


def _steps_per_epoch(runs: Runs) -> float | None:
    """Returns the steps of an epoch if they are known and the same in all runs."""
    found = {
        round(row["step"] / row["epoch"], 1)
        for _, _, rows in runs
        for row in rows[-1:]
        if row.get("epoch") and row.get("step")
    }
    return found.pop() if len(found) == 1 else None


def _column(metrics: Rows, key: str) -> tuple[list[float], list[float]]:
    """Returns steps and values of the rows that have the value; JSON's null stands for a value that was not finite."""
    rows = [row for row in metrics if "step" in row and key in row]
    return [float(row["step"]) for row in rows], [math.nan if row[key] is None else float(row[key]) for row in rows]


def times(runs: Runs) -> list[dict[str, Any]]:
    """Returns a bar per run: what its time was spent on."""
    found = []
    for _, name, rows in runs:
        parts = time_parts(rows)
        if parts:
            total = sum(parts.values()) or 1.0
            shown = [
                {
                    "name": part,
                    "text": f"{seconds:,.1f} s ({seconds / total:.0%})",
                    "share": f"{100 * seconds / total:.2f}",
                }
                for part, seconds in parts.items()
            ]
            for place, part in enumerate(shown):
                part["css"] = f"part-{_PARTS.get(str(part['name']), place)}"
            found.append({"name": name, "parts": shown})
    return found


# The same colours as in the bars of the ranks.
_PARTS = {
    "computing": 1,
    "waiting for data": 0,
    "forward": 1,
    "backward": 2,
    "update": 3,
    "exchange": 4,
    "evaluating": 5,
}
_PARTS |= {"saving and other": 6}


def time_parts(metrics: Rows) -> dict[str, float]:
    """Returns the seconds of each phase of the steps, of evaluating and of all else; without phases, of computing.

    The share of waiting in a row refers to its time without evaluation. Phases are means over the ranks.
    """
    seconds: dict[str, float] = {}
    before, step_before = 0.0, 0
    for row in metrics:
        elapsed = row.get("elapsed_s")
        # Not a number is neither.
        if elapsed is None or not elapsed >= 0:
            continue
        # A resumed run starts counting at zero again.
        passed = elapsed - before if elapsed >= before else elapsed
        num_steps = max(0, int(row.get("step") or 0) - step_before)
        before, step_before = elapsed, int(row.get("step") or 0)
        evaluating = min(passed, max(0.0, float(row.get("evaluation_s") or 0.0)))
        passed -= evaluating
        for name, spent in _parts_of_row(row, passed, num_steps).items():
            seconds[name] = seconds.get(name, 0.0) + spent
        if evaluating:
            seconds["evaluating"] = seconds.get("evaluating", 0.0) + evaluating
    return seconds


def _parts_of_row(row: Mapping[str, Any], passed: float, num_steps: int) -> dict[str, float]:
    phases = {phase: row.get(f"{phase}_s") for phase in PHASES}
    if num_steps and all(isinstance(value, int | float) and value >= 0 for value in phases.values()):
        spent = {phase: float(value or 0.0) * num_steps for phase, value in phases.items()}
        # Clocks of several ranks may add up to slightly more than the time that passed on rank 0.
        scale = min(1.0, passed / sum(spent.values())) if sum(spent.values()) else 1.0
        spent = {"waiting for data" if phase == "data" else phase: scale * value for phase, value in spent.items()}
        return {**spent, "saving and other": passed - sum(spent.values())}
    share = row.get("data_wait_share") or 0.0
    share = min(1.0, max(0.0, float(share))) if share == share else 0.0
    parts = {"computing": passed * (1 - share)}
    return {**parts, "waiting for data": passed * share} if "data_wait_share" in row else parts
