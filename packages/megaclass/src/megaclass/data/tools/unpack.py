"""Writes any data as a folder of images with one subfolder per identity, which every tool and every person can look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megaclass.data.decode import image_suffix
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass_launch.files import published_folder


def unpack(
    source: ImageSource,
    out: Path,
    *,
    class_names: Sequence[bytes] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes `out`/NAME/NUMBER.jpg with the bytes of the source; the folder appears whole or not at all.

    NAME is the name of the class if the data has names, otherwise its number; NUMBER is that of the image.
    """
    if out.exists():
        raise DataError(f"{out} exists already: choose a folder that does not exist.")
    width = len(str(max(0, source.num_classes - 1)))
    with published_folder(out.resolve()) as unfinished:
        for index in range(source.num_images):
            label = int(source.labels[index])
            name = _folder_name(class_names[label]) if class_names is not None else f"{label:0{width}d}"
            content = source.read(index)
            try:
                suffix = image_suffix(content, source.name_of(index))
            except DataError as error:
                raise DataError(f"{error} To leave such images out: megaclass data verify DATA --repair OUT.") from None
            folder = unfinished / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index:08d}{suffix}").write_bytes(content)
            if on_progress is not None:
                on_progress(index + 1, source.num_images)


def _folder_name(name: bytes) -> str:
    """Returns the name as one folder's name: it must not lead anywhere else, nor be hidden."""
    text = name.decode("utf-8", errors="replace").replace("/", "_").replace("\\", "_").replace("\x00", "_")
    return f"_{text}" if text.startswith(".") or not text else text
