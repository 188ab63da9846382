"""The commands about a trained model: evaluate, report, export, embed, classify, add-classes, search and push."""

import argparse
import json
import logging
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megaclass.cli.arguments import add_commands, writing
from megaclass_launch.errors import ConfigError
from megaclass_launch.wire.checks import plain_text

if TYPE_CHECKING:
    from megaclass.cli.hints import Commands
    from megaclass.evaluation.protocol import SetResult

_logger = logging.getLogger("megaclass.cli")
_COMMANDS = """
evaluate: evaluate a model: classification, verification, templates, identification, retrieval
    Evaluates a model: megaclass evaluate runs/demo --on datasets/ms1m lfw.bin IJBC
  @model
  --on             path+ SET   .bin, pairs list, IJB folder, or folder of .bin files
  --classify       path+ DATA  labelled images to classify, as for data.path: a folder per class, .rec or tar files
  --gallery        path        what is searched: a folder of identities, a list .txt, or embeddings .npy
  --probes         path        people to search for: a folder of identities, or embeddings .npy
  --queries        path        images to retrieve the gallery's entries of the same identity for: a folder of identities, a
                list .txt, or embeddings .npy
  --distractors    path        distractors of MegaFace: images, embeddings .npy or its feature files
  --training-data  text PATH   training data of the model, as for data.path: counts the images of each .bin file that it
                contains, and gives the accuracy of --classify by the number of training images
  --published-tpir  flag       IJB: TPIR with the threshold of InsightFace's ijb_evals.py, which lets one probe fewer pass
  --out            path        folder for evaluation.json (default: the run folder, if MODEL is one)
  @json @backbone @fit @resize @mirror @batch-size @threads @device @nproc

report: write an HTML page about one or several runs
    Writes an HTML page about one or several runs: megaclass report runs/a runs/b
  runs      path+ RUN     run folder, or a folder written by evaluate --out
  --out     path          page to write (default: report.html in the run; for several runs, A-and-B.html next to the first)
  --device  cpu|cuda=cpu  device for comparing class centres

export: write a folder with the model, config.json and a model card
    Writes a folder with the model, config.json and a model card: megaclass export runs/demo --to onnx
  model      path RUN    run folder, or a model file
  --to       {formats}!  format of the model
  --out      path        folder to write (default: RUN/export/FORMAT)
  --detector  path FILE.onnx  with --to insightface: write a model pack for FaceAnalysis, with this face detector
  @licence @backbone

embed: embed a folder of images; resumes after an interruption
    Embeds a folder of images: megaclass embed runs/demo photos/ --out photos.npy. Run again after an interruption, it
        continues where it was.
  @model
  folder  path   folder of images, including subfolders
  --out   path!  embeddings.npy; the paths are written to a .txt file next to it
  @backbone @fit @resize @mirror @batch-size @threads @device @nproc

classify: say of which class images are
    Names the closest classes of each image: megaclass classify runs/demo photos/ image.jpg --top 3
  @model
  images    path+ IMAGE  images, or folders of images
  --top     positive=5   number of classes to name per image
  --reject  float SHARE  say "unknown" if the closest class is too far; at most this share of unknown images gets a name then
  @json @fit @resize @device @backbone

add-classes: add classes to a trained model, without training
    Exports the model with further classes, whose centres are the means of a few images each: megaclass add-classes
        runs/demo new-people/ --out with-new-people
  @model
  images  path DATA  images of the new classes, as for data.path: a folder per class
  --out   path!      folder for the exported model and its classes
  @fit @backbone

search: show the images of a folder that are most similar to a query image
    Shows the nearest images with their cosines, and writes them as a page: megaclass search runs/demo photos/ query.jpg
  @model
  gallery  path        folder of images, including subfolders, or embeddings.npy
  queries  path+ query    images to search for
  -k       positive=5    number of images to show per query
  --out    path=search.html    page to write
  @fit @resize @device @backbone

push: publish a model on the Hugging Face Hub, with a model card
    Exports the model and uploads it: megaclass push runs/demo user/name --licence apache-2.0
  model           path RUN  run folder, or a model file
  repository      text      user/name; created if it does not exist
  --to            {formats}=safetensors    format of the model
  --private       flag      make a private repository
  --with-centres  flag      also publish the names and centres of the training classes
  @licence @backbone
"""


def add_model_commands(commands: "Commands") -> None:
    """Adds the eight commands to the parser's commands."""
    functions = {"evaluate": _evaluate, "report": _report, "export": _export, "embed": _embed}
    functions |= {"classify": _classify, "add-classes": _add_classes, "search": _search, "push": _push}
    add_commands(commands, _COMMANDS, functions)


