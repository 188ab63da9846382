"""Writes model.safetensors: weights and a few lines of metadata. The file holds no code, and any tool reads it."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megaclass.checkpoint.tensor_file import read_tensors
from megaclass.errors import CheckpointError, ExportError
from megaclass.evaluate.protocols.centre_health import read_run_centres
from megaclass.export.centres_file import save_centres
from megaclass.export.check import require_same_when_opened
from megaclass.export.exporter import Exporter, ExportJob
from megaclass_launch.files import published_file

_FILE, _CENTRES_FILE = "model.safetensors", "centres.safetensors"
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
    """Sorts the metadata, which the library writes in the random order of a hash map, so that equal models are equal files.

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
    if job.run is None:
        return
    try:
        centres = read_run_centres(job.run).in_memory()
    except CheckpointError:
        return  # a run whose checkpoints were deleted has no centres; its model is exported without them
    save_centres(job.folder / _CENTRES_FILE, centres, metadata={"format": "megaclass", "content": "class centres"})


EXPORTER = Exporter(file=_FILE, write=_write, usage=_USAGE, extra_files=(_CENTRES_FILE,))
