"""`megaclass search` and `megaclass push`."""

import argparse
from pathlib import Path

from megaclass.cli.hints import Commands
from megaclass.errors import DataError
from megaclass.export import EXPORTERS
from megaclass_launch.errors import ConfigError
from megaclass_launch.wire.plain_text import plain_text


def add_model_commands(commands: Commands) -> None:
    """Adds the two commands to the parser's commands."""
    search = commands.add_parser(
        "search",
        help="show the images of a folder that are most similar to a query image",
        description="Shows the nearest images with their cosines, and writes them as a page: megaclass search runs/demo "
        "photos/ query.jpg",
    )
    search.add_argument("model", help="run folder, exported folder, .safetensors, .pth, .onnx, or hf://user/name")
    search.add_argument("gallery", type=Path, help="folder of images, including subfolders, or embeddings.npy")
    search.add_argument("queries", type=Path, nargs="+", metavar="query", help="images to search for")
    search.add_argument("-k", type=int, default=5, help="number of images to show per query (default: 5)")
    search.add_argument("--out", type=Path, default=Path("search.html"), help="page to write (default: search.html)")
    search.add_argument(
        "--faiss",
        metavar="INDEX",
        help="search with faiss: Flat (exact), HNSW32 or another description for its index_factory (megaclass[retrieval])",
    )
    search.add_argument(
        "--fit", choices=("pad", "crop", "squash"), help="how to fit images of another size (default: as in training)"
    )
    search.add_argument("--resize", action="store_true", help="the same as --fit squash, unless the model states a fit")
    search.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto uses a GPU if there is one"
    )
    search.add_argument("--backbone", metavar="MODULE:CLASS", help="your own backbone, which is imported and built")
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
