"""Reads and writes safetensors files of checkpoints; a written file is hashed on the way and on the disk at the end.

The format is written here rather than by its own library for two reasons: the library's files would have to be read again
to hash them, and it holds the GIL while it writes, so that a save in the background would stop the training loop.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megaclass.checkpoint.manifest import SavedFile, write_file
from megaclass.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
}
# Hashed and written while it is still in the cache of the core; larger chunks would be read from memory twice.
_CHUNK_BYTES = 8 << 20


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Refuses types that the format cannot hold, before a run spends time on training."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name} has the type {tensor.dtype}, which checkpoints cannot hold: expected one of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPE_NAMES)}. Convert it (complex numbers "
                f"with torch.view_as_real), or register the buffer with persistent=False if it can be recomputed."
            )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors by name, on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"Cannot read {path} as safetensors: {error}") from error


def tensors_with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names start with the prefix, under the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], class_start: int = 0, class_stop: int = 0) -> SavedFile:
    """Writes contiguous CPU tensors to a new file. An existing file is an error: no other process may write here."""
    # Wide types first keep every tensor aligned to its width, as in the files of the safetensors library.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    return write_file(path, _chunks(ordered), class_start, class_stop)


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the u64 length of the header, the header as JSON padded to a multiple of 8, then the data, little-endian."""
    header: dict[str, object] = {}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        # A view of the host copy: no byte is copied between the tensor and the write call.
        numbers = tensor.reshape(-1).view(torch.uint8).numpy().data
        for at in range(0, len(numbers), _CHUNK_BYTES):
            yield numbers[at : at + _CHUNK_BYTES]
