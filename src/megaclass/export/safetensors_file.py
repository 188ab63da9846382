"""Backbone <-> model.safetensors: weights and a few words about them, no code in the file, any tool reads it."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megaclass.checkpoint.tensor_file import read_tensors
from megaclass.errors import ExportError
from megaclass.files import published_file


def save_model(path: Path, backbone: nn.Module, *, metadata: Mapping[str, str]) -> None:
    """Writes parameters and buffers of the backbone, read back and compared before the file appears at `path`.

    The same weights and metadata give the same bytes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Tied weights share memory, which the format refuses: each name gets its own copy.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in backbone.state_dict().items()}
    with published_file(path) as unfinished:
        try:
            save_file(tensors, unfinished, metadata=dict(metadata))
        except SafetensorError as error:
            raise ExportError(f"Cannot write {path}: {error}.") from error
        _sort_metadata(unfinished)
        read_back = read_tensors(unfinished)
        for name, tensor in tensors.items():
            # Compared as bytes: NaN equals itself, -0.0 differs from 0.0.
            if not torch.equal(_as_bytes(read_back[name]), _as_bytes(tensor)):
                raise ExportError(f"Cannot write {path}: tensor {name!r} read back differs. Check the disk.")


def _sort_metadata(path: Path) -> None:
    """The library writes metadata in the random order of a hash map; sorted, equal models are equal files.

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
