"""Renders one self-contained report.html over one or several runs: numbers, curves, hardest pairs, centres, configuration.

The page is the template report.html.j2 with report.css and report.js inlined. It opens from disk and carries its pictures
as data URIs. Its content security policy forbids fetching anything and allows one script, named by its digest. Light or
dark follows the reader's system.
"""

import base64
import functools
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megaclass.evaluation.examples import Examples
from megaclass.evaluation.protocol import Cell, Row, SetResult
from megaclass.evaluation.protocols.centre_health import CentreHealth
from megaclass.evaluation.report.charts import colour
from megaclass.evaluation.report.classes import centres_section, picture, training_images_section
from megaclass.evaluation.report.curves import HealthyRange, times, training_figures
from megaclass.evaluation.report.ranks import RankRow, rank_section, time_line, time_line_picture
from megaclass.evaluation.report.sets import ModelResults, set_sections
from megaclass.evaluation.report.verdict import History, verdict
from megaclass.evaluation.results import headline
from megaclass_launch.files import write_text

_FOLDER = Path(__file__).parent


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
    cosines: HealthyRange | None = None
    """Healthy range of the target cosine, by the settings."""
    profiles: Sequence[Path] = ()
    """Traces and memory snapshots of train.profile."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts about the run in the order shown: data and its fingerprint, ranks, classes, steps."""
    config_text: str = ""
    centres: CentreHealth | None = None
    training_images: Examples | None = None
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
    trained = [(place, model.name, model.metrics) for place, model in runs if model.metrics]
    values: dict[str, Any] = dict(
        style=Markup(_text("report.css")),
        script=Markup(_text("report.js")),
        script_digest=script_digest(),
        tiles=_tiles(report.models),
        verdicts=[
            (model.name, verdict(History(model.metrics, model.events, model.rank_rows, model.cosines)))
            for _, model in runs
            if model.metrics or model.events
        ],
        time_lines=[
            (model.name, time_line_picture(model.events), rows)
            for _, model in runs
            if (rows := time_line(model.events))
        ],
        **set_sections(
            [ModelResults(name=one.name, results=one.results, is_baseline=one.is_baseline) for one in report.models]
        ),
        training_figures=training_figures(
            trained, {model.name: model.cosines for _, model in runs if model.cosines is not None}
        )
        if trained
        else [],
        times=times(trained),
        ranks=[
            section
            for _, model in runs
            if (section := rank_section(model.name, model.rank_rows, model.profiles, path)) is not None
        ],
        centres=[
            centres_section(model.name, model.centres, model.training_images, is_alone=len(runs) == 1)
            for _, model in runs
            if model.centres is not None
        ],
        sample_faces=[[picture(one) for one in row] for _, model in runs[:1] for row in model.sample_faces],
        facts=[(model.name, model.facts) for _, model in runs if model.facts],
        versions=" · ".join(f"{name} {value}" for name, value in report.versions.items()),
        differences=differing_settings([(model.name, model.config_text) for _, model in runs if model.config_text]),
        run_names=[model.name for _, model in runs if model.config_text],
        training_images=[
            training_images_section(model.name, model.training_images, is_alone=len(runs) == 1)
            for _, model in runs
            if model.training_images is not None
        ],
        configurations=[(model.name, model.config_text) for _, model in runs if model.config_text],
    )
    return _template().render(title=report.title, contents=_contents(values), sections=SECTIONS, **values)


# Sections in the order of the page: the template's value that must not be empty, anchor, title. The template asks for anchor
# and title by the name of the value, so a new section is a line here and a block there.
SECTIONS: dict[str, tuple[str, str]] = {
    "facts": ("run", "Run"),
    "differences": ("differences", "Settings that differ"),
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


def _contents(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [section for key, section in SECTIONS.items() if values[key]]


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


_ABSENT = "–"


def differing_settings(configurations: Sequence[tuple[str, str]]) -> list[Row]:
    """Returns (section.key, values) of the settings that are not the same in all runs; empty for a run alone."""
    if len(configurations) < 2:
        return []
    settings = [_flat(text) for _, text in configurations]
    names = list(dict.fromkeys(name for one in settings for name in one))
    # Every run has a folder of its own, which tells nothing about it.
    names = [name for name in names if name != "train.run_dir"]
    rows = [(name, [one.get(name, _ABSENT) for one in settings]) for name in names]
    return [(name, [Cell(value) for value in values]) for name, values in rows if len(set(values)) > 1]


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
