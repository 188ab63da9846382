"""Renders one self-contained report.html over one or several runs: numbers, curves, hardest pairs, centres, configuration.

The page is the template report.html.j2 with report.css and report.js inlined. It opens from disk and carries its pictures
as data URIs. Its content security policy forbids fetching anything and allows one script, named by its digest. Light or
dark follows the reader's system.
"""

import base64
import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from megaclass.evaluation.centres import CentreHealth
from megaclass.evaluation.protocol import NOT_MEASURABLE, Cell, Curves, Numbers, Row, SetResult, best_cells
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.report.charts import Axis, Figure, Series, bars, colour, histogram, linear_axis, log_axis
from megaclass.evaluation.report.curves import passed_s, time_parts, training_figures
from megaclass.evaluation.report.from_runs import ModelReport, ReportData
from megaclass.evaluation.report.ranks import rank_section, time_line, time_line_picture
from megaclass.evaluation.report.templates import render, source
from megaclass.evaluation.report.verdict import verdict
from megaclass.evaluation.results import headline, remarks_on
from megaclass_launch.files import write_text

SECTIONS: dict[str, tuple[str, str]] = {
    "comparison": ("comparison", "Runs compared"),
    "facts": ("run", "Run"),
    "overview": ("sets", "All sets"),
    "panels": ("set-by-set", "Set by set"),
    "training_figures": ("training", "Training"),
    "ranks": ("ranks", "Ranks"),
    "time_lines": ("time-line", "Time line"),
    "centres": ("centres", "Class centres"),
    "training_images": ("labels", "Images that do not fit their class"),
    "sample_faces": ("images", "Training images"),
    "configurations": ("configuration", "Configuration"),
}
"""Sections in the order of the page: the template's value that must not be empty, anchor, title. A new section is a line here
and a block in the template, which asks for anchor and title by the name of the value."""
_NUM_BINS = 40
ABSENT = "–"


def write_report(path: Path, report: ReportData) -> None:
    """Writes the page, which appears whole or not at all."""
    # The page may show faces.
    write_text(path, render_report(report, path), is_private=True)


def render_report(report: ReportData, path: Path | None = None) -> str:
    """Returns the page. The template decides which sections appear: one without content is left out.

    path: the file of the page, to which links to other files of a run are relative.
    """
    models = report.models
    runs = [model for model in models if not model.is_baseline]
    trained = [(place, one.name, one.metrics) for place, one in enumerate(models) if one.metrics]
    times = [(model.name, parts) for model in runs if (parts := time_parts(model.metrics, model.events))]
    values: dict[str, Any] = dict(
        title=report.title,
        models=models,
        versions=" · ".join(f"{name} {value}" for name, value in report.versions.items()),
        # The headline of a model is its result on the first set that was evaluated.
        tiles=[
            (place, model, evaluated[0])
            for place, model in enumerate(models)
            if (evaluated := [one for one in model.results if one.error is None])
        ],
        verdicts=[(model.name, verdict(model)) for model in runs if model.metrics or model.events],
        comparison=comparison(runs),
        facts=[(model.name, model.facts) for model in runs if model.facts],
        **set_sections(models),
        training_figures=training_figures(trained, {one.name: one.cosines for one in runs if one.cosines is not None})
        if trained
        else [],
        times=bars(times),
        ranks=[
            section
            for model in runs
            if (section := rank_section(model.name, model.rank_rows, model.profiles, path)) is not None
        ],
        time_lines=[
            (model.name, time_line_picture(model.events), rows) for model in runs if (rows := time_line(model.events))
        ],
        centres=[(model, _centre_figures(model.centres)) for model in runs if model.centres is not None],
        training_images=[(model.name, model.training_images) for model in runs if model.training_images is not None],
        sample_faces=[row for model in runs[:1] for row in model.sample_faces],
        configurations=[(model.name, model.config_text) for model in runs if model.config_text],
    )
    if values["comparison"] and not values["failures"]:
        values["overview"] = []  # the comparison has the numbers of all sets
    contents = [section for key, section in SECTIONS.items() if values[key]]
    return render(
        "evaluation/report/report.html.j2",
        script=Markup(source("report.js")),
        script_digest=script_digest(),
        contents=contents,
        sections=SECTIONS,
        protocols=PROTOCOLS,
        headline=headline,
        colour=colour,
        **values,
    )


