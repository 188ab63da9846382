"""Names of the classes of the data, by which their centres are found again when the list of classes has changed."""

import os
from pathlib import Path

from megaclass.checkpoint.class_names import ClassList
from megaclass.data.sources.open_source import CLASSES_FILE, ImageSource, kind_of
from megaclass.errors import DataError


def class_list(path: str, source: ImageSource) -> ClassList:
    """Reads names from a classes.txt beside the data, or takes those of its folders if each is an identity.

    Without names (train.rec and its property file have numbers only), classes are identified by their numbers.
    """
    place = Path(path)
    folder = place.parent if place.is_file() else place
    if (folder / CLASSES_FILE).is_file():
        lines = _read(folder / CLASSES_FILE).split(b"\n")
        classes = ClassList.of((line.rstrip(b"\r") for line in (lines[:-1] if not lines[-1] else lines)), path)
    elif not any(folder.glob("*.rec")) and kind_of(path) == "folders":
        names = sorted(entry.name for entry in os.scandir(place) if entry.is_dir() and entry.name[0] != ".")
        classes = ClassList.of(map(os.fsencode, names), path)
    else:
        return ClassList(source.num_classes)
    if classes.num_classes != source.num_classes:
        raise DataError(f"{path} names {classes.num_classes:,} classes, but has labels for {source.num_classes:,}.")
    return classes


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read the names of classes in {file}: {error.strerror}.") from error
