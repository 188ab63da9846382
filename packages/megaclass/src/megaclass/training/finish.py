"""After the last step, on rank 0: the summary, the report and the exported model."""

import datetime
import logging
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import megaclass
from megaclass.backbones.timm_network import origin_of_weights
from megaclass.data.decode import Fit, decode_image
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.errors import DataError
from megaclass.evaluation.centres import CentreHealth, read_run_centres
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.protocols.pairs import PairProtocol, result_of_pairs, score_pixels
from megaclass.evaluation.report.from_runs import BASELINES_FOLDER, measured_centres, report_of_runs, write_faces
from megaclass.evaluation.report.page import write_report
from megaclass.evaluation.results import NUMBERS_FILE, headline, write_results
from megaclass.evaluation.training_images import examine_training_images, write_training_images
from megaclass.evaluation.training_overlap import compared_with_training_data, training_data_line
from megaclass.export.onnx_file import export_onnx
from megaclass.export.safetensors_file import save_model
from megaclass.image_size import ImageSize, compact_size, is_sequence, size_to_text
from megaclass.inference import weights_fingerprint
from megaclass.progress import bar_on_demand
from megaclass.training.loop import TrainingResult
from megaclass.training.model.build import Model
from megaclass.training.run.run import Run, how_to_verify
from megaclass_launch.errors import UserError
from megaclass_launch.files import make_private_folder, write_text
from megaclass_launch.messages import wrapped

_logger = logging.getLogger("megaclass.training")
_BASELINE, _BASELINE_NAME = "pixel_baseline_accuracy", "raw pixels"
_SUBCENTRES_FILE = "subcentres.tsv"
# Faces in the report: classes, and images of each.
_SAMPLE_ROWS, _SAMPLE_COLUMNS = 6, 8


def finish_run(run: Run, model: Model, network: nn.Module, outcome: TrainingResult, results: list[SetResult]) -> None:
    """Rank 0 alone. Writes model, summary, evaluation and report into the run folder, and prints where they are.

    network: of model.for_evaluation().
    """
    config, source, folder = run.config, run.source, run.folder.path
    image_size = compact_size(run.image_size)
    metadata = {
        "format": "megaclass",
        "version": megaclass.__version__,
        "backbone": config.backbone.name,
        "embedding_dim": str(config.backbone.embedding_dim),
        "image_size": size_to_text(image_size),
        "fit": config.data.fit,
        "mirror": str(config.data.mirror).lower(),
    }
    # The model first: it is the result that took the longest.
    save_model(folder / "model.safetensors", network, metadata=metadata)
    summary: dict[str, Any] = {
        "data": config.data.path,
        "data_fingerprint": run.data_fingerprint.fingerprint,
        "num_classes": source.num_classes,
        "num_images": source.num_images,
        "image_size": image_size,
        "fit": config.data.fit,
        "backbone": config.backbone.name,
        "embedding_dim": config.backbone.embedding_dim,
        "world_size": run.world.size,
        "steps": outcome.num_steps,
        "final_loss": outcome.final_loss,
        "images_per_second": outcome.images_per_second,
        "finished_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(run.command),
        "host": socket.gethostname(),
        "version": megaclass.__version__,
    }
    if config.backbone.pretrained:
        summary["pretrained"] = origin_of_weights(config.backbone.name, config.backbone.pretrained)
    if outcome.minor_subcentres is not None and outcome.minor_subcentres[0]:
        summary["minor_subcentres"] = _write_minor_subcentres(run, outcome.minor_subcentres)
    if run.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(run.device)
        summary |= {"gpu": gpu.name, "gpu_bytes": gpu.total_memory}
    with _optional("A comparison of the verification sets with the training data"):
        drawn = Path(config.data.path) / "verification.bin" if config.synth.identities else None
        with bar_on_demand("comparing the verification sets with the training images") as on_progress:
            results = compared_with_training_data(results, source, config.data.path, drawn, on_progress)
    evaluated = [result for result in results if result.error is None and result.kind == PairProtocol.kind]
    if evaluated:
        summary["verification_accuracy"] = evaluated[0].numbers["accuracy"]
        with _optional("The baseline"):
            summary[_BASELINE] = _write_baseline(folder, evaluated[0], image_size, config.data.fit)
    if tops := [result.numbers["top_k"]["1"] for result in results if "top_k" in result.numbers]:
        summary["classification_top_1"] = tops[0]
    summary["verification"] = {result.name: result.to_json() for result in results}
    run.folder.write_summary(summary)
    with _optional(f"The report, which megaclass report {folder} can make later,"):
        # Under the same key as `megaclass evaluate` on this run, so sets evaluated later are added to these.
        # Without a set there is nothing to write, except over numbers of earlier weights.
        if results or (folder / NUMBERS_FILE).exists():
            write_results(folder, {"name": folder.name, "weights": weights_fingerprint(network)}, results)
        write_faces(folder, _sample_faces(source))
        cpu = torch.device("cpu")
        with bar_on_demand("comparing the class centres for the report") as on_progress:
            centres = measured_centres(folder, cpu, on_progress)
        with _optional("The section of the report on training images"):
            _examine_images(run, network, centres)
        write_report(folder / "report.html", report_of_runs([folder], device=cpu, known_centres={folder: centres}))
    # Last, because it is the step most likely to fail.
    if config.export.onnx and is_sequence(image_size):
        _logger.info("no model.onnx is written for a model of sequences, whose inputs differ in length")
    elif config.export.onnx:
        _logger.info("exporting model.onnx and comparing its embeddings with the model's")
        export_onnx(folder / "model.onnx", network, image_size=image_size, metadata=metadata)
    _print_results(run, summary, results)


