"""Renders one self-contained report.html over one or several runs: numbers, curves, hardest pairs, centres, configuration.

The page is the template report.html.j2 with report.css and report.js inlined. It opens from disk and carries its pictures
as data URIs. Its content security policy forbids fetching anything and allows one script, named by its digest. Light or
dark follows the reader's system.
"""

import base64
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from megaclass.evaluate.protocol import Cell, SetResult
from megaclass.evaluate.protocols.centre_health import CentreHealth
from megaclass.evaluate.report.charts import (
    NARROW,
    Figure,
    Series,
    colour,
    histogram_chart,
    line_chart,
    linear_axis,
    smoothed,
)
from megaclass.evaluate.report.pictures import picture
from megaclass.evaluate.report.ranks import RankRow, rank_section
from megaclass.evaluate.report.sets import ModelResults, set_sections
from megaclass.evaluate.report.time_line import time_line
from megaclass.evaluate.report.verdict import verdict
from megaclass.evaluate.results import headline
from megaclass.files import write_text

_FOLDER = Path(__file__).parent
_NUM_BINS = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelReport:
    """One run, or a baseline to compare it with. Empty fields are left out of the page."""

    name: str
    results: Sequence[SetResult] = ()
    is_baseline: bool = False
    """Shown in numbers and ROC, without histogram and images of its own."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """Rows of metrics.jsonl: step, loss, learning_rate, images_per_second. A row may lack a value."""
    rank_rows: Sequence[RankRow] = ()
    """Times of the ranks, from the same rows."""
    events: Sequence[Mapping[str, Any]] = ()
    """Rows of events.jsonl."""
    profiles: Sequence[Path] = ()
    """Traces and memory snapshots of train.profile."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts about the run in the order shown: data and its fingerprint, ranks, classes, steps."""
    config_text: str = ""
    centres: CentreHealth | None = None
    sample_faces: Sequence[Sequence[bytes]] = ()
    """Encoded training images, one row per identity."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    """The content of a page."""

    title: str
    models: Sequence[ModelReport]
    versions: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path, report: ReportData) -> None:
    """Writes the page, which appears whole or not at all."""
    # The page may show faces.
    write_text(path, render_report(report, path), is_private=True)


def render_report(report: ReportData, path: Path | None = None) -> str:
    """Returns the page. The template decides which sections appear: one without content is left out.

    path: the file of the page, to which links to other files of a run are relative.
    """
    runs = [(place, model) for place, model in enumerate(report.models) if not model.is_baseline]
    trained = [(place, model) for place, model in runs if model.metrics]
    return _template().render(
        title=report.title,
        style=Markup(_text("report.css")),
        script=Markup(_text("report.js")),
        script_digest=script_digest(),
        tiles=_tiles(report.models),
        verdicts=[(model.name, verdict(model.metrics, model.events)) for _, model in trained],
        time_lines=[(model.name, rows) for _, model in runs if (rows := time_line(model.events))],
        **set_sections(
            [ModelResults(name=one.name, results=one.results, is_baseline=one.is_baseline) for one in report.models]
        ),
        training_figures=_training_figures(trained) if trained else [],
        times=_times([model for _, model in trained]),
        ranks=[
            section
            for _, model in runs
            if (section := rank_section(model.name, model.rank_rows, model.profiles, path)) is not None
        ],
        centres=[
            _centres(model, model.centres, is_alone=len(runs) == 1) for _, model in runs if model.centres is not None
        ],
        sample_faces=[[picture(one) for one in row] for _, model in runs[:1] for row in model.sample_faces],
        facts=[(model.name, model.facts) for _, model in runs if model.facts],
        versions=" · ".join(f"{name} {value}" for name, value in report.versions.items()),
        configurations=[(model.name, model.config_text) for _, model in runs if model.config_text],
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2")


def script_digest() -> str:
    """Returns the digest by which the content security policy allows this one script."""
    # The template puts the script on lines of its own, and the digest is over everything between the tags.
    content = f"\n{_text('report.js')}"
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _tiles(models: Sequence[ModelReport]) -> list[dict[str, Any]]:
    """Returns one tile per model: its headline on the first set that was evaluated."""
    tiles = []
    for place, model in enumerate(models):
        first = next((result for result in model.results if result.error is None), None)
        if first is None:
            continue
        value, _, deviation = headline(first).partition(" ± ")
        note = f"± {deviation} over the folds, {first.name}" if deviation else first.name
        tiles.append(
            {"name": model.name, "colour": colour(place), "value": value, "note": note, "is_long": not deviation}
        )
    return tiles


def _training_figures(runs: Sequence[tuple[int, ModelReport]]) -> list[Figure]:
    charts = [
        ("learning_rate", "Learning rate", "learning rate"),
        ("images_per_second", "Throughput", "images / s"),
    ]
    if any("verification_accuracy" in row for _, model in runs for row in model.metrics):
        charts.append(("verification_accuracy", "Verification during training", "accuracy"))
    figures = [_loss_figure(runs)]
    for key, title, label in charts:
        series = []
        for place, model in runs:
            steps, values = _column(model.metrics, key)
            series.append(Series(name=model.name, xs=steps, ys=values, css=colour(place)))
        figures.append(_curves_figure(title, series, label, has_toggles=len(series) > 1))
    return figures


def _loss_figure(runs: Sequence[tuple[int, ModelReport]]) -> Figure:
    """Draws running means; a run alone also shows the single values its mean is made of."""
    is_alone = len(runs) == 1
    series = []
    for place, model in runs:
        steps, losses = _column(model.metrics, "loss")
        if is_alone:
            series.append(Series(name="each row", xs=steps, ys=losses, css="series-0 faint"))
        mean = smoothed(losses, span=len(losses) // 60)
        series.append(Series(name="running mean" if is_alone else model.name, xs=steps, ys=mean, css=colour(place)))
    return _curves_figure("Loss", series, "loss", has_toggles=not is_alone)


def _curves_figure(title: str, series: Sequence[Series], label: str, *, has_toggles: bool) -> Figure:
    values = [value for one in series for value in one.ys]
    if not any(math.isfinite(value) for value in values):
        return Figure(title=title)
    x_axis = linear_axis("step", [step for one in series for step in one.xs], is_tight=True)
    svg = line_chart(series, x_axis, linear_axis(label, values, from_zero=True), title=title, size=NARROW)
    legend = [(one.name, one.css) for one in series] if len(series) > 1 else []
    return Figure(title=title, svg=svg, legend=legend, has_toggles=has_toggles)


def _column(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Returns steps and values of the rows that have the value; JSON's null stands for a value that was not finite."""
    rows = [row for row in metrics if "step" in row and key in row]
    return [float(row["step"]) for row in rows], [math.nan if row[key] is None else float(row[key]) for row in rows]


