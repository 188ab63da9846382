"""The report's sections on evaluation sets: one table over all sets, and for each set numbers, charts and hardest pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaclass.evaluation.protocol import Cell, Curves, HardPair, Numbers, Row, SetResult, best_cells
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.report.charts import (
    Figure,
    Series,
    colour,
    fixed_axis,
    histogram_chart,
    line_chart,
    log_axis,
)
from megaclass.evaluation.report.classes import Picture, picture, shown_examples
from megaclass.evaluation.results import headline, remarks_on

_ABSENT = "–"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelResults:
    """The results of one model, as the sections on sets need them."""

    name: str
    results: Sequence[SetResult]
    is_baseline: bool
    """Shown in numbers and ROC, without histogram and pictures of its own."""

    def on(self, name: str) -> SetResult | None:
        """Returns the result on the set of that name."""
        return next((result for result in self.results if result.name == name), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """Everything about one set."""

    lead: str
    columns: list[str]
    """Names of the models."""
    rows: list[Row]
    figures: list[Figure]
    operating_points: list[tuple[str, list[Row]]] = field(default_factory=list)
    """For each model: the threshold, TAR and false accepts at each false accept rate."""
    mistakes: list[dict[str, Any]] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)
    """For each model: classes that are confused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShownPair:
    """A hard pair as the page shows it."""

    pair: int
    similarity: str
    is_wrong: bool
    pictures: list[Picture]
    names: str


def set_sections(models: Sequence[ModelResults]) -> dict[str, Any]:
    """Returns the template's values for "All sets" and "Set by set"."""
    names = list(dict.fromkeys(result.name for model in models for result in model.results))
    return {
        "model_names": [model.name for model in models],
        "overview": [(name, _overview_cells(name, models)) for name in names],
        "failures": [
            {"set": result.name, "model": model.name, "error": result.error}
            for model in models
            for result in model.results
            if result.error is not None
        ],
        "panels": [(name, _panel(name, models)) for name in names],
    }


def _overview_cells(name: str, models: Sequence[ModelResults]) -> list[Cell]:
    found = [model.on(name) for model in models]
    texts = [_ABSENT if one is None else headline(one) for one in found]
    values = [
        None if one is None or one.error is not None else PROTOCOLS[one.kind].quoted(one.numbers) for one in found
    ]
    return best_cells(texts, values)


def _panel(name: str, models: Sequence[ModelResults]) -> Panel | None:
    """Returns None if no model was evaluated on the set."""
    done = [(place, model, result) for place, model in enumerate(models) if (result := model.on(name))]
    done = [(place, model, result) for place, model, result in done if result.error is None]
    if not done:
        return None
    # Two runs may have evaluated different things under one name; only numbers of one kind can be compared.
    kind = done[0][2].kind
    alike = [(place, model, result) for place, model, result in done if result.kind == kind]
    protocol, numbers = PROTOCOLS[kind], [result.numbers for _, _, result in alike]
    drawn = [(place, model, result.curves) for place, model, result in alike if result.curves is not None]
    named = [(place, model.name, curves) for place, model, curves in drawn]
    figures = [_roc_figure(named), _det_figure(named)] if drawn else []
    figures += [_histogram_figure(model.name, curves) for _, model, curves in drawn if not model.is_baseline]
    if kind == "classification":
        figures = [_coverage_figure([(place, model.name, result.numbers) for place, model, result in alike])]
    return Panel(
        lead=f"{protocol.lead(numbers[0])} {_remarks([(model, result) for _, model, result in alike])}".rstrip(),
        columns=[model.name for _, model, _ in alike],
        rows=protocol.rows(numbers),
        figures=figures,
        operating_points=[
            (model.name, rows)
            for _, model, curves in drawn
            if not model.is_baseline and (rows := operating_points(curves))
        ],
        mistakes=[
            {
                "model": model.name,
                "threshold": f"{result.curves.threshold:.3f}",
                "different": [_shown(hard) for hard in result.hard_pairs if not hard.is_same],
                "same": [_shown(hard) for hard in result.hard_pairs if hard.is_same],
            }
            for _, model, result in alike
            if result.hard_pairs and result.curves is not None and not model.is_baseline
        ],
        examples=[
            {"of": f" of {model.name}" if len(alike) > 1 else "", **shown_examples(result.examples)}
            for _, model, result in alike
            if result.examples is not None
        ],
    )


def _remarks(done: Sequence[tuple[ModelResults, SetResult]]) -> str:
    """Returns the remarks on all models, with their names if the remarks differ."""
    remarks = [(model.name, " ".join(remarks_on(result))) for model, result in done if not model.is_baseline]
    if len({said for _, said in remarks}) == 1:
        return remarks[0][1]
    return " ".join(f"{name}: {said}" for name, said in remarks if said)


