"""After the last step: verification on all ranks, then summary, report and exported model from rank 0."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megaclass
from megaclass.config import Config, to_toml
from megaclass.data.pairs import PairSet, read_pairs
from megaclass.data.source import RecordSource
from megaclass.evaluate.baselines import score_histograms, score_pixels
from megaclass.evaluate.embed import embed_pairs
from megaclass.evaluate.report import ReportData, write_report
from megaclass.evaluate.verification import ScoredPairs, score_embeddings
from megaclass.export.onnx_file import export_onnx
from megaclass.export.safetensors_file import save_model
from megaclass.train.build import Model
from megaclass.train.loop import Outcome
from megaclass.train.run_folder import RunFolder
from megaclass.world import World

_SAMPLE_ROWS, _SAMPLE_COLUMNS = 6, 8


def evaluate_run(
    config: Config, model: Model, source: RecordSource, device: torch.device
) -> list[tuple[PairSet, ScoredPairs]]:
    """Collective. Every *.bin beside the data, in the published ten-fold protocol; all ranks embed a part."""
    scores = []
    for path in sorted(Path(config.data.path).glob("*.bin")):
        pair_set = read_pairs(path)
        embeddings, xnorm = embed_pairs(
            model.backbone, pair_set, image_size=source.image_size[0], device=device, name=str(path)
        )
        scores.append((pair_set, score_embeddings(path.stem, embeddings, pair_set.is_same, xnorm=xnorm)))
    return scores


def finish_run(
    config: Config,
    run: RunFolder,
    model: Model,
    source: RecordSource,
    world: World,
    outcome: Outcome,
    scores: list[tuple[PairSet, ScoredPairs]],
) -> None:
    """Rank 0 alone. Writes model.safetensors, model.onnx, summary.json, report.html, and says where they are."""
    image_size = source.image_size[0]
    metadata = {
        "format": "megaclass",
        "version": megaclass.__version__,
        "backbone": config.backbone.name,
        "embedding_dim": str(config.backbone.embedding_dim),
        "image_size": str(image_size),
    }
    save_model(run.path / "model.safetensors", model.backbone, metadata=metadata)
    if config.export.onnx:
        export_onnx(run.path / "model.onnx", model.backbone, image_size=image_size, metadata=metadata)
    summary: dict[str, Any] = {
        "num_classes": source.num_classes,
        "num_images": source.num_images,
        "world_size": world.size,
        "steps": outcome.num_steps,
        "final_loss": outcome.final_loss,
        "images_per_second": outcome.images_per_second,
    }
    baselines: list[ScoredPairs] = []
    if scores:
        pair_set, scored = scores[0]
        baselines = [score_pixels(pair_set, image_size=image_size), score_histograms(pair_set, image_size=image_size)]
        summary["verification_accuracy"] = scored.verification.accuracy
        summary["pixel_baseline_accuracy"] = baselines[0].verification.accuracy
        summary["histogram_baseline_accuracy"] = baselines[1].verification.accuracy
        summary["verification"] = {s.name: s.verification.to_json() for _, s in scores}
    run.write_summary(summary)
    if scores:
        _write_report(config, run, source, summary, *scores[0], baselines)
    _say_where(config, run, summary)


def _write_report(
    config: Config,
    run: RunFolder,
    source: RecordSource,
    summary: dict[str, Any],
    pair_set: PairSet,
    scored: ScoredPairs,
    baselines: list[ScoredPairs],
) -> None:
    facts = {
        "Classes": f"{source.num_classes:,}",
        "Training images": f"{source.num_images:,}, {source.image_size[1]} × {source.image_size[0]}",
        "Backbone": f"{config.backbone.name}, {config.backbone.embedding_dim} numbers an embedding",
        "Ranks": str(summary["world_size"]),
        "Steps": f"{summary['steps']:,} of {config.train.global_batch} images",
        "Final loss": f"{summary['final_loss']:.4f}",
        "Images per second": f"{summary['images_per_second']:,.0f}",
    }
    versions = {
        "megaclass": megaclass.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": sys.version.split()[0],
    }
    write_report(
        run.path / "report.html",
        ReportData(
            title=f"Megaclass run {run.path.name}",
            metrics=run.read_metrics(),
            model=scored,
            baselines=baselines,
            pair_images=pair_set.images,
            sample_faces=_sample_faces(source),
            facts=facts,
            config_text=to_toml(config),
            versions=versions,
        ),
    )


def _sample_faces(source: RecordSource) -> list[list[bytes]]:
    """The first images of a few classes spread over all of them."""
    rows = []
    for label in np.unique(np.linspace(0, source.num_classes - 1, _SAMPLE_ROWS).astype(np.int64)):
        indices = np.flatnonzero(source.labels == label)[:_SAMPLE_COLUMNS]
        if len(indices):
            rows.append([source.read(int(index)) for index in indices])
    return rows


def _say_where(config: Config, run: RunFolder, summary: dict[str, Any]) -> None:
    lines = [
        "",
        f"Trained {summary['num_classes']:,} classes on {summary['world_size']} process(es): "
        f"loss {summary['final_loss']:.3f}, {summary['images_per_second']:,.0f} images/s.",
    ]
    if "verification_accuracy" in summary:
        lines.append(
            f"Verification of unseen identities: {summary['verification_accuracy']:.1%} "
            f"(raw pixels {summary['pixel_baseline_accuracy']:.1%}, "
            f"colour histograms {summary['histogram_baseline_accuracy']:.1%})."
        )
    lines += ["", f"In {run.path}/:"]
    for name, meaning in (
        ("report.html", "open it in a browser"),
        ("model.safetensors", "the backbone"),
        ("model.onnx", "the same for other runtimes"),
        ("summary.json", "the numbers"),
        ("metrics.jsonl", "the curve"),
        ("checkpoints/", "to go on with --resume"),
        ("config.toml", "every setting of this run"),
    ):
        if (run.path / name).exists():
            lines.append(f"  {name:18} {meaning}")
    lines += [
        "",
        "Next: your own data with data.path=FOLDER (train.rec, train.idx, property) and synth.identities=0,",
        "      another head with head.sample_rate=0.1, more processes with train.nproc=N.",
    ]
    print("\n".join(lines), flush=True)