def _times(models: Sequence[ModelReport]) -> list[dict[str, Any]]:
    times = []
    for model in models:
        parts = time_parts(model.metrics)
        if parts:
            total = sum(parts.values()) or 1.0
            words = ", ".join(f"{name} {seconds:,.1f} s ({seconds / total:.0%})" for name, seconds in parts.items())
            shares = [f"{100 * seconds / total:.2f}" for seconds in parts.values()]
            times.append({"text": f"{model.name}: {words}", "shares": shares})
    return times


def time_parts(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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


def _centres(model: ModelReport, health: CentreHealth, *, is_alone: bool) -> dict[str, Any]:
    figures = []
    for title, values, label in (
        ("Length of the centres", health.norms, "length"),
        ("Nearest centre of another class", health.nearest, "cosine similarity"),
    ):
        if len(values):
            axis = linear_axis(label, [float(values.min()), float(values.max())])
            edges = np.linspace(axis.low, axis.high, _NUM_BINS + 1)
            shares = np.histogram(values, edges)[0] / len(values)
            svg = histogram_chart([("series-0", shares)], edges, axis, title=title, y_label="share of centres, %")
            figures.append(Figure(title=title, svg=svg))
    checked = "all" if health.num_checked == health.num_classes else f"{health.num_checked:,}, spread evenly,"
    warning = f" {health.num_unusable} are zero or not finite." if health.num_unusable else ""
    return {
        "title": "Class centres" if is_alone else f"Class centres: {model.name}",
        "text": f"{health.num_classes:,} classes; the nearest of another class was looked for from {checked} of them."
        f"{warning} Two names whose centres nearly coincide are often one person: likely label noise.",
        "figures": figures,
        "rows": [(first, [Cell(second), Cell(f"{score:.3f}")]) for first, second, score in health.closest_pairs],
    }
