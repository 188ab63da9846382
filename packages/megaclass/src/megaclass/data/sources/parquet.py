"""Parquet files with an image column, as Hugging Face `datasets` writes them: converted once to train.rec in the cache folder.

A Parquet file gives rows in groups of hundreds of images, so drawing single images in random order would read each of them
hundreds of times. `datasets.save_to_disk` writes Arrow files (*.arrow), which are read in the same way. An image is bytes, or
a struct with bytes and path. A class is an integer from 0, or a text: the sorted texts are numbered then. Names of classes in
the metadata of `datasets` become classes.txt. PATH?split=train&image=photo&label=person chooses files and columns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from megaclass.data.decode import image_dimensions
from megaclass.data.sources.files import require_plausible_labels
from megaclass.data.sources.recordio import MAX_EXACT_LABEL, RecordWriter, image_record
from megaclass.data.sources.records import LABELS_IN_ID2
from megaclass.data.sources.remote import cache_folder
from megaclass.data.sources.source import CLASSES_FILE
from megaclass.errors import DataError
from megaclass.file_lock import locked
from megaclass.progress import progress_bar
from megaclass_launch.files import published_folder

_logger = logging.getLogger("megaclass.data")
_SUFFIXES = (".parquet", ".arrow")
_CHOICES = ("split", "image", "label")
_LABEL_NAMES = ("label", "labels", "identity", "class", "cls", "target")
_ROWS = 256


def split_choices(path: str) -> tuple[str, dict[str, str]]:
    """Splits PATH?split=…&image=…&label=… into the path and the choices; other paths have none."""
    place, mark, query = path.rpartition("?")
    given = dict(parse_qsl(query))
    return (place, given) if mark and given and set(given) <= set(_CHOICES) else (path, {})


def is_parquet(path: str) -> bool:
    place = Path(split_choices(path)[0])
    return (place.is_file() and place.suffix in _SUFFIXES) or bool(_files_in(place))


def as_records(path: str) -> Path:
    """Returns a folder with train.rec, train.idx, property and perhaps classes.txt, which is written if it is not there yet."""
    text, choices = split_choices(path)
    place = Path(text)
    files = [place] if place.is_file() else _of_split(place, choices.get("split"))
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    folder = cache_folder("parquet", json.dumps([str(place.resolve()), choices, stamps]))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                # What killed processes have left.
                for left in folder.parent.glob(f".{folder.name[:16]}*.tmp"):
                    shutil.rmtree(left)
                _logger.info(f"converting {len(files)} files of {place} to {folder}")
                with published_folder(folder) as unfinished:
                    _convert(_Table.of(files, choices), unfinished)
    except OSError as error:
        raise DataError(f"Cannot convert {place} to {folder}: {error.strerror or error}.") from error
    return folder


def _files_in(folder: Path) -> list[Path]:
    """Returns the files of a folder, or of its folder data/, where repositories of the Hub keep them."""
    for place in (folder, folder / "data"):
        found = [file for suffix in _SUFFIXES for file in sorted(place.glob(f"*{suffix}")) if file.name[0] != "."]
        if found:
            return found
    return []


def _of_split(folder: Path, split: str | None) -> list[Path]:
    """Returns the files of one split, which `datasets` names SPLIT-00000-of-00002.parquet."""
    files = _files_in(folder)
    splits = [re.sub(r"(-\d+)?(-of-\d+)?(-[0-9a-f]{16})?$", "", file.stem) for file in files]
    if split is None and len({*splits}) > 1 and "train" in splits:
        split = "train"
    wanted = [file for file, name in zip(files, splits, strict=True) if name == split]
    # Such as 0000.parquet, 0001.parquet.
    is_numbered = all(re.search(r"\d", name) for name in splits)
    if split is None and (len({*splits}) == 1 or is_numbered):
        return files
    if not wanted:
        raise DataError(
            f"{folder} has the splits {', '.join(sorted({*splits}))}: choose one of them, as {folder}?split={splits[0]}."
        )
    return wanted


@dataclass(frozen=True, kw_only=True)
class _Table:
    files: Sequence[Path]
    image: str
    label: str
    class_names: Sequence[str] | None

    @classmethod
    def of(cls, files: Sequence[Path], choices: dict[str, str]) -> _Table:
        with _opened(files[0]) as first:
            schema = first.schema_arrow if hasattr(first, "schema_arrow") else first.schema
        try:
            features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        except (KeyError, ValueError, TypeError):
            features = {}
        kinds = {name: feature.get("_type") for name, feature in features.items() if isinstance(feature, dict)}

        def choose(what: str, *candidates: list[str]) -> str:
            given = choices.get(what)
            if given is not None and given in schema.names:
                return given
            for found in candidates:
                if given is None and len(found) == 1:
                    return found[0]
            raise DataError(
                f"Cannot tell which column of {files[0]} is the {what}: it has {', '.join(schema.names)}. Name it in the path: "
                f"{files[0].parent}?{what}={schema.names[0]}."
            )

        image = choose(
            "image",
            [name for name in schema.names if kinds.get(name) == "Image"],
            [
                field.name
                for field in schema
                if str(field.type).startswith(("struct<bytes: ", "binary", "large_binary"))
            ],
        )
        label = choose(
            "label",
            [name for name in schema.names if kinds.get(name) == "ClassLabel"],
            [name for name in schema.names if name in _LABEL_NAMES],
        )
        names = features.get(label, {}).get("names") if kinds.get(label) == "ClassLabel" else None
        return cls(files=files, image=image, label=label, class_names=names)

    def rows(self, *columns: str) -> Iterator[tuple[str, list[Any]]]:
        """Yields (where, values of the columns) of every row, in the order of the files."""
        for file in self.files:
            with _opened(file) as opened:
                number = 0
                if hasattr(opened, "iter_batches"):
                    batches = opened.iter_batches(_ROWS, columns=list(columns))
                else:
                    batches = (batch.select(list(columns)) for batch in opened)
                for batch in batches:
                    for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                        yield f"row {number} of {file}", list(values)
                        number += 1


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a Parquet file or an Arrow stream; turns errors of pyarrow into ours."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"Reading {file} needs pyarrow: pip install 'megaclass[parquet]'") from None
    try:
        if file.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as opened:
                yield opened
        else:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                yield stream
    except (pyarrow.ArrowException, KeyError) as error:
        raise DataError(f"Cannot read {file}: {error}") from error


def _convert(table: _Table, folder: Path) -> None:
    names, labels = table.class_names, array("q")
    # Number of each text in the order of the rows.
    texts: dict[str, int] = {}
    for where, (label,) in table.rows(table.label):
        is_number = isinstance(label, int) and 0 <= label < 2**63
        if not (is_number or isinstance(label, str)):
            raise DataError(f"{where} has {label!r} as {table.label}: expected a class, an integer from 0 or a text.")
        if labels and is_number == bool(texts):
            raise DataError(f"The column {table.label} of {table.files[0].parent} mixes texts and numbers.")
        labels.append(label if is_number else texts.setdefault(label, len(texts)))
    if not labels:
        raise DataError(f"{table.files[0]} has no rows.")
    labels_N = np.array(labels, dtype=np.int64)
    if texts:
        names = sorted(texts)
        number_of = {name: number for number, name in enumerate(names)}
        labels_N = np.array([number_of[text] for text in texts])[labels_N]
    if names is None:
        require_plausible_labels(labels_N, lambda row: f"Row {row} of {table.files[0].parent}")
    largest = int(labels_N.max())
    num_classes = len(names) if names is not None else largest + 1
    if largest >= num_classes:
        raise DataError(f"{table.files[0]} has class {largest}, but names {num_classes} classes.")
    if names is not None:
        lines = (" ".join(name.split("\n")) + "\n" for name in names)
        (folder / CLASSES_FILE).write_bytes("".join(lines).encode())
    is_in_id2 = num_classes > MAX_EXACT_LABEL
    size = None
    with RecordWriter(folder / "train.rec") as writer, progress_bar("converting", len(labels)) as bar:
        for key, (where, (image,)) in enumerate(table.rows(table.image)):
            payload = image.get("bytes") if isinstance(image, dict) else image
            if not isinstance(payload, bytes) or not payload:
                raise DataError(
                    f"{where} has no bytes in the column {table.image}: images next to the file are not read."
                )
            if size is None:
                # Single images that do not decode are replaced in training.
                with contextlib.suppress(DataError):
                    size = image_dimensions(payload, where)
            writer.write(key, image_record(int(labels_N[key]), payload, key, is_label_in_id2=is_in_id2))
            bar.advance_to(key + 1)
    if size is None:
        raise DataError(f"None of the images in the column {table.image} of {table.files[0].parent} can be read.")
    text = f"{num_classes},{size[0]},{size[1]}\n" + (f"{LABELS_IN_ID2}\n" if is_in_id2 else "")
    (folder / "property").write_text(text, encoding="ascii")
