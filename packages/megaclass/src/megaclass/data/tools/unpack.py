"""Writes any data as a folder of images with one subfolder per identity, which every tool and every person can look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megaclass.data.decode import decode_image, image_suffix
from megaclass.data.loading.reader import BadImages
from megaclass.data.sources.files import has_image_name
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass_launch.files import published_folder


def unpack(
    source: ImageSource,
    out: Path,
    *,
    class_names: Sequence[bytes] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes `out`/NAME/FILE with the bytes of the source; the folder appears whole or not at all.

    NAME is the name of the class if the data has names, otherwise its number; FILE is the name of the image's file, or its
    number. Images that do not decode are left out; returns their number.
    """
    if out.exists():
        raise DataError(f"{out} exists already: choose a folder that does not exist.")
    width = len(str(max(0, source.num_classes - 1)))
    bad = BadImages.of_tool(source.num_images)
    with published_folder(out.resolve()) as unfinished:
        for index in range(source.num_images):
            label = int(source.labels[index])
            name = _folder_name(class_names[label]) if class_names is not None else f"{label:0{width}d}"
            folder = unfinished / name
            folder.mkdir(parents=True, exist_ok=True)
            try:
                content = source.read(index)
                decode_image(content, source.name_of(index))
                (folder / _file_name(source, index, content, folder)).write_bytes(content)
            except DataError as error:
                bad.add_bad(index, error)
            bad.add_read(1)
            if on_progress is not None:
                on_progress(index + 1, source.num_images)
    return len(bad.indices)


def _file_name(source: ImageSource, index: int, content: bytes, folder: Path) -> str:
    """Returns the name of the image's own file; a number if it has none, or if another image has taken its name."""
    own = Path(source.name_of(index)).name
    if has_image_name(own) and not (folder / own).exists():
        return own
    return f"{index:08d}{image_suffix(content, own)}"


def _folder_name(name: bytes) -> str:
    """Returns the name as one folder's name: it must not lead anywhere else, nor be hidden."""
    text = name.decode("utf-8", errors="replace").replace("/", "_").replace("\\", "_").replace("\x00", "_")
    return f"_{text}" if text.startswith(".") or not text else text