def _shown(hard: HardPair) -> ShownPair:
    return ShownPair(
        pair=hard.pair,
        similarity=f"{hard.similarity:.3f}",
        is_wrong=hard.is_wrong,
        pictures=[
            picture(encoded, f"pair {hard.pair}, {side} image")
            for side, encoded in zip(("first", "second"), hard.pictures, strict=True)
        ],
        names=" · ".join(hard.names) if any(hard.names) else "",
    )


def _roc_figure(drawn: Sequence[tuple[int, str, Curves]]) -> Figure:
    curves = []
    for place, title, one in drawn:
        # A logarithmic axis has no zero: of the points without a false accept only the highest is drawn, at the edge.
        start = int(np.flatnonzero(one.far == 0)[-1])
        curves.append(Series(name=title, xs=one.far[start:].tolist(), ys=one.tar[start:].tolist(), css=colour(place)))
    most_different = max(one.num_different for _, _, one in drawn)
    # Good models differ near the top: the axis starts at the multiple of 0.2 below the lowest point.
    lowest = min(4, int(5 * min(min(curve.ys) for curve in curves)))
    svg = line_chart(
        # Reversed, so the first model lies on top.
        curves[::-1],
        log_axis("false accept rate", 1 / max(most_different, 10), 1.0),
        fixed_axis("true accept rate", [fifth / 5 for fifth in range(lowest, 6)]),
        title="ROC",
    )
    return Figure(title="ROC", svg=svg, legend=[(curve.name, curve.css) for curve in curves], has_toggles=True)


def _coverage_figure(drawn: Sequence[tuple[int, str, Numbers]]) -> Figure:
    """Draws the accuracy on the most confident images over their share of all images."""
    curves = [
        Series(
            name=name,
            xs=[point["coverage"] for point in numbers["coverage"]],
            ys=[point["accuracy"] for point in numbers["coverage"]],
            css=colour(place),
        )
        for place, name, numbers in drawn
    ]
    lowest = min(4, int(5 * min(min(curve.ys, default=1.0) for curve in curves)))
    svg = line_chart(
        curves[::-1],
        fixed_axis("coverage: share of images that are not rejected", [tenth / 10 for tenth in range(5, 11)]),
        fixed_axis("accuracy", [fifth / 5 for fifth in range(lowest, 6)]),
        title="Coverage",
    )
    return Figure(title="Coverage", svg=svg, legend=[(curve.name, curve.css) for curve in curves], has_toggles=True)


def _det_figure(drawn: Sequence[tuple[int, str, Curves]]) -> Figure:
    """Draws errors against errors, both logarithmic: good models, which a ROC shows as one corner, lie apart."""
    curves = []
    for place, title, one in drawn:
        # Neither axis has a zero: points without a false accept or without a false reject are left out.
        rejected = 1 - one.tar
        is_shown = (one.far > 0) & (rejected > 1e-12)
        far, frr = one.far[is_shown], rejected[is_shown]
        curves.append(Series(name=title, xs=far.tolist(), ys=frr.tolist(), css=colour(place)))
    if not any(curve.xs for curve in curves):
        return Figure(title="DET")
    smallest = min(min(curve.ys) for curve in curves if curve.ys)
    svg = line_chart(
        curves[::-1],
        log_axis("false accept rate", 1 / max(max(one.num_different for _, _, one in drawn), 10), 1.0),
        log_axis("false reject rate", min(0.1, 10.0 ** math.floor(math.log10(smallest))), 1.0),
        title="DET",
    )
    return Figure(title="DET", svg=svg, legend=[(curve.name, curve.css) for curve in curves], has_toggles=True)


def operating_points(curves: Curves) -> list[Row]:
    """Returns (FAR, cells) from 0.1 down to the smallest FAR that the number of different pairs can show."""
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
        cells = [
            f"{curves.thresholds[place]:.4f}",
            f"{curves.tar[place]:.2%}",
            f"{accepted:,} of {curves.num_different:,}",
        ]
        rows.append((f"1e-{exponent}", [Cell(text) for text in cells]))
    return rows


def _histogram_figure(model: str, curves: Curves) -> Figure:
    lowest = round(5 * float(curves.edges[0]))
    title = f"Similarity of pairs: {model}"
    svg = histogram_chart(
        [("series-1", curves.different), ("series-0", curves.same)],
        curves.edges,
        fixed_axis("cosine similarity", [fifth / 5 for fifth in range(lowest, 6)]),
        title=title,
        marker=curves.threshold,
    )
    legend = [("same identity", "series-0"), ("different", "series-1"), (f"threshold {curves.threshold:.3f}", "marker")]
    return Figure(title=title, svg=svg, legend=legend)
