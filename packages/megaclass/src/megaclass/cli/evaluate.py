"""`megaclass evaluate`, `report`, `export` and `embed`."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from megaclass.errors import DataError
from megaclass.export import EXPORTERS
from megaclass_launch.errors import ConfigError

if TYPE_CHECKING:
    from megaclass.cli.hints import Commands
    from megaclass.evaluation.protocol import SetResult
    from megaclass.inference import LoadedModel
    from megaclass_launch.world import World

_logger = logging.getLogger("megaclass.cli")
_MODEL_HELP = "run folder, .safetensors, InsightFace .pth, or .onnx"


def add_evaluate_commands(commands: "Commands") -> None:
    """Adds the four commands to the parser's commands."""
    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate a model: classification, verification, templates, identification, retrieval",
        description="Evaluates a model: megaclass evaluate runs/demo --on datasets/ms1m lfw.bin IJBC",
    )
    evaluate.add_argument("model", type=Path, help=_MODEL_HELP)
    evaluate.add_argument(
        "--on",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="SET",
        help=".bin, pairs list, IJB folder, or folder of .bin files",
    )
    evaluate.add_argument(
        "--classify",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DATA",
        help="labelled images to classify, as for data.path: a folder per class, .rec or tar files",
    )
    evaluate.add_argument(
        "--gallery",
        type=Path,
        help="what is searched: a folder of identities, a list .txt, or embeddings .npy",
    )
    evaluate.add_argument(
        "--probes", type=Path, help="people to search for: a folder of identities, or embeddings .npy"
    )
    evaluate.add_argument(
        "--queries",
        type=Path,
        help="images to retrieve the gallery's entries of the same identity for: a folder of identities, a list .txt, or "
        "embeddings .npy",
    )
    evaluate.add_argument(
        "--distractors", type=Path, help="distractors of MegaFace: images, embeddings .npy or its feature files"
    )
    evaluate.add_argument(
        "--training-data",
        metavar="PATH",
        help="training data of the model, as for data.path: counts the images of each .bin file that it contains, and gives "
        "the accuracy of --classify by the number of training images",
    )
    evaluate.add_argument(
        "--out", type=Path, help="folder for evaluation.json (default: the run folder, if MODEL is one)"
    )
    evaluate.add_argument("--json", action="store_true", help="print the numbers as JSON")
    _add_running(evaluate)
    evaluate.set_defaults(run=_evaluate)

    report = commands.add_parser(
        "report",
        help="write an HTML page about one or several runs",
        description="Writes an HTML page about one or several runs: megaclass report runs/a runs/b",
    )
    report.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folder, or a folder written by evaluate --out"
    )
    report.add_argument(
        "--out",
        type=Path,
        help="page to write (default: report.html in the run; for several runs, A-and-B.html next to the first)",
    )
    report.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device for comparing class centres (default: cpu)"
    )
    report.set_defaults(run=_report)

    export = commands.add_parser(
        "export",
        help="write a folder with the model, config.json and a model card",
        description="Writes a folder with the model, config.json and a model card: megaclass export runs/demo --to onnx",
    )
    export.add_argument("model", type=Path, metavar="RUN", help="run folder, or a model file")
    export.add_argument("--to", choices=tuple(EXPORTERS), required=True, help="format of the model")
    export.add_argument("--out", type=Path, help="folder to write (default: RUN/export/FORMAT)")
    export.add_argument("--licence", default="not stated", help="licence stated in the model card")
    export.add_argument(
        "--detector",
        type=Path,
        metavar="FILE.onnx",
        help="with --to insightface: write a model pack for FaceAnalysis, with this face detector",
    )
    _add_backbone(export)
    export.set_defaults(run=_export)

    embed = commands.add_parser(
        "embed",
        help="embed a folder of images; resumes after an interruption",
        description="Embeds a folder of images: megaclass embed runs/demo photos/ --out photos.npy. Run again after an "
        "interruption, it continues where it was.",
    )
    embed.add_argument("model", type=Path, help=_MODEL_HELP)
    embed.add_argument("folder", type=Path, help="folder of images, including subfolders")
    embed.add_argument(
        "--out", type=Path, required=True, help="embeddings.npy; the paths are written to a .txt file next to it"
    )
    _add_running(embed)
    embed.set_defaults(run=_embed)


def _add_backbone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backbone",
        metavar="MODULE:CLASS",
        help="your own backbone, which is imported and built; without this option only built-in backbones are built, "
        "whatever the model's file says",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    _add_backbone(parser)
    parser.add_argument(
        "--fit", choices=("pad", "crop", "squash"), help="how to fit images of another size (default: as in training)"
    )
    parser.add_argument(
        "--resize",
        action="store_true",
        help="stretch images of another size if the model does not state how to fit them",
    )
    parser.add_argument(
        "--mirror",
        action=argparse.BooleanOptionalAction,
        help="add the embedding of the mirrored image (default: as in training: off after data.mirror=false)",
    )
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (default: 64)")
    parser.add_argument("--threads", type=int, default=2, help="number of decoding threads per process (default: 2)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto uses GPUs if there are any"
    )
    parser.add_argument(
        "--nproc", type=int, default=1, help="number of processes to start on this machine (default: 1)"
    )


