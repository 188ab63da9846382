"""The report's sections on evaluation sets: one table over all sets, and for each set numbers, charts and hardest pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaclass.evaluation.protocol import NOT_MEASURABLE, Cell, Curves, Numbers, Row, SetResult, best_cells
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.report.charts import Axis, Figure, Series, colour, histogram, linear_axis, log_axis
from megaclass.evaluation.report.from_runs import ModelReport
from megaclass.evaluation.results import headline, remarks_on

ABSENT = "–"


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """Everything about one set."""

    lead: str
    columns: list[str]
    """Names of the models."""
    rows: list[Row]
    figures: list[Figure]
    operating_points: list[tuple[str, list[Row]]]
    """For each model: the threshold, TAR and false accepts at each false accept rate."""
    mistakes: list[tuple[str, SetResult]]
    """Models with their results that have hard pairs."""
    examples: list[tuple[str, SetResult]]
    """Models with their results that have confused classes."""


def names_of_sets(models: Sequence[ModelReport]) -> list[str]:
    return list(dict.fromkeys(result.name for model in models for result in model.results))


def set_sections(models: Sequence[ModelReport]) -> dict[str, Any]:
    """Returns the template's values for "All sets" and "Set by set"."""
    return {
        "overview": [(name, overview_cells(name, models)) for name in names_of_sets(models)],
        "failures": [(result, model) for model in models for result in model.results if result.error is not None],
        "panels": [(name, _panel(name, models)) for name in names_of_sets(models)],
    }


def overview_cells(name: str, models: Sequence[ModelReport]) -> list[Cell]:
    """Returns the quoted number of each model on a set; the best one is marked."""
    found = [model.on(name) for model in models]
    texts = [ABSENT if one is None else headline(one) for one in found]
    return best_cells(texts, [None if one is None else quoted(one) for one in found])


def quoted(result: SetResult) -> float | None:
    return None if result.error is not None else PROTOCOLS[result.kind].quoted(result.numbers)


def _panel(name: str, models: Sequence[ModelReport]) -> Panel | None:
    """Returns None if no model was evaluated on the set."""
    done = [(place, model, result) for place, model in enumerate(models) if (result := model.on(name))]
    done = [(place, model, result) for place, model, result in done if result.error is None]
    # Two runs may have evaluated different things under one name; only numbers of one kind can be compared.
    alike = [(place, model, result) for place, model, result in done if result.kind == done[0][2].kind]
    if not alike:
        return None
    protocol, numbers = PROTOCOLS[alike[0][2].kind], [result.numbers for _, _, result in alike]
    rows = protocol.rows(numbers)
    empty = [title for title, cells in rows if all(cell.text in (NOT_MEASURABLE, ABSENT) for cell in cells)]
    lead = [protocol.lead(numbers[0]), _remarks([(model, result) for _, model, result in alike])]
    if empty:
        lead.append(f"Not measurable with so few images: {', '.join(empty)}.")
    curves = [(place, model.name, result.curves) for place, model, result in alike if result.curves is not None]
    # Baselines are shown in numbers and ROC, without histogram and images of their own.
    own = [(model.name, result) for _, model, result in alike if result.curves is not None and not model.is_baseline]
    figures = [*_roc_and_det(curves), *(_histogram(name, result.curves) for name, result in own if result.curves)]
    if protocol.kind == "classification":
        figures = [_coverage([(place, model.name, result.numbers) for place, model, result in alike])]
    return Panel(
        lead=" ".join(filter(None, lead)),
        columns=[model.name for _, model, _ in alike],
        rows=[row for row in rows if row[0] not in empty],
        figures=figures,
        operating_points=[
            (name, points)
            for name, result in own
            if result.curves and (points := operating_points(result.curves, result.numbers.get("threshold_at_far", {})))
        ],
        mistakes=[(name, result) for name, result in own if result.hard_pairs],
        examples=[(model.name, result) for _, model, result in alike if result.examples is not None],
    )


def _remarks(done: Sequence[tuple[ModelReport, SetResult]]) -> str:
    """Returns the remarks on all models, with their names if the remarks differ."""
    remarks = [(model.name, " ".join(remarks_on(result))) for model, result in done if not model.is_baseline]
    if len({said for _, said in remarks}) == 1:
        return remarks[0][1]
    return " ".join(f"{name}: {said}" for name, said in remarks if said)


