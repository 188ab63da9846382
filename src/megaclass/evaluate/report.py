"""One run -> one self-contained report.html: curves, ROC, histograms, faces, mistakes, numbers, configuration.

The page opens from disk, carries its pictures as data URIs, runs no script and may fetch nothing (its own content
policy says so). Light or dark follows the reader's system.
"""

import base64
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from megaclass.evaluate.charts import (
    NARROW,
    Series,
    fixed_axis,
    histogram_chart,
    line_chart,
    linear_axis,
    log_axis,
    smoothed,
)
from megaclass.evaluate.report_style import STYLE
from megaclass.evaluate.verification import FAR_TARGETS, ScoredPairs, roc_curve

_MISTAKES_SHOWN = 12
_HISTOGRAM_BINS = 60


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    """Everything the page shows. What is empty is left out."""

    title: str
    metrics: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl: step, loss, learning_rate, images_per_second. A row may lack a value."""
    model: ScoredPairs
    baselines: Sequence[ScoredPairs] = ()
    """Scored on the same pairs, shown beside the model."""
    pair_images: Sequence[bytes] = ()
    """The 2N encoded images of the pairs, for the pictures of the mistakes."""
    sample_faces: Sequence[Sequence[bytes]] = ()
    """Encoded training images, one row per identity."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What to know about the run, in the order shown: ranks, classes, steps ..."""
    config_text: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path, report: ReportData) -> None:
    """Writes the page; a reader never sees half of one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(render_report(report), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def render_report(report: ReportData) -> str:
    sections = [
        _header(report),
        _section("Verification", _verification_lead(report), _numbers_table(report), _verification_charts(report)),
        _section("Training", _training_charts(report.metrics)),
        _samples(report.sample_faces),
        _mistakes(report),
        _section("Run", _definitions(report.facts), _versions(report.versions))
        if report.facts or report.versions
        else "",
        _section("Configuration", f"<pre>{escape(report.config_text)}</pre>") if report.config_text else "",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _header(report: ReportData) -> str:
    tiles = []
    for place, scored in enumerate([report.model, *report.baselines]):
        numbers = scored.verification
        spread = f"± {100 * numbers.accuracy_std:.2f} over {len(numbers.fold_accuracies)} folds"
        tiles.append(
            f'<div class="tile"><div class="tile-name"><i class="key series-{place}"></i>{escape(scored.name)}</div>'
            f'<div class="tile-value">{100 * numbers.accuracy:.2f}<small> %</small></div>'
            f'<div class="tile-note">{spread}</div></div>'
        )
    return f'<header><h1>{escape(report.title)}</h1><div class="tiles">{"".join(tiles)}</div></header>'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _verification_lead(report: ReportData) -> str:
    numbers = report.model.verification
    return (
        f"<p>{numbers.num_pairs:,} pairs, {numbers.num_same:,} of the same identity. Accuracy: the threshold is chosen "
        f"on {len(numbers.fold_accuracies) - 1} folds and judged on the one left out.</p>"
    )


def _numbers_table(report: ReportData) -> str:
    columns = [report.model, *report.baselines]
    rows: list[tuple[str, list[str]]] = [
        ("Accuracy", [_percent(one.verification.accuracy) for one in columns]),
        ("Deviation over folds", [_percent(one.verification.accuracy_std) for one in columns]),
        ("Area under the ROC", [f"{one.verification.auc:.4f}" for one in columns]),
        ("Equal error rate", [_percent(one.verification.eer) for one in columns]),
    ]
    for far in FAR_TARGETS:
        tars = [one.verification.tar_at_far.get(far) for one in columns]
        if any(tar is not None for tar in tars):
            rows.append((f"TAR at FAR {far:g}", ["not measurable" if tar is None else _percent(tar) for tar in tars]))
    rows.append(("Best threshold (similarity)", [f"{1 - one.verification.threshold / 2:.3f}" for one in columns]))
    if any(one.verification.xnorm is not None for one in columns):
        xnorms = [one.verification.xnorm for one in columns]
        rows.append(("XNorm", ["–" if xnorm is None else f"{xnorm:.2f}" for xnorm in xnorms]))
    head = "".join(f'<th scope="col">{escape(one.name)}</th>' for one in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _verification_charts(report: ReportData) -> str:
    return f'<div class="charts">{_roc_figure(report)}{_similarity_figure(report.model)}</div>'


def _roc_figure(report: ReportData) -> str:
    columns = [report.model, *report.baselines]
    num_different = report.model.verification.num_pairs - report.model.verification.num_same
    curves = []
    for place, one in enumerate(columns):
        roc = roc_curve(one.distances_N, one.is_same_N)
        # A log axis has no zero: of the points without a false accept only the last, highest one is drawn, at the edge.
        start = int(np.flatnonzero(roc.far == 0)[-1])
        curves.append(
            Series(name=one.name, xs=roc.far[start:].tolist(), ys=roc.tar[start:].tolist(), css=f"series-{place}")
        )
    svg = line_chart(
        # The model is drawn last, over the baselines.
        curves[::-1],
        log_axis("false accept rate", 1 / max(num_different, 10), 1.0),
        fixed_axis("true accept rate", (0, 0.2, 0.4, 0.6, 0.8, 1)),
        title="ROC",
    )
    return _figure("ROC", svg, [(curve.name, curve.css) for curve in curves])


def _similarity_figure(model: ScoredPairs) -> str:
    similarities = model.similarities_N
    lowest = max(-1.0, math.floor(5 * float(similarities.min())) / 5)
    threshold = 1 - model.verification.threshold / 2
    svg = histogram_chart(
        [("series-1", similarities[~model.is_same_N]), ("series-0", similarities[model.is_same_N])],
        np.linspace(lowest, 1.0, _HISTOGRAM_BINS + 1),
        fixed_axis("cosine similarity", [fifth / 5 for fifth in range(round(5 * lowest), 6)]),
        title="Similarity of same and different pairs",
        marker=threshold,
    )
    return _figure(
        f"Similarity of pairs: {model.name}",
        svg,
        [("same identity", "series-0"), ("different", "series-1"), (f"threshold {threshold:.3f}", "marker")],
    )


def _training_charts(metrics: Sequence[Mapping[str, Any]]) -> str:
    steps, losses = _column(metrics, "loss")
    charts = [
        _curve_figure(
            "Loss",
            [
                Series(name="each row", xs=steps, ys=losses, css="series-0 faint"),
                Series(name="running mean", xs=steps, ys=smoothed(losses, span=len(losses) // 60)),
            ],
            "loss",
        )
    ]
    for key, title, label in (
        ("learning_rate", "Learning rate", "learning rate"),
        ("images_per_second", "Throughput", "images / s"),
    ):
        steps, values = _column(metrics, key)
        charts.append(_curve_figure(title, [Series(name=title, xs=steps, ys=values)], label))
    return f'<div class="charts three">{"".join(charts)}</div>'


def _curve_figure(title: str, series: Sequence[Series], label: str) -> str:
    values = [value for one in series for value in one.ys]
    if not any(math.isfinite(value) for value in values):
        return _figure(title, '<p class="empty">No values were recorded.</p>', [])
    x_axis = linear_axis("step", series[0].xs, is_tight=True)
    svg = line_chart(series, x_axis, linear_axis(label, values, from_zero=True), title=title, size=NARROW)
    return _figure(title, svg, [(one.name, one.css) for one in series] if len(series) > 1 else [])


def _column(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of the rows that have the value; JSON's null is a value that was not finite."""
    rows = [row for row in metrics if "step" in row and key in row]
    return [float(row["step"]) for row in rows], [math.nan if row[key] is None else float(row[key]) for row in rows]


