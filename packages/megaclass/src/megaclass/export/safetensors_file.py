"""Writes model.safetensors and centres.safetensors. The files hold no code, and any tool reads them.

model.safetensors: weights and a few lines of metadata. centres.safetensors: `centres` (C, M, D)
float32 with M sub-centres per class; `names_utf8`, the bytes of all class names in a row; and
`name_ends` (C,), the end of each name. One tensor per name would need a header of hundreds of
megabytes for two million classes, which the format refuses.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from megaclass.checkpoint.tensor_file import read_tensors
from megaclass.errors import ExportError
from megaclass.evaluation.centres import CENTRES_FILE, ModelCentres, read_exported_centres
from megaclass.export.check import Exporter, ExportJob, require_same_when_opened
from megaclass_launch.files import published_file

_FILE = "model.safetensors"
_USAGE = """```python
import megaclass

model = megaclass.load("model.safetensors")
embeddings = model.embed(["first.jpg", "second.jpg"])  # aligned faces; rows are normalised
print("cosine:", embeddings[0] @ embeddings[1])
```"""


def save_model(path: Path, backbone: nn.Module, *, metadata: Mapping[str, str]) -> None:
    """Writes parameters and buffers of the backbone; they are read back and compared before the file appears at `path`.

    The same weights and metadata give the same bytes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Tied weights share memory, which the format refuses: each name gets a copy of its own.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in backbone.state_dict().items()}
    with published_file(path) as unfinished:
        try:
            save_file(tensors, unfinished, metadata=dict(metadata))
        except SafetensorError as error:
            raise ExportError(f"Cannot write {path}: {error}.") from error
        _sort_metadata(unfinished)
        read_back = read_tensors(unfinished)
        for name, tensor in tensors.items():
            # As bytes, NaN equals itself and -0.0 differs from 0.0.
            if not torch.equal(_as_bytes(read_back[name]), _as_bytes(tensor)):
                raise ExportError(f"Cannot write {path}: tensor {name!r} read back differs. Check the disk.")


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata, which the library writes in the random order of a hash map, so equal models are equal files.

    The header (u64 length, then JSON padded with spaces) is rewritten in place: sorting does not change its length.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the sorted header must fit where the unsorted one stood"
        file.seek(8)
        file.write(text.ljust(length))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _write(job: ExportJob) -> None:
    save_model(job.folder / _FILE, job.model.network, metadata=job.metadata)
    require_same_when_opened(job, _FILE)
    if job.centres is not None:
        metadata = {"format": "megaclass", "content": "class centres"}
        if not job.centres.is_cosine:
            metadata["similarity"] = "inner"
        save_centres(job.folder / CENTRES_FILE, job.centres, metadata=metadata)


EXPORTER = Exporter(file=_FILE, write=_write, usage=_USAGE, extra_files=(CENTRES_FILE,))


def save_centres(path: Path, centres: ModelCentres, *, metadata: Mapping[str, str]) -> None:
    """Writes the centres; they are read back and compared before the file appears at `path`."""
    from safetensors.torch import save_file

    encoded = list(centres.classes.names())
    tensors = {
        "centres": centres.all_rows().unflatten(0, (len(encoded), -1)).contiguous(),
        "names_utf8": torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()),
        "name_ends": torch.from_numpy(np.cumsum([len(name) for name in encoded], dtype=np.int64)),
    }
    with published_file(path) as unfinished:
        save_file(tensors, unfinished, metadata=dict(metadata))
        read_back = read_exported_centres(unfinished)
        names = centres.names()
        is_same = read_back.names() == names and torch.equal(read_back.all_rows(), tensors["centres"].flatten(0, 1))
        if not is_same or len(set(names)) < len(names):
            raise ExportError(
                f"Cannot write {path}: the centres read back differ. Check the disk, and that class names are unique."
            )


def load_centres(path: Path) -> dict[str, Tensor]:
    """Reads a file that `save_centres` wrote: the (M, D) centres of each class by its name, in the order of the classes."""
    centres = read_exported_centres(path)
    centres_CMD = centres.all_rows().unflatten(0, (-1, centres.rows_per_class))
    return dict(zip(centres.names(), centres_CMD, strict=True))
