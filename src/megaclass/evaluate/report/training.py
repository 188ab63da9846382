"""The report's section on training: curves over steps and epochs, and where the time went."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megaclass.evaluate.report.charts import (
    NARROW,
    Figure,
    Series,
    colour,
    line_chart,
    linear_axis,
    smoothed,
    with_epochs,
)

Rows = Sequence[Mapping[str, Any]]
Runs = Sequence[tuple[int, str, Rows]]
"""Place (which is its colour), name and rows of metrics of each run."""
# Column of the metrics, title, label of the axis, and whether its values are added up over the rows.
_CHARTS = (
    ("verification_accuracy", "Verification during training", "accuracy", False),
    ("learning_rate", "Learning rate", "learning rate", False),
    ("target_cosine", "Cosine with the own centre", "cosine", False),
    ("head_gradient_norm", "Gradient norm of the centres", "norm", False),
    ("skipped_steps", "Skipped steps", "steps since the start", True),
    ("images_per_second", "Throughput", "images / s", False),
)
_ALWAYS_SHOWN = ("learning_rate", "images_per_second")


def training_figures(runs: Runs) -> list[Figure]:
    """Returns one figure per measure that the runs recorded."""
    figures = [_loss_figure(runs)]
    for key, title, label, is_summed in _CHARTS:
        if key in _ALWAYS_SHOWN or any(key in row for _, _, rows in runs for row in rows):
            series = []
            for place, name, rows in runs:
                steps, values = _column(rows, key)
                values = _summed(values) if is_summed else values
                series.append(Series(name=name, xs=steps, ys=values, css=colour(place)))
            figures.append(_curves_figure(title, series, label, runs, has_toggles=len(series) > 1))
    return figures


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


def _loss_figure(runs: Runs) -> Figure:
    """Draws running means; a run alone also shows the single values its mean is made of."""
    is_alone = len(runs) == 1
    series = []
    for place, name, rows in runs:
        steps, losses = _column(rows, "loss")
        if is_alone:
            series.append(Series(name="each row", xs=steps, ys=losses, css="series-0 faint"))
        mean = smoothed(losses, span=len(losses) // 60)
        series.append(Series(name="running mean" if is_alone else name, xs=steps, ys=mean, css=colour(place)))
    return _curves_figure("Loss", series, "loss", runs, has_toggles=not is_alone)


def _curves_figure(title: str, series: Sequence[Series], label: str, runs: Runs, *, has_toggles: bool) -> Figure:
    values = [value for one in series for value in one.ys]
    if not any(math.isfinite(value) for value in values):
        return Figure(title=title)
    x_axis = linear_axis("step", [step for one in series for step in one.xs], is_tight=True)
    if steps_per_epoch := _steps_per_epoch(runs):
        x_axis = with_epochs(x_axis, steps_per_epoch)
    svg = line_chart(series, x_axis, linear_axis(label, values, from_zero=True), title=title, size=NARROW)
    legend = [(one.name, one.css) for one in series] if len(series) > 1 else []
    return Figure(title=title, svg=svg, legend=legend, has_toggles=has_toggles)


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
            words = ", ".join(f"{part} {seconds:,.1f} s ({seconds / total:.0%})" for part, seconds in parts.items())
            shares = [f"{100 * seconds / total:.2f}" for seconds in parts.values()]
            found.append({"text": f"{name}: {words}", "shares": shares})
    return found


def time_parts(metrics: Rows) -> dict[str, float]:
    """Returns the seconds of computing, and of waiting for data and evaluating if the rows tell them apart.

    The share of waiting in a row refers to its time without evaluation.
    """
    seconds: dict[str, float] = {}
    before = 0.0
    for row in metrics:
        if row.get("elapsed_s") is None:
            continue
        # A resumed run starts counting at zero again.
        passed = row["elapsed_s"] - before if row["elapsed_s"] >= before else row["elapsed_s"]
        before = row["elapsed_s"]
        evaluating = min(float(row.get("evaluation_s") or 0.0), passed)
        passed -= evaluating
        share = float(row.get("data_wait_share") or 0.0)
        seconds["computing"] = seconds.get("computing", 0.0) + passed * max(0.0, 1 - share)
        if "data_wait_share" in row:
            seconds["waiting for data"] = seconds.get("waiting for data", 0.0) + passed * share
        if evaluating:
            seconds["evaluating"] = seconds.get("evaluating", 0.0) + evaluating
    return seconds
