"""Renders the result of a search as one self-contained page with pictures, in the style of the report."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megaclass.data.decode import decode_image
from megaclass.data.sources.files import read_image_file
from megaclass.errors import DataError
from megaclass.evaluation.examples import thumbnail
from megaclass.evaluation.report.templates import Picture, picture, render
from megaclass.inference.image_index import Neighbour
from megaclass.inference.loaded_model import LoadedModel
from megaclass_launch.files import write_text

# Longer side of the pictures on the page, in pixels.
_SIDE = 160


def write_search_page(
    path: Path, model: LoadedModel, gallery: Path, results: Sequence[tuple[Path, Sequence[Neighbour]]]
) -> None:
    """Writes the page, which appears whole or not at all. results: each query with its neighbours."""
    page = render(
        "inference/search.html.j2",
        title=f"Search in {gallery}",
        model=model.name,
        threshold=model.threshold() if model.known_thresholds else None,
        results=[
            (str(query), _picture(query), [(one, _picture(_place(gallery, one.path))) for one in neighbours])
            for query, neighbours in results
        ],
    )
    # The page may show faces.
    write_text(path, page, is_private=True)


def _place(gallery: Path, name: str) -> Path | None:
    """Returns where the image lies; `megaclass embed` lists paths relative to the folder that it was given.

    A list next to an .npy file may come from another user. It may name files below the current folder and below its own folder;
    others are not opened, because the page would show them.
    """
    if gallery.suffix != ".npy":
        return Path(name)
    roots = (Path.cwd().resolve(), gallery.parent.resolve())
    places = (Path(name), gallery.parent / name)
    return next((p for p in places if p.is_file() and any(p.resolve().is_relative_to(root) for root in roots)), None)


def _picture(path: Path | None) -> Picture:
    with contextlib.suppress(DataError):
        if path is not None:
            return picture(thumbnail(decode_image(read_image_file(path), str(path)), _SIDE), path.name)
    return Picture(error="no picture")