def script_digest() -> str:
    """Returns the digest by which the content security policy allows this one script."""
    # The template puts the script on lines of its own, and the digest is over everything between the tags.
    content = f"\n{source('report.js')}"
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _centre_figures(health: CentreHealth) -> list[Figure]:
    figures = []
    for title, values, label in (
        ("Length of the centres", health.norms, "length"),
        ("Nearest centre of another class", health.nearest, "cosine similarity"),
    ):
        if len(values):
            axis = linear_axis(label, [float(values.min()), float(values.max())])
            edges = np.linspace(axis.low, axis.high, _NUM_BINS + 1)
            shares = np.histogram(values, edges)[0] / len(values)
            figures.append(histogram(title, [("series-0", shares)], edges, axis, y_label="share of centres, %"))
    return figures


_COMPARED_FACTS = ("Final loss", "Images per second", "Duration", "Steps", "Ranks", "GPU")


def comparison(runs: Sequence[ModelReport]) -> dict[str, Any]:
    """Returns a table of several runs, one per row: results, speed, and the settings that are not the same in all."""
    if len(runs) < 2:
        return {}
    columns: dict[str, list[tuple[str, float | None, bool]]] = {}
    """Text, number to sort by, and whether it is the best, of each run."""
    for name in names_of_sets(runs):
        values = [None if (result := run.on(name)) is None else quoted(result) for run in runs]
        cells = overview_cells(name, runs)
        columns[name] = [(cell.text, value, cell.is_best) for cell, value in zip(cells, values, strict=True)]
    others = {name: [run.facts.get(name, ABSENT) for run in runs] for name in _COMPARED_FACTS}
    # Every run has a folder of its own, which tells nothing about it.
    settings = [{**_flat(run.config_text), "train.run_dir": ""} for run in runs]
    others |= {name: [one.get(name, ABSENT) for one in settings] for one in settings for name in one}
    for name, texts in others.items():
        if len(set(texts)) > 1:
            columns[name] = [(text, _number(text), False) for text in texts]
    if "Duration" in columns:
        seconds = [sum(passed_s(run.metrics, run.events)) for run in runs]
        columns["Duration"] = [(text, s, False) for (text, _, _), s in zip(columns["Duration"], seconds, strict=True)]
    rows = list(zip((run.name for run in runs), zip(*columns.values(), strict=True), strict=True))
    return {"columns": list(columns), "rows": rows} if columns else {}


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _flat(text: str) -> dict[str, str]:
    """Returns the settings of a recipe as section.key; nothing if it cannot be read."""
    try:
        sections: Mapping[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
    return {
        f"{section}.{key}": str(value)
        for section, values in sections.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }


# ---- sections on evaluation sets: one table over all sets, and for each set numbers, charts and hardest pairs ------------


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


def _panel(name: str, models: Sequence[ModelReport]) -> dict[str, Any]:
    """Returns everything about one set, for the template; nothing if no model was evaluated on it."""
    done = [(place, model, result) for place, model in enumerate(models) if (result := model.on(name))]
    done = [(place, model, result) for place, model, result in done if result.error is None]
    # Two runs may have evaluated different things under one name; only numbers of one kind can be compared.
    alike = [(place, model, result) for place, model, result in done if result.kind == done[0][2].kind]
    if not alike:
        return {}
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
    return {
        "lead": " ".join(filter(None, lead)),
        "columns": [model.name for _, model, _ in alike],
        "rows": [row for row in rows if row[0] not in empty],
        "figures": figures,
        # For each model: the threshold, TAR and false accepts at each false accept rate.
        "operating_points": [
            (name, points)
            for name, result in own
            if result.curves and (points := operating_points(result.curves, result.numbers.get("threshold_at_far", {})))
        ],
        # Models with their results that have hard pairs, or confused classes.
        "mistakes": [(name, result) for name, result in own if result.hard_pairs],
        "examples": [(model.name, result) for _, model, result in alike if result.examples is not None],
    }


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
