"""Renders one self-contained report.html over one or several runs: numbers, curves, hardest pairs, centres, configuration.

The page is the template report.html.j2 with report.css and report.js inlined. It opens from disk and carries its pictures
as data URIs. Its content security policy forbids fetching anything and allows one script, named by its digest. Light or
dark follows the reader's system.
"""

import base64
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from megaclass.evaluation.centres import CentreHealth
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.report.charts import Figure, bars, colour, histogram, linear_axis
from megaclass.evaluation.report.curves import passed_s, time_parts, training_figures
from megaclass.evaluation.report.from_runs import ModelReport, ReportData
from megaclass.evaluation.report.ranks import rank_section, time_line, time_line_picture
from megaclass.evaluation.report.sets import ABSENT, names_of_sets, overview_cells, quoted, set_sections
from megaclass.evaluation.report.templates import render, source
from megaclass.evaluation.report.verdict import verdict
from megaclass.evaluation.results import headline
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
