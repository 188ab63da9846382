"""Collects the content of a report from run folders; training and evaluation wrote everything it shows."""

import datetime
import logging
import platform
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megaclass
from megaclass.config.read import load_config_values
from megaclass.config.schema import Config
from megaclass.errors import DataError
from megaclass.evaluation.centres import CentreHealth, centre_health, read_run_centres
from megaclass.evaluation.examples import Examples
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.report.curves import HealthyRange, Rows, cosine_range, loss_without_knowledge, passed_s
from megaclass.evaluation.report.ranks import RankRow, rank_rows
from megaclass.evaluation.results import NUMBERS_FILE, read_arrays, read_results
from megaclass.evaluation.training_images import read_training_images
from megaclass.metrics_file import is_number, read_metrics, read_summary
from megaclass.progress import OnProgress, duration_text, no_progress
from megaclass_launch.errors import UserError
from megaclass_launch.events_file import read_events
from megaclass_launch.files import published_file

_log = logging.getLogger("megaclass.evaluation")
BASELINES_FOLDER = "baselines"
_FACES_FILE = "faces.npz"


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
    loss_without_knowledge: float | None = None
    """Loss of a network that tells no class from another, by the settings; None if it is not known."""
    profiles: Sequence[Path] = ()
    """Traces and memory snapshots of train.profile."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts about the run in the order shown: data and its fingerprint, ranks, classes, steps."""
    config_text: str = ""
    centres: CentreHealth | None = None
    training_images: Examples | None = None
    sample_faces: Sequence[Sequence[bytes]] = ()
    """Encoded training images, one row per identity."""

    def on(self, name: str) -> SetResult | None:
        """Returns the result on the set of that name."""
        return next((result for result in self.results if result.name == name), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    """The content of a page."""

    title: str
    models: Sequence[ModelReport]
    versions: Mapping[str, str] = field(default_factory=dict)


def report_of_runs(
    runs: Sequence[Path],
    *,
    device: torch.device,
    known_centres: Mapping[Path, CentreHealth | None] | None = None,
) -> ReportData:
    """Reads the runs (or folders that `megaclass evaluate --out` wrote) in the given order.

    known_centres: of runs whose centres have been measured already.
    """
    known_centres = known_centres or {}
    models: list[ModelReport] = []
    for run in runs:
        centres = known_centres[run] if run in known_centres else measured_centres(run, device)
        models.append(_read_run(run, _name_of(run, runs), centres))
        # Baselines are the same for every run on the same data; a comparison of runs goes without them.
        if len(runs) == 1:
            models += [
                ModelReport(name=folder.name, results=read_results(folder), is_baseline=True)
                for folder in sorted((run / BASELINES_FOLDER).glob("*/"), reverse=True)
            ]
    title = f"Megaclass run {runs[0].name}" if len(runs) == 1 else f"Megaclass: {', '.join(m.name for m in models)}"
    return ReportData(title=title, models=models, versions=versions())


def versions() -> dict[str, str]:
    """Returns the versions that may explain a difference between two runs."""
    return {
        "megaclass": megaclass.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }


def write_faces(run: Path, rows: Sequence[Sequence[bytes]]) -> None:
    """Stores a few training images in the run folder, so a report does not need the data."""
    arrays = {
        f"{row:03d}_{column:03d}": np.frombuffer(encoded, dtype=np.uint8)
        for row, images in enumerate(rows)
        for column, encoded in enumerate(images)
    }
    with published_file(run / _FACES_FILE, is_private=True) as unfinished:
        np.savez(unfinished, **arrays)  # type: ignore[arg-type]


def read_faces(run: Path) -> list[list[bytes]]:
    """Returns the training images that `write_faces` stored, one row per identity."""
    path = run / _FACES_FILE
    if not path.is_file():
        return []
    rows: dict[str, list[bytes]] = {}
    for name, encoded in sorted(read_arrays(path).items()):
        rows.setdefault(name.split("_")[0], []).append(encoded.tobytes())
    return list(rows.values())


def _read_run(run: Path, name: str, centres: CentreHealth | None) -> ModelReport:
    known = (NUMBERS_FILE, "metrics.jsonl", "summary.json", "config.toml")
    if not any((run / one).is_file() for one in known):
        raise DataError(f"{run} is not a run folder: looked for {', '.join(known)}.")
    summary = read_summary(run)
    rows, num_damaged = read_metrics(run / "metrics.jsonl")
    if num_damaged:
        _log.warning("%s: %d damaged line(s) left out of the report.", run / "metrics.jsonl", num_damaged)
    path = run / "config.toml"
    config_text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    config = _config_of(config_text)
    stated = summary.get("num_classes")
    num_classes = stated if isinstance(stated, int) else None
    # The values that can be drawn as curves.
    metrics = [{key: value for key, value in row.items() if value is None or is_number(value)} for row in rows]
    events = read_events(run)[0]
    return ModelReport(
        name=name,
        results=read_results(run),
        metrics=metrics,
        rank_rows=rank_rows(rows),
        events=events,
        profiles=sorted((run / "profile").glob("rank-*")),
        facts=_facts(summary, metrics, events),
        config_text=config_text,
        cosines=cosine_range(config.head, num_classes) if config else None,
        loss_without_knowledge=loss_without_knowledge(config.head, num_classes) if config else None,
        centres=centres,
        training_images=_training_images(run),
        sample_faces=read_faces(run),
    )


def _config_of(text: str) -> Config | None:
    """Returns the settings of a run; None if they cannot be read, which costs what is derived from them."""
    try:
        return load_config_values(tomllib.loads(text), where="config.toml") if text else None
    except (UserError, tomllib.TOMLDecodeError, RecursionError):
        return None


def _name_of(run: Path, runs: Sequence[Path]) -> str:
    """Returns the name of the folder, with its parent's name if two runs share it."""
    name = run.resolve().name
    return name if [one.resolve().name for one in runs].count(name) == 1 else f"{run.resolve().parent.name}/{name}"


_FACTS = {
    "started_at": ("Started", ""),
    "finished_at": ("Finished", ""),
    "duration": ("Duration", ""),
    "command": ("Command", ""),
    "host": ("Host", ""),
    "gpu": ("GPU", ""),
    "gpu_memory": ("Largest allocation on the GPU", ""),
    "version": ("Version of megaclass", ""),
    "data": ("Data", ""),
    "data_fingerprint": ("Data fingerprint", ""),
    "num_classes": ("Classes", ","),
    "num_images": ("Training images", ","),
    "minor_subcentres": ("In minor sub-centres", ""),
    "image_size": ("Image size", ""),
    "backbone": ("Backbone", ""),
    "embedding_dim": ("Numbers per embedding", ""),
    "world_size": ("Ranks", ""),
    "steps": ("Steps", ","),
    "final_loss": ("Final loss", ".4f"),
    "images_per_second": ("Images per second", ",.0f"),
}
"""Title of each fact, and the format of a number, in the order shown."""


def _facts(summary: Mapping[str, Any], metrics: Rows, events: Rows) -> dict[str, str]:
    """Returns what the summary says; of a run without one, what metrics and events tell."""
    known: dict[str, Any] = {}
    starts = [event for event in events if event["event"] in ("start", "resume")]
    if starts and 0 <= starts[0]["time"] < 4e9:
        begun = datetime.datetime.fromtimestamp(starts[0]["time"], datetime.UTC)
        known["started_at"] = begun.strftime("%Y-%m-%d %H:%M UTC")
    for key in ("version", "world_size"):
        if starts and isinstance(starts[-1].get(key), str | int):
            known[key] = starts[-1][key]
    if seconds := sum(passed_s(metrics, events)):
        known["duration"] = duration_text(seconds)
    if peaks := [row["gpu_memory_gib"] for row in metrics if row.get("gpu_memory_gib")]:
        known["gpu_memory"] = f"{max(peaks):.2f} GiB on rank 0"
    known |= {key: value for key, value in summary.items() if value is not None}
    size = known.get("image_size")
    if isinstance(size, int | list):
        # One side of a square, or [height, width]; of features the number of columns.
        sides = [*reversed(size)] if isinstance(size, list) else [size, size]
        known["image_size"] = f"{sides[0]} numbers" if sides[-1:] in ([0], [1]) else " × ".join(map(str, sides))
    return {
        title: format(known[key], form) if form and is_number(known[key]) else str(known[key])
        for key, (title, form) in _FACTS.items()
        if key in known
    }


def _training_images(run: Path) -> Examples | None:
    try:
        return read_training_images(run)
    except DataError as error:
        _log.warning("The report has no section on training images: %s", error)
        return None


def measured_centres(run: Path, device: torch.device, on_progress: OnProgress = no_progress) -> CentreHealth | None:
    """Returns None if there is no checkpoint, or for inner products; the page then has no section on centres."""
    if not (run / "checkpoints").is_dir():
        return None
    try:
        centres = read_run_centres(run)
        return centre_health(centres, device=device, on_progress=on_progress) if centres.is_cosine else None
    except UserError as error:
        _log.warning("The report has no section on class centres: %s", error)
        return None
