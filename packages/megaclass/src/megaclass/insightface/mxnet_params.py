"""Reads MXNet's `.params` files without MXNet, and renames the arrays of an InsightFace backbone to our names."""

import re
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.errors import CheckpointError

_FILE_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = ("<f4", "<f8", "<f2", "u1", "<i4", "i1", "<i8")
_MAX_DIMENSIONS = 32
# InsightFace's MXNet networks take (pixel - 127.5) / 128, ours (pixel - 127.5) / 127.5.
_INPUT_SCALE = 127.5 / 128
# InsightFace's MXNet networks add 2e-5 to a variance, our iresnet 1e-5.
_EXTRA_EPS = 2e-5 - 1e-5


def read_params(path: Path) -> dict[str, NDArray[np.generic]]:
    """Returns all arrays of the file by name, with the prefixes `arg:` and `aux:`; unnamed arrays get their number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    reader = _Reader(data, path)
    if reader.number("<Q") != _FILE_MAGIC:
        raise CheckpointError(f"{path} is not an MXNet .params file: its first eight bytes are not {_FILE_MAGIC:#x}.")
    reader.number("<Q")
    arrays = [reader.array() for _ in range(reader.count())]
    num_names = reader.count()
    if num_names not in (0, len(arrays)):
        raise CheckpointError(f"{path} holds {len(arrays)} arrays but {num_names} names.")
    names = [reader.name() for _ in range(num_names)] or [str(i) for i in range(len(arrays))]
    return dict(zip(names, arrays, strict=True))


def backbone_state(params: dict[str, NDArray[np.generic]], path: Path) -> dict[str, Tensor]:
    """Returns the state dict of our iresnet for InsightFace's MXNet ResNet ('fresnet', three-BN units, output layer E).

    The scale of the input and the eps of the batch norms differ. Both differences are folded into the weights: the first
    convolution is scaled, and the difference in eps is added to the running variances. The embeddings equal MXNet's.
    """
    state = {}
    for full_name, array in params.items():
        name = full_name.partition(":")[2]
        renamed = _rename(name)
        if renamed is None:
            raise CheckpointError(f"{path}: the array {full_name!r} is not part of an InsightFace ResNet.")
        state[renamed] = torch.from_numpy(np.array(array))
    if "features.weight" in state:
        # MXNet stores a gamma here, but ignores it because of fix_gamma=True.
        state["features.weight"] = torch.ones_like(state["features.weight"])
    for name, tensor in state.items():
        if name == "conv1.weight":
            state[name] = (tensor.double() * _INPUT_SCALE).to(torch.promote_types(tensor.dtype, torch.float32))
        elif name.endswith("running_var"):
            state[name] = (tensor.double() + _EXTRA_EPS).to(torch.promote_types(tensor.dtype, torch.float32))
    return state


_BN = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_var": "running_var"}
_LAYERS = {
    "conv0": "conv1",
    "bn0": "bn1",
    "relu0": "prelu",
    "bn1": "bn2",
    "pre_fc1": "fc",
    "fc1": "features",
}
_UNIT_LAYERS = {
    "bn1": "bn1",
    "conv1": "conv1",
    "bn2": "bn2",
    "relu1": "prelu",
    "conv2": "conv2",
    "bn3": "bn3",
    "conv1sc": "downsample.0",
    "sc": "downsample.1",
}


def _rename(name: str) -> str | None:
    match = re.fullmatch(r"(?:stage(\d+)_unit(\d+)_)?(\w+?)_(weight|bias|gamma|beta|moving_mean|moving_var)", name)
    if match is None:
        return None
    stage, unit, layer, kind = match.groups()
    known = (_LAYERS if stage is None else _UNIT_LAYERS).get(layer)
    if known is None:
        return None
    prefix = "" if stage is None else f"layer{stage}.{int(unit) - 1}."
    return f"{prefix}{known}.{_BN.get(kind, kind)}"


class _Reader:
    """Reads values one after the other; errors name the position in the file."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes < 0 or self._at + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self._path} ends at byte {len(self._data)}; expected {num_bytes} more bytes at {self._at}."
            )
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def number(self, code: str) -> int:
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def count(self) -> int:
        value = self.number("<Q")
        if value > len(self._data):
            raise CheckpointError(
                f"{self._path}, byte {self._at - 8}: {value} entries do not fit into {len(self._data)} bytes."
            )
        return value

    def name(self) -> str:
        return self.take(self.count()).decode(errors="replace")

    def array(self) -> NDArray[np.generic]:
        start = self._at
        magic = self.number("<I")
        if magic in (_V2, _V3):
            if self.number("<i") != 0:
                raise CheckpointError(f"{self._path}, byte {start}: sparse arrays are not supported.")
            dims = self._dims(self.number("<I"), "<q")
        elif magic == _V1:
            dims = self._dims(self.number("<I"), "<q")
        else:
            # The oldest files have no magic number: the first word is the number of dimensions.
            dims = self._dims(magic, "<I")
        self.take(8)  # device type and id
        code = self.number("<i")
        if not 0 <= code < len(_DTYPES):
            raise CheckpointError(f"{self._path}, byte {self._at - 4}: unknown dtype {code}.")
        dtype = np.dtype(_DTYPES[code])
        num_bytes = dtype.itemsize
        for dim in dims:
            num_bytes *= dim
        return np.frombuffer(self.take(num_bytes), dtype=dtype).reshape(dims)

    def _dims(self, count: int, code: str) -> list[int]:
        if count > _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self._path}, byte {self._at - 4}: an array of {count} dimensions; is the file damaged?"
            )
        dims = [self.number(code) for _ in range(count)]
        if any(not 1 <= dim <= len(self._data) for dim in dims):
            raise CheckpointError(
                f"{self._path}, byte {self._at}: an array of shape {dims} does not fit into {len(self._data)} bytes; is the "
                f"file damaged?"
            )
        return dims
