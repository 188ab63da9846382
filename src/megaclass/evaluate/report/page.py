"""Runs -> one self-contained report.html: curves, sets, faces, mistakes, centres, numbers, configuration.

The page opens from disk, carries its pictures as data URIs, and its own content policy lets it fetch nothing and run one
script, named by its digest: tabs and legends. Light or dark follows the reader's system.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from megaclass.evaluate.protocols.centre_health import CentreHealth
from megaclass.evaluate.report.charts import NARROW, Series, histogram_chart, line_chart, linear_axis, smoothed
from megaclass.evaluate.report.parts import colour, definitions, figure, image, section, table, tabs
from megaclass.evaluate.report.script import SCRIPT, script_digest
from megaclass.evaluate.report.sets import headline, set_sections
from megaclass.evaluate.report.style import STYLE
from megaclass.evaluate.results import SetResult
from megaclass.files import write_text

_NUM_BINS = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelReport:
    """One run, or something to compare it with. What is empty is left out."""

    name: str
    results: Sequence[SetResult] = ()
    is_baseline: bool = False
    """Shown beside the others in numbers and ROC, without pictures of its own."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """Rows of metrics.jsonl: step, loss, learning_rate, images_per_second. A row may lack a value."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What to know about the run, in the order shown: data and its fingerprint, ranks, classes, steps ..."""
    config_text: str = ""
    centres: CentreHealth | None = None
    sample_faces: Sequence[Sequence[bytes]] = ()
    """Encoded training images, one row per identity."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    title: str
    models: Sequence[ModelReport]
    versions: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path, report: ReportData) -> None:
    """Writes the page; a reader never sees half of one."""
    # The page may show faces.
    write_text(path, render_report(report), is_private=True)


def render_report(report: ReportData) -> str:
    runs = [(place, model) for place, model in enumerate(report.models) if not model.is_baseline]
    sections = [
        _header(report),
        *set_sections([(model.name, model.results, model.is_baseline) for model in report.models]),
        _training([(place, model) for place, model in runs if model.metrics]),
        *(_centres(model, model.centres, is_alone=len(runs) == 1) for _, model in runs if model.centres is not None),
        *(_samples(model.sample_faces) for _, model in runs[:1] if model.sample_faces),
        _facts([model for _, model in runs], report.versions),
        _configuration([model for _, model in runs if model.config_text]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'; img-src data:; script-src '{script_digest()}'\">"
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in sections if part)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _header(report: ReportData) -> str:
    tiles = []
    for place, model in enumerate(report.models):
        done = [result for result in model.results if result.error is None]
        if not done:
            continue
        value, _, note = headline(done[0]).partition(" ± ")
        spread = f"± {note} over the folds, {done[0].name}" if note else done[0].name
        tiles.append(
            f'<div class="tile"><div class="tile-name"><i class="key {colour(place)}"></i>{escape(model.name)}</div>'
            f'<div class="tile-value{"" if note else " long"}">{escape(value)}</div>'
            f'<div class="tile-note">{escape(spread)}</div></div>'
        )
    return f'<header><h1>{escape(report.title)}</h1><div class="tiles">{"".join(tiles)}</div></header>'


def _training(runs: Sequence[tuple[int, ModelReport]]) -> str:
    if not runs:
        return ""
    charts = [_loss_figure(runs)]
    for key, title, label in (
        ("learning_rate", "Learning rate", "learning rate"),
        ("images_per_second", "Throughput", "images / s"),
    ):
        charts.append(_curves_figure(title, [_curve(place, model, key) for place, model in runs], label))
    if any("verification_accuracy" in row for _, model in runs for row in model.metrics):
        accuracy = [_curve(place, model, "verification_accuracy") for place, model in runs]
        charts.append(_curves_figure("Verification during training", accuracy, "accuracy"))
    return section("Training", f'<div class="charts three">{"".join(charts)}</div>', _where_time_went(runs))


def _loss_figure(runs: Sequence[tuple[int, ModelReport]]) -> str:
    """A run alone also shows the rows its mean is made of; several runs show their means."""
    series = []
    for place, model in runs:
        steps, losses = _column(model.metrics, "loss")
        if len(runs) == 1:
            series.append(Series(name="each row", xs=steps, ys=losses, css="series-0 faint"))
        mean = smoothed(losses, span=len(losses) // 60)
        series.append(
            Series(name="running mean" if len(runs) == 1 else model.name, xs=steps, ys=mean, css=colour(place))
        )
    return _curves_figure("Loss", series, "loss", has_toggles=len(runs) > 1)


def _curve(place: int, model: ModelReport, key: str) -> Series:
    steps, values = _column(model.metrics, key)
    return Series(name=model.name, xs=steps, ys=values, css=colour(place))


def _curves_figure(title: str, series: Sequence[Series], label: str, *, has_toggles: bool | None = None) -> str:
    values = [value for one in series for value in one.ys]
    if not any(math.isfinite(value) for value in values):
        return figure(title, '<p class="empty">No values were recorded.</p>', [])
    x_axis = linear_axis("step", [step for one in series for step in one.xs], is_tight=True)
    svg = line_chart(series, x_axis, linear_axis(label, values, from_zero=True), title=title, size=NARROW)
    legend = [(one.name, one.css) for one in series] if len(series) > 1 else []
    return figure(title, svg, legend, has_toggles=len(series) > 1 if has_toggles is None else has_toggles)


def _column(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of the rows that have the value; JSON's null is a value that was not finite."""
    rows = [row for row in metrics if "step" in row and key in row]
    return [float(row["step"]) for row in rows], [math.nan if row[key] is None else float(row[key]) for row in rows]