def _roc_and_det(curves: Sequence[tuple[int, str, Curves]]) -> list[Figure]:
    """Returns both charts over a logarithmic false accept rate; curves: place, name and curves of each model.

    The DET shows errors against errors, both logarithmic: good models, which a ROC shows as one corner, lie apart.
    """
    if not curves:
        return []
    roc, det = [], []
    for place, name, one in curves:
        # A logarithmic axis has no zero: of the points without a false accept only the highest is drawn, at the edge.
        start = int(np.flatnonzero(one.far == 0)[-1])
        roc.append(Series(name=name, xs=one.far[start:].tolist(), ys=one.tar[start:].tolist(), css=colour(place)))
        rejected = 1 - one.tar
        shown = (one.far > 0) & (rejected > 1e-12)
        det.append(Series(name=name, xs=one.far[shown].tolist(), ys=rejected[shown].tolist(), css=colour(place)))
    x = log_axis("false accept rate", 1 / max(10, *(one.num_different for _, _, one in curves)), 1.0)
    # Good models differ near the top: the axis starts at the multiple of 0.2 below the lowest point.
    y = linear_axis("true accept rate", [min(0.8, *(y for line in roc for y in line.ys)), 1.0], step=0.2)
    figures = [_rates("ROC", roc, x, y)]
    rates = [y for line in det for y in line.ys]
    if not rates:
        return [*figures, Figure(title="DET")]
    lowest = min(0.1, 10.0 ** math.floor(math.log10(min(rates))))
    return [*figures, _rates("DET", det, x, log_axis("false reject rate", lowest, 1.0))]


def _rates(title: str, lines: Sequence[Series], x: Axis, y: Axis) -> Figure:
    legend = [(line.name, line.css) for line in lines]
    # Reversed, so the first model lies on top.
    return Figure(title=title, lines=lines[::-1], x=x, y=y, legend=legend, has_toggles=True)


def _coverage(drawn: Sequence[tuple[int, str, Numbers]]) -> Figure:
    """Draws the accuracy on the most confident images over their share of all images."""
    lines = []
    for place, name, numbers in drawn:
        shares, accuracies = ([point[key] for point in numbers["coverage"]] for key in ("coverage", "accuracy"))
        lines.append(Series(name=name, xs=shares, ys=accuracies, css=colour(place)))
    x = linear_axis("coverage: share of images that are not rejected", [0.5, 1.0], step=0.1)
    y = linear_axis("accuracy", [min(0.8, *(y for line in lines for y in line.ys)), 1.0], step=0.2)
    return _rates("Coverage", lines, x, y)


def operating_points(curves: Curves, threshold_at_far: Mapping[str, float | None]) -> list[Row]:
    """Returns (FAR, cells) from 0.1 down to the smallest FAR that the number of different pairs can show.

    threshold_at_far: squared distances as `verify` uses them; any threshold up to the next false accept accepts the same pairs.
    """
    rows: list[Row] = []
    if curves.thresholds is None:
        return rows
    for exponent in range(1, 9):
        target = 10.0**-exponent
        if curves.num_different * target < 1 - 1e-9:
            break
        # The last point at or below the target accepts the most same pairs.
        place = int(np.flatnonzero(curves.far <= target)[-1])
        accepted = round(curves.far[place] * curves.num_different)
        known = threshold_at_far.get(f"1e-{exponent}")
        cells = [
            f"{curves.thresholds[place] if known is None else 1 - known / 2:.3f}",
            f"{curves.tar[place]:.2%}",
            f"{accepted:,} of {curves.num_different:,}",
        ]
        rows.append((f"1e-{exponent}", [Cell(text) for text in cells]))
    return rows


def _histogram(model: str, curves: Curves) -> Figure:
    legend = [("same identity", "series-0"), ("different", "series-1"), (f"threshold {curves.threshold:.3f}", "marker")]
    return histogram(
        f"Similarity of pairs: {model}",
        [("series-1", curves.different), ("series-0", curves.same)],
        curves.edges,
        linear_axis("cosine similarity", [float(curves.edges[0]), 1.0], step=0.2),
        marker=curves.threshold,
        legend=legend,
    )