def _write_minor_subcentres(run: Run, found: tuple[int, int, list[tuple[int, int, int]]]) -> str:
    """Writes the classes that have most images in minor sub-centres, which are often mislabelled; returns a summary."""
    num_images, num_minor, rows = found
    names = run.classes.names_of([label for label, _, _ in rows])
    lines = [f"{names[label]}\t{images}\t{minor / images:.4f}" for label, images, minor in rows]
    text = "\n".join(["class\timages of the last epoch\tshare in minor sub-centres", *lines, ""])
    write_text(run.folder.path / _SUBCENTRES_FILE, text, is_private=True)
    worst = ", ".join(f"{names[label]} ({minor / images:.0%} of {images:,})" for label, images, minor in rows[:10])
    return f"{num_minor / num_images:.2%} of {num_images:,} images{'; most in ' if worst else ''}{worst}"


def _examine_images(run: Run, network: nn.Module, centres: CentreHealth | None) -> None:
    """Stores which classes are far from their centre, and which images are closer to another one."""
    if centres is None or run.source.labels.ndim > 1:
        return
    with bar_on_demand("looking at training images for the report") as on_progress:
        found = examine_training_images(
            network,
            run.source,
            read_run_centres(run.folder.path),
            image_size=compact_size(run.image_size),
            fit=run.config.data.fit,
            device=run.device,
            shown_classes={number for pair in centres.closest_pairs for number in pair},
            on_progress=on_progress,
        )
    write_training_images(run.folder.path, found)


@contextmanager
def _optional(what: str) -> Iterator[None]:
    """Logs an error in a result that is not essential: the run has succeeded without it."""
    try:
        yield
    except (UserError, OSError) as error:
        _logger.info(f"{what} could not be made: {error}")


def _write_baseline(folder: Path, result: SetResult, image_size: ImageSize, fit: Fit) -> float:
    """Writes what raw pixels achieve on the same pairs, which any model must beat; returns their accuracy."""
    scored = score_pixels(read_pairs(Path(result.path)), image_size=image_size, fit=fit, name=result.path)
    baseline = result_of_pairs(result.name, result.path, scored, encoded=None)
    make_private_folder(folder / BASELINES_FOLDER)
    write_results(folder / BASELINES_FOLDER / _BASELINE_NAME, {"baseline": _BASELINE_NAME}, [baseline])
    return scored.verification.accuracy