def _where_time_went(runs: Sequence[tuple[int, ModelReport]]) -> str:
    rows = []
    for _, model in runs:
        parts = time_parts(model.metrics)
        if parts:
            total = sum(parts.values()) or 1.0
            bars = "".join(
                f'<span class="part part-{place}" style="width:{100 * seconds / total:.2f}%"></span>'
                for place, seconds in enumerate(parts.values())
            )
            words = ", ".join(f"{name} {seconds:,.1f} s ({seconds / total:.0%})" for name, seconds in parts.items())
            rows.append(
                f'<div class="time"><div class="bar">{bars}</div><p>{escape(f"{model.name}: {words}")}</p></div>'
            )
    return f"<h3>Where time went</h3>{''.join(rows)}" if rows else ""


def time_parts(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of computing, and of waiting for data and evaluating where the rows say so.

    A row's share of waiting is of its time without evaluation.
    """
    seconds: dict[str, float] = {}
    before = 0.0
    for row in metrics:
        if row.get("elapsed_s") is None:
            continue
        # A resumed run counts from zero again.
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


def _centres(model: ModelReport, health: CentreHealth, *, is_alone: bool) -> str:
    norms, nearest = health.norms, health.nearest
    charts = []
    for title, values, label in (
        ("Length of the centres", norms, "length"),
        ("Nearest centre of another class", nearest, "cosine similarity"),
    ):
        if len(values):
            axis = linear_axis(label, [float(values.min()), float(values.max())])
            edges = np.linspace(axis.low, axis.high, _NUM_BINS + 1)
            shares = np.histogram(values, edges)[0] / len(values)
            chart = histogram_chart([("series-0", shares)], edges, axis, title=title, y_label="share of centres, %")
            charts.append(figure(title, chart, []))
    checked = "all" if health.num_checked == health.num_classes else f"{health.num_checked:,}, spread evenly,"
    warning = f" {health.num_unusable} are zero or not finite." if health.num_unusable else ""
    rows = [(first, [second, f"{score:.3f}"]) for first, second, score in health.closest_pairs]
    return section(
        "Class centres" if is_alone else f"Class centres: {model.name}",
        f"<p>{health.num_classes:,} classes; the nearest of another class was looked for from {checked} of them.{warning} "
        f"Two names whose centres nearly coincide are often one person: likely label noise.</p>",
        f'<div class="charts">{"".join(charts)}</div>',
        table(["nearest to", "cosine"], rows) if rows else "",
    )


def _samples(rows: Sequence[Sequence[bytes]]) -> str:
    drawn = "".join(f'<div class="faces">{"".join(image(one, "") for one in row)}</div>' for row in rows)
    return section("Training images", "<p>One row is one identity.</p>", f'<div class="identities">{drawn}</div>')


def _facts(models: Sequence[ModelReport], versions: Mapping[str, str]) -> str:
    known = [(model.name, definitions(model.facts)) for model in models if model.facts]
    said = escape(" · ".join(f"{name} {value}" for name, value in versions.items()))
    if not known and not said:
        return ""
    return section("Run", tabs("facts", known) if known else "", f'<p class="quiet">{said}</p>' if said else "")


def _configuration(models: Sequence[ModelReport]) -> str:
    panels = [(model.name, f"<pre>{escape(model.config_text)}</pre>") for model in models]
    return section("Configuration", tabs("config", panels)) if panels else ""