_GIVEN = (
    *("classify", "gallery", "probes", "queries", "distractors", "training_data", "out", "fit", "resize", "mirror"),
    *("batch_size", "threads", "device", "backbone", "published_tpir"),
)
"""Options of the command that are arguments of `megaclass.evaluate`."""


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
        found = evaluate(options.model, options.on, on_result=show, **{name: vars(options)[name] for name in _GIVEN})
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
    with writing(out):
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
    with writing(out):
        more = {"licence": options.licence, "backbone": options.backbone, "detector": options.detector}
        print(export_model(options.model, options.to, out, **more))
    return 0


def _embed(options: argparse.Namespace, given: list[str]) -> int:
    if _starts_ranks(options):
        return _on_own_ranks(options, given)
    from megaclass.distributed.agreement import on_every_rank
    from megaclass.inference import load
    from megaclass.inference.embed_folder import embed_folder
    from megaclass.progress import bar_on_demand, no_progress
    from megaclass_launch.ranks.process_group import process_group
    from megaclass_launch.world import world_from_environment

    world = world_from_environment()
    with process_group(world, device=options.device) as device:
        model = on_every_rank(lambda: load(options.model, device=device, backbone=options.backbone), device)
        fit, mirror = model.treatment.chosen(options.fit, options.mirror, resize=options.resize)
        with bar_on_demand("embedding") if world.is_main else nullcontext(no_progress) as on_progress:
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


def _starts_ranks(options: argparse.Namespace) -> bool:
    """Tells whether this process is to start those of --nproc: no launcher has started it as one of several."""
    from megaclass_launch.world import NO_STARTER, world_from_environment

    return options.nproc > 1 and world_from_environment().starter == NO_STARTER


def _on_own_ranks(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass_launch.launchers.local import run_local

    return run_local([sys.executable, "-P", "-m", "megaclass", *given], options.nproc)


def _classify(options: argparse.Namespace, given: list[str]) -> int:
    import megaclass
    from megaclass.inference.image_index import listed_images

    model = megaclass.load(options.model, device=options.device, backbone=options.backbone)
    images = [image for path in options.images for image in listed_images(path)]
    found = model.classify(images, options.top, reject=options.reject, fit=options.fit, resize=options.resize)
    for image, one in zip(images, found, strict=True):
        if options.json:
            print(json.dumps({"image": str(image), **asdict(one)}))
            continue
        print(plain_text(f"{image}{'' if one.is_known else ': unknown; the closest classes are'}"))
        for place, guess in enumerate(one.guesses, start=1):
            chance = "" if guess.probability is None else f"  {guess.probability:6.1%}"
            # The names come with the model, from anyone.
            print(f"  {place:3}  {guess.cosine:6.3f}{chance}  {plain_text(guess.name)}")
    if found[0].guesses[0].probability is None:
        _logger.info(
            "no probabilities: megaclass evaluate RUN --classify DATA fits their temperature on labelled images"
        )
    return 0


def _add_classes(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.export.run_export import add_classes

    centres = add_classes(Path(options.model), options.images, options.out, fit=options.fit, backbone=options.backbone)
    print(f"{options.out}: {centres.num_classes:,} classes; to use it: megaclass classify {options.out} IMAGE")
    return 0


def _search(options: argparse.Namespace, given: list[str]) -> int:
    import megaclass
    from megaclass.inference.search_page import write_search_page

    model = megaclass.load(options.model, device=options.device, backbone=options.backbone)
    index = model.index(options.gallery, fit=options.fit, resize=options.resize)
    found = index.search_all(options.queries, options.k)
    for query, neighbours in zip(options.queries, found, strict=True):
        print(plain_text(f"{query}: nearest of {len(index):,} images in {options.gallery}"))
        for place, one in enumerate(neighbours, start=1):
            # The list next to a gallery's .npy file may contain escape sequences.
            print(f"  {place:3}  {one.similarity:6.3f}  {plain_text(one.path)}")
    with writing(options.out):
        write_search_page(options.out, model, options.gallery, list(zip(options.queries, found, strict=True)))
    print(f"page: {options.out}")
    return 0


def _push(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.export.run_export import push

    address = push(
        options.model,
        options.repository,
        form=options.to,
        licence=options.licence,
        backbone=options.backbone,
        is_private=options.private,
        with_centres=options.with_centres,
    )
    print(f'published; to use it: megaclass.load("{address}")')
    return 0
