"""Gradient compression by Horovod's interface.

A user's compressor is a class with static methods `compress(tensor) -> (tensor, context)` and
`decompress(tensor, context)`; the tensor that compress() returns is reduced in its own dtype. The compressors below are
recognised by allreduce, which then uses a wire format (distributed/wire_formats.py) instead: each rank sends 16 or 8 bits
per number, and sums are formed in float32.
"""

from typing import Any

import torch
from torch import Tensor

from megaclass.distributed.wire_formats import WIRE_FORMATS

__all__ = ["Compression"]


class Compressor:
    """Interface of a compressor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to send and the context for decompress()."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends 16 bits per number, as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.type(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.type(ctx) if ctx.is_floating_point else tensor


class BF16Compressor(Compressor):
    """Sends 16 bits per number, as bfloat16, which has the range of float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.type(torch.bfloat16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.type(ctx) if ctx.is_floating_point else tensor


class _ScaledCompressor(Compressor):
    """Sends 8 bits per number and one exponent per block. Encoded tensors cannot be added: only allreduce supports them."""

    wire_name = ""

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the encoded numbers, then the exponents, as bytes."""
        if not tensor.dtype.is_floating_point:
            return tensor, None
        flat = tensor.detach().reshape(-1).float()
        # Fill up whole blocks; the longest have 128 numbers.
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 128))
        return WIRE_FORMATS[cls.wire_name].encode(padded[None])[0], (tensor.shape, tensor.dtype, padded.numel())

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        if ctx is None:
            return tensor
        shape, dtype, count = ctx
        return WIRE_FORMATS[cls.wire_name].decode(tensor[None], count)[0, : shape.numel()].view(shape).to(dtype)


class FP8Compressor(_ScaledCompressor):
    """Sends 8 bits per number, as scaled float8 (E4M3)."""

    wire_name = "fp8"


class Int8Compressor(_ScaledCompressor):
    """Sends 8 bits per number, as scaled integers."""

    wire_name = "int8"


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp8 = FP8Compressor
    int8 = Int8Compressor


# Compared by identity: a subclass may change compress() and is then called like any user's compressor.
_WIRES: dict[Any, str] = {
    FP16Compressor: "fp16",
    BF16Compressor: "bf16",
    FP8Compressor: "fp8",
    Int8Compressor: "int8",
}


def wire_of(compression: Any, tensor: Tensor) -> str:
    """Returns the wire format for this tensor; empty for a user's compressor, or where it would not save bytes."""
    wire = _WIRES.get(compression, "")
    if not wire or not tensor.dtype.is_floating_point:
        return ""
    return wire if WIRE_FORMATS[wire].dtype.itemsize < tensor.dtype.itemsize else ""


def is_scaled(compression: Any) -> bool:
    """Returns True for the 8-bit compressors."""
    return isinstance(compression, type) and issubclass(compression, _ScaledCompressor)