def _sample_faces(source: ImageSource) -> list[list[bytes]]:
    """Returns the first images of a few classes, spread over all classes; unreadable images are left out."""
    rows: list[list[bytes]] = []
    if isinstance(source, TensorSource):
        return rows
    for label in np.unique(np.linspace(0, source.num_classes - 1, _SAMPLE_ROWS).astype(np.int64)):
        row = []
        for index in np.flatnonzero(source.labels == label)[:_SAMPLE_COLUMNS]:
            try:
                encoded = source.read(int(index))
                # Decoded only to find out whether it can be: the report embeds the encoded bytes.
                decode_image(encoded, source.name_of(int(index)))
            except DataError:
                continue
            row.append(encoded)
        if row:
            rows.append(row)
    return rows


def _print_results(run: Run, summary: dict[str, Any], results: list[SetResult]) -> None:
    folder = run.folder.path
    lines = [
        "",
        f"Trained {summary['num_classes']:,} classes on {summary['world_size']} process"
        f"{'es' if summary['world_size'] > 1 else ''}: "
        f"loss {summary['final_loss']:.3f}, {summary['images_per_second']:,.0f} images/s.",
    ]
    floor = f" (raw pixels {summary[_BASELINE]:.1%})" if _BASELINE in summary else ""
    for result in results:
        if result.error is None and result.kind != PairProtocol.kind:
            lines.append(f"Classification of {result.name}: {headline(result)}.")
        elif result.error is None:
            lines.append(f"Verification on {result.name}: {result.numbers['accuracy']:.1%}{floor}.")
            lines += [f"  {said}" for said in [training_data_line(result.numbers)] if said]
            floor = ""  # measured on the first set only
    lines += [f"Not evaluated: {result.name}: {result.error}" for result in results if result.error is not None]
    lines += ["", f"In {folder}/:"]
    for name, meaning in (
        ("report.html", "open it in a browser"),
        ("model.safetensors", "the backbone"),
        ("model.onnx", "the backbone for other runtimes"),
        ("summary.json", "the numbers"),
        ("evaluation.json", "the numbers of every evaluation set"),
        ("metrics.jsonl", "the metrics of every report"),
        (_SUBCENTRES_FILE, "classes with images in minor sub-centres"),
        ("checkpoints/", "to continue with --resume"),
        ("config.toml", "every setting of this run"),
    ):
        is_empty = name == "evaluation.json" and all(result.error is not None for result in results)
        if (folder / name).exists() and not is_empty:
            lines.append(f"  {name:18} {meaning}")
    lines += ["", *_next_steps(run, results)]
    print(wrapped("\n".join(lines), sys.stdout), flush=True)


def _next_steps(run: Run, results: list[SetResult]) -> list[str]:
    """Returns commands to try next; after synthetic identities that is the user's own data."""
    folder, data = run.folder.path, run.config.data.path
    if run.config.synth.identities:
        return [
            "Next: your own images, one subfolder per identity (or train.rec, train.idx, property):",
            "  megaclass train FOLDER",
        ]
    if results or not Path(data).exists():
        return ["Next:", f"  megaclass evaluate {folder} --on FILE.bin    more verification sets"]
    if isinstance(run.source, TensorSource):
        return [
            "No accuracy was measured, because train.evaluate_sets is empty. With features that were held out:",
            f"  megaclass evaluate {folder} --classify FILE",
        ]
    return [
        f"No accuracy was measured: there is no .bin file next to {data}, and no images were held out. Hold some out:",
        *how_to_verify(data, recipe=str(folder / "config.toml"))[1:],
    ]
