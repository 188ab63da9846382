"""Writes and reads centres.safetensors, which holds the class centres by class name.

Tensors: `centres` (C, M, D) float32 with M sub-centres per class; `names_utf8`, the bytes of all names in a row; and
`name_ends` (C,), the end of each name. One tensor per name would need a header of hundreds of megabytes for two million
classes, which the format refuses.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaclass.errors import DataError, ExportError
from megaclass.evaluate.protocols.centre_health import ClassCentres
from megaclass_launch.files import published_file


class CentresByName(Mapping[str, Tensor]):
    """Maps class names to centres: centres["anna"] is (M, D). Iteration yields the names in the order of the classes."""

    def __init__(self, centres_CMD: Tensor, names: list[str]) -> None:
        self.centres_CMD = centres_CMD
        self._places = {name: place for place, name in enumerate(names)}

    def __getitem__(self, name: str) -> Tensor:
        return self.centres_CMD[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def save_centres(path: Path, centres: ClassCentres, *, metadata: Mapping[str, str]) -> None:
    """Writes the centres; they are read back and compared before the file appears at `path`."""
    from safetensors.torch import save_file

    encoded = [name.encode() for name in centres.names]
    tensors = {
        "centres": centres.weight_RD.float().unflatten(0, (len(encoded), -1)).contiguous(),
        "names_utf8": torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()),
        "name_ends": torch.from_numpy(np.cumsum([len(name) for name in encoded], dtype=np.int64)),
    }
    with published_file(path) as unfinished:
        save_file(tensors, unfinished, metadata=dict(metadata))
        read_back = load_centres(unfinished)
        if list(read_back) != centres.names or not torch.equal(read_back.centres_CMD, tensors["centres"]):
            raise ExportError(
                f"Cannot write {path}: the centres read back differ. Check the disk, and that class names are unique."
            )


def load_centres(path: Path) -> CentresByName:
    """Reads a file that `save_centres` wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        text, ends = tensors["names_utf8"].numpy().tobytes(), tensors["name_ends"].tolist()
        names = [text[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
        return CentresByName(tensors["centres"], names)
    except (SafetensorError, OSError, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path} as class centres: {error}") from error