def _samples(rows: Sequence[Sequence[bytes]]) -> str:
    if not rows:
        return ""
    drawn = "".join(f'<div class="faces">{"".join(_image(image, "") for image in row)}</div>' for row in rows)
    return _section("Training images", "<p>One row is one identity.</p>", f'<div class="identities">{drawn}</div>')


def _mistakes(report: ReportData) -> str:
    if not report.pair_images:
        return ""
    scored = report.model
    different, same = np.flatnonzero(~scored.is_same_N), np.flatnonzero(scored.is_same_N)
    closest = different[np.argsort(scored.distances_N[different], kind="stable")][:_MISTAKES_SHOWN]
    farthest = same[np.argsort(-scored.distances_N[same], kind="stable")][:_MISTAKES_SHOWN]
    return _section(
        "Hardest pairs",
        f"<p>Numbers are cosine similarities; {_WRONG_MARK} marks a pair that the best threshold, "
        f"{1 - scored.verification.threshold / 2:.3f}, puts on the wrong side.</p>",
        f'<div class="columns"><div><h3>Different, yet closest</h3>{_pairs(report, closest.tolist())}</div>'
        f"<div><h3>Same, yet farthest</h3>{_pairs(report, farthest.tolist())}</div></div>",
    )


_WRONG_MARK = '<b class="wrong">wrong</b>'


def _pairs(report: ReportData, indices: Iterable[int]) -> str:
    scored = report.model
    cards = []
    for index in indices:
        is_called_same = scored.distances_N[index] < scored.verification.threshold
        mark = _WRONG_MARK if is_called_same != scored.is_same_N[index] else ""
        pictures = "".join(
            _image(report.pair_images[2 * index + side], f"pair {index}, {name} image")
            for side, name in enumerate(("first", "second"))
        )
        cards.append(
            f'<div class="pair"><div class="faces">{pictures}</div>'
            f'<div class="caption"><span>{scored.similarities_N[index]:.3f} {mark}</span>'
            f'<span class="quiet">pair {index}</span></div></div>'
        )
    return f'<div class="pairs">{"".join(cards)}</div>'


def _figure(title: str, content: str, legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span><i class="key {escape(css)}"></i>{escape(name)}</span>' for name, css in legend)
    return (
        f'<figure><figcaption><b>{escape(title)}</b><span class="legend">{keys}</span></figcaption>{content}</figure>'
    )


def _definitions(facts: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{items}</dl>" if facts else ""


def _versions(versions: Mapping[str, str]) -> str:
    return f'<p class="quiet">{escape(" · ".join(f"{name} {value}" for name, value in versions.items()))}</p>'


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _image(encoded: bytes, alt: str) -> str:
    return f'<img src="{_data_uri(encoded)}" alt="{escape(alt)}">'


def _data_uri(encoded: bytes) -> str:
    if encoded.startswith(b"\xff\xd8\xff"):
        kind = "jpeg"
    elif encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        kind = "png"
    else:  # whatever else the data may hold (BMP, WebP ...), not every browser shows
        from PIL import Image

        with Image.open(io.BytesIO(encoded)) as image, io.BytesIO() as converted:
            image.convert("RGB").save(converted, format="PNG")
            encoded, kind = converted.getvalue(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode('ascii')}"