def _evaluate(options: argparse.Namespace, given: list[str]) -> int:
    if _starts_ranks(options):
        return _on_own_ranks(options, given)
    from megaclass.api import Evaluation, evaluate

    results: list[SetResult] = []

    def show(result: "SetResult") -> None:
        results.append(result)
        if not options.json:
            print_result(result)

    try:
        found = evaluate(
            options.model,
            options.on,
            classify=options.classify,
            gallery=options.gallery,
            probes=options.probes,
            queries=options.queries,
            distractors=options.distractors,
            training_data=options.training_data,
            out=options.out,
            fit=options.fit,
            resize=options.resize,
            mirror=options.mirror,
            batch_size=options.batch_size,
            threads=options.threads,
            device=options.device,
            backbone=options.backbone,
            on_result=show,
        )
    finally:
        # On rank 0, also if they cannot be written.
        if options.json and results:
            print(json.dumps(Evaluation(results).numbers, indent=1), flush=True)
    return 2 if any(result.error is not None for result in found.results) else 0


def print_result(result: "SetResult") -> None:
    """Prints a few lines of numbers, or the reason why there are none."""
    from megaclass.evaluation.results import headline, result_lines

    print(f"{result.name:16} {headline(result)}", flush=True)
    for line in result_lines(result):
        print(f"{'':16} {line}", flush=True)


def _report(options: argparse.Namespace, given: list[str]) -> int:
    import torch

    from megaclass.evaluation.report.from_runs import report_of_runs
    from megaclass.evaluation.report.page import write_report

    out = options.out or _place_of_report(options.runs)
    report = report_of_runs(options.runs, device=torch.device(options.device))
    with _writing(out):
        write_report(out, report)
    print(out)
    return 0


def _place_of_report(runs: list[Path]) -> Path:
    """Returns where the report goes: into a single run, or next to the first of several, whose own reports stay."""
    if len(runs) == 1:
        return runs[0] / "report.html"
    first, *others = (run.resolve() for run in runs)
    rest = others[0].name if len(others) == 1 else f"{len(others)}-others"
    return first.parent / f"{first.name}-and-{rest}.html"


def _export(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.export.run_export import export_model

    if not options.model.exists() and not str(options.model).startswith("hf:"):
        raise ConfigError(f"There is no model at {options.model}: expected a run folder or a model file.")
    if options.out is None and not options.model.is_dir():
        raise ConfigError(f"{options.model} is not a run folder: name the folder to write with --out FOLDER.")
    out = options.out or options.model / "export" / options.to
    with _writing(out):
        print(
            export_model(
                options.model,
                options.to,
                out,
                licence=options.licence,
                backbone=options.backbone,
                detector=options.detector,
            )
        )
    return 0


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}. Choose another place with --out.") from error


def _embed(options: argparse.Namespace, given: list[str]) -> int:
    def run(model: "LoadedModel", world: "World") -> int:
        from megaclass.inference.embed_folder import embed_folder

        fit, mirror = model.treatment.chosen(options.fit, options.mirror, resize=options.resize)
        with _bar("embedding", world) as on_progress:
            embedded = embed_folder(
                model,
                options.folder,
                options.out,
                fit=fit,
                mirror=mirror,
                batch_size=options.batch_size,
                num_threads=options.threads,
                on_progress=on_progress,
            )
        if world.is_main:
            text = f"{options.out}: {embedded.num_embedded:,} × {model.embedding_dim}"
            text += f", paths in {options.out.with_suffix('.txt')}"
            if embedded.num_bad:
                text += f"; {embedded.num_bad:,} could not be read: {options.out.with_suffix('.bad.txt')}"
            print(text)
        return 0

    return _on_ranks(options, given, run)


def _on_ranks(options: argparse.Namespace, given: list[str], run: "Callable[[LoadedModel, World], int]") -> int:
    """Calls `run` in every process of the job: those of the launcher in charge, those of --nproc, or this one."""
    if _starts_ranks(options):
        return _on_own_ranks(options, given)
    from megaclass.distributed.agreement import on_every_rank
    from megaclass.inference import load
    from megaclass_launch.ranks.process_group import process_group
    from megaclass_launch.world import world_from_environment

    world = world_from_environment()
    with process_group(world, device=options.device) as device:
        return run(on_every_rank(lambda: load(options.model, device=device, backbone=options.backbone), device), world)


def _starts_ranks(options: argparse.Namespace) -> bool:
    """Tells whether this process is to start those of --nproc: no launcher has started it as one of several."""
    from megaclass_launch.world import NO_STARTER, world_from_environment

    for name in ("batch_size", "threads", "nproc"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1.")
    return options.nproc > 1 and world_from_environment().starter == NO_STARTER


def _on_own_ranks(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass_launch.launchers.local import run_local

    return run_local([sys.executable, "-P", "-m", "megaclass", *given], options.nproc)


def _bar(title: str, world: "World") -> "AbstractContextManager[Callable[[int, int], None] | None]":
    """Returns the function that moves the progress bar on rank 0; the other ranks draw nothing."""
    from megaclass.progress import bar_on_demand

    return bar_on_demand(title) if world.is_main else nullcontext()
