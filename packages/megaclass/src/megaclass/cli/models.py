"""`megaclass classify`, `add-classes`, `search` and `push`."""

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path

from megaclass.cli.hints import Commands
from megaclass.errors import DataError
from megaclass.export import EXPORTERS
from megaclass_launch.errors import ConfigError
from megaclass_launch.wire.checks import plain_text

_logger = logging.getLogger("megaclass.cli")
_MODEL_HELP = "run folder, exported folder, .safetensors, .pth, .onnx, or hf://user/name"


def add_model_commands(commands: Commands) -> None:
    """Adds the four commands to the parser's commands."""
    classify = commands.add_parser(
        "classify",
        help="say of which class images are",
        description="Names the closest classes of each image: megaclass classify runs/demo photos/ image.jpg --top 3",
    )
    classify.add_argument("model", help=_MODEL_HELP)
    classify.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="images, or folders of images")
    classify.add_argument("--top", type=int, default=5, help="number of classes to name per image (default: 5)")
    classify.add_argument(
        "--reject",
        type=float,
        metavar="SHARE",
        help='say "unknown" if the closest class is too far; at most this share of unknown images gets a name then',
    )
    classify.add_argument("--json", action="store_true", help="print JSON, one object per image")
    _add_loading(classify)
    classify.set_defaults(run=_classify)

    added = commands.add_parser(
        "add-classes",
        help="add classes to a trained model, without training",
        description="Exports the model with further classes, whose centres are the means of a few images each: "
        "megaclass add-classes runs/demo new-people/ --out with-new-people",
    )
    added.add_argument("model", type=Path, help=_MODEL_HELP)
    added.add_argument(
        "images", type=Path, metavar="DATA", help="images of the new classes, as for data.path: a folder per class"
    )
    added.add_argument("--out", type=Path, required=True, help="folder for the exported model and its classes")
    added.add_argument(
        "--fit", choices=("pad", "crop", "squash"), help="how to fit images of another size (default: as in training)"
    )
    added.add_argument("--backbone", metavar="MODULE:CLASS", help="your own backbone, which is imported and built")
    added.set_defaults(run=_add_classes)

    search = commands.add_parser(
        "search",
        help="show the images of a folder that are most similar to a query image",
        description="Shows the nearest images with their cosines, and writes them as a page: megaclass search runs/demo "
        "photos/ query.jpg",
    )
    search.add_argument("model", help=_MODEL_HELP)
    search.add_argument("gallery", type=Path, help="folder of images, including subfolders, or embeddings.npy")
    search.add_argument("queries", type=Path, nargs="+", metavar="query", help="images to search for")
    search.add_argument("-k", type=int, default=5, help="number of images to show per query (default: 5)")
    search.add_argument("--out", type=Path, default=Path("search.html"), help="page to write (default: search.html)")
    search.add_argument(
        "--faiss",
        metavar="INDEX",
        help="search with faiss: Flat (exact), HNSW32 or another description for its index_factory (megaclass[retrieval])",
    )
    _add_loading(search)
    search.set_defaults(run=_search)

    push = commands.add_parser(
        "push",
        help="publish a model on the Hugging Face Hub, with a model card",
        description="Exports the model and uploads it: megaclass push runs/demo user/name --licence apache-2.0",
    )
    push.add_argument("model", type=Path, metavar="RUN", help="run folder, or a model file")
    push.add_argument("repository", help="user/name; created if it does not exist")
    push.add_argument(
        "--to", choices=tuple(EXPORTERS), default="safetensors", help="format of the model (default: safetensors)"
    )
    push.add_argument("--licence", default="not stated", help="licence stated in the model card")
    push.add_argument("--private", action="store_true", help="make a private repository")
    push.add_argument(
        "--with-centres", action="store_true", help="also publish the names and centres of the training classes"
    )
    push.add_argument("--backbone", metavar="MODULE:CLASS", help="your own backbone, which is imported and built")
    push.set_defaults(run=_push)


def _add_loading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fit", choices=("pad", "crop", "squash"), help="how to fit images of another size (default: as in training)"
    )
    parser.add_argument("--resize", action="store_true", help="the same as --fit squash, unless the model states a fit")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto uses a GPU if there is one"
    )
    parser.add_argument("--backbone", metavar="MODULE:CLASS", help="your own backbone, which is imported and built")


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
        print(f"{image}{'' if one.is_known else ': unknown; the closest classes are'}")
        for place, guess in enumerate(one.guesses, start=1):
            chance = "" if guess.probability is None else f"  {guess.probability:6.1%}"
            print(f"  {place:3}  {guess.cosine:6.3f}{chance}  {guess.name}")
    if found[0].guesses[0].probability is None:
        _logger.info(
            "no probabilities: megaclass evaluate RUN --classify DATA fits their temperature on labelled images"
        )
    return 0


def _add_classes(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.export.run_export import add_classes

    centres = add_classes(options.model, options.images, options.out, fit=options.fit, backbone=options.backbone)
    print(f"{options.out}: {centres.num_classes:,} classes; to use it: megaclass classify {options.out} IMAGE")
    return 0


def _search(options: argparse.Namespace, given: list[str]) -> int:
    import megaclass
    from megaclass.inference.search_page import write_search_page

    if options.k < 1:
        raise ConfigError(f"-k is {options.k}; it must be at least 1.")
    model = megaclass.load(options.model, device=options.device, backbone=options.backbone)
    index = model.index(options.gallery, faiss=options.faiss, fit=options.fit, resize=options.resize)
    found = index.search_all(options.queries, options.k)
    for query, neighbours in zip(options.queries, found, strict=True):
        print(plain_text(f"{query}: nearest of {len(index):,} images in {options.gallery}"))
        for place, one in enumerate(neighbours, start=1):
            # The list next to a gallery's .npy file may contain escape sequences.
            print(f"  {place:3}  {one.similarity:6.3f}  {plain_text(one.path)}")
    try:
        write_search_page(options.out, model, options.gallery, list(zip(options.queries, found, strict=True)))
    except OSError as error:
        raise DataError(
            f"Cannot write {options.out}: {error.strerror or error}. Choose another place with --out."
        ) from error
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
