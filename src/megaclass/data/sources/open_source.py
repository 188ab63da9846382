"""Where images come from: what lies at a path decides how it is read.

folder with train.rec or one *.rec, or the file itself      RecordIO (record_source)
folder with label.txt, or a .txt file                       list of paths and labels (file_source)
folder with *.tar, or a .tar file                           shards of (jpg, cls) (tar_source)
folder with one folder an identity                          file_source
synthetic:C[xN][@SIZE]                                      N images of C classes made in memory (made_source)
debug, debug:PATH                                           one batch repeated from memory (made_source)
PATH,PATH,…                                                 several, with their label ranges kept apart
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError

CLASSES_FILE = "classes.txt"
"""Beside any data: names of its classes, one a line, line i for class i."""


@runtime_checkable
class ImageSource(Protocol):
    """Numbered encoded images, each with its class."""

    @property
    def num_images(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def labels(self) -> NDArray[np.int64]:
        """Class of every image (N,), each in [0, num_classes)."""
        ...

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width)"""
        ...

    def read(self, index: int) -> bytes:
        """The encoded image."""
        ...

    def name_of(self, index: int) -> str:
        """How errors call the image."""
        ...

    def describe(self) -> str: ...


@runtime_checkable
class PixelSource(Protocol):
    """A source whose images need no decoding."""

    def pixels(self, indices: NDArray[np.int64], image_size: tuple[int, int]) -> NDArray[np.uint8]:
        """(B, H, W, 3)"""
        ...


def open_source(path: Path | str) -> ImageSource:
    """Opens whatever lies at the path; `describe()` of the result says what was found."""
    text = str(path)
    kind = kind_of(text)
    if kind == "joined":
        from megaclass.data.sources.joined import JoinedSource

        return JoinedSource([open_source(part) for part in split_path(text)])
    if kind in ("synthetic", "debug"):
        from megaclass.data.sources.in_memory import open_debug, open_synthetic

        if kind == "synthetic":
            return open_synthetic(text)
        _, colon, inner = text.partition(":")
        return open_debug(open_source(inner) if colon else None)
    place = Path(text)
    if kind == "records":
        from megaclass.data.sources.records import open_records

        return open_records(_record_file(place))
    if kind == "tar":
        from megaclass.data.sources.tar import open_tars

        return open_tars(place)
    from megaclass.data.sources.files import open_folders, open_list

    return open_list(_list_file(place)) if kind == "list" else open_folders(place)


def check_source(path: Path | str) -> None:
    """Says at once what is missing at a path that `open_source` could not open; reads no file."""
    if kind_of(str(path)) == "joined":
        for part in split_path(str(path)):
            check_source(part)


def kind_of(text: str) -> str:
    """synthetic, debug, joined, records, list, tar or folders."""
    if text.startswith("synthetic:"):
        return "synthetic"
    if text == "debug" or text.startswith("debug:"):
        return "debug"
    place = Path(text)
    if not place.exists() and "," in text:
        return "joined"
    if place.is_file():
        kind = {".rec": "records", ".txt": "list", ".tar": "tar"}.get(place.suffix)
        if kind is None:
            raise DataError(f"Cannot open the data at {place}: expected a folder, or a .rec, .txt or .tar file.")
        if kind == "records":
            _require_index(place)
        return kind
    return _kind_of_folder(place)


def split_path(text: str) -> list[str]:
    """The parts of several sources joined by commas; one that exists as it stands is one."""
    if Path(text).exists() or text.startswith("synthetic:"):
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()]


def verification_files(path: Path | str) -> list[Path]:
    """Every *.bin beside the data."""
    found: list[Path] = []
    for part in split_path(str(path)):
        place = Path(part.removeprefix("debug:"))
        folder = place.parent if place.is_file() else place
        found += sorted(folder.glob("*.bin")) if folder.is_dir() else []
    return found


def _kind_of_folder(place: Path) -> str:
    if not place.is_dir():
        raise DataError(
            f"Cannot open the data at {place}: there is no such folder. Expected one that holds train.rec and train.idx, "
            f"a label.txt, tar shards, or one folder an identity; or synthetic:C[xN], or debug:FOLDER."
        )
    try:
        if any(place.glob("*.rec")):
            _require_index(_record_file(place))
            return "records"
        if (place / "label.txt").is_file():
            return "list"
        if any(place.glob("*.tar")):
            return "tar"
        if (place / "train.idx").exists():
            _require_index(place / "train.rec")
        if any(entry.is_dir() for entry in place.iterdir() if not entry.name.startswith(".")):
            return "folders"
    except OSError as error:
        raise DataError(f"Cannot open the data at {place}: {error.strerror}.") from error
    raise DataError(
        f"Cannot open the data at {place}: looked for train.rec and train.idx, label.txt, *.tar and folders of "
        f"identities, all of them missing; {_list_names(place)}."
    )


def _record_file(place: Path) -> Path:
    if place.is_file() or (place / "train.rec").exists():
        return place if place.is_file() else place / "train.rec"
    found = sorted(place.glob("*.rec"))
    if len(found) != 1:
        raise DataError(
            f"Cannot open the data at {place}: it holds {', '.join(path.name for path in found[:5])} and no train.rec. "
            f"Name one of them, or several joined by commas."
        )
    return found[0]


def _require_index(record_file: Path) -> None:
    names = (record_file.name, record_file.with_suffix(".idx").name)
    missing = [name for name in names if not (record_file.parent / name).is_file()]
    if missing:
        raise DataError(
            f"Cannot open the data at {record_file.parent}: looked for {' and '.join(names)}, "
            f"{' and '.join(missing)} missing; {_list_names(record_file.parent)}. "
            f"megaclass data verify --repair finds the records of a .rec without an index and writes both anew."
        )


def _list_file(place: Path) -> Path:
    return place if place.is_file() else place / "label.txt"


def _list_names(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"found {', '.join(names[:5])}{more}"
