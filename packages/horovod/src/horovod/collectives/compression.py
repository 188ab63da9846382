"""Gradient compression by Horovod's interface.

A user's compressor is a class with static methods `compress(tensor) -> (tensor, context)` and
`decompress(tensor, context)`; the tensor that compress() returns is reduced in its own dtype. The compressors below are
recognised by allreduce, which then uses a wire format (distributed/wire_formats.py) instead: each rank sends 16 or 8 bits
per number, and sums are formed in float32.
"""

from typing import Any

import torch
from torch import Tensor

from megaclass_launch.ranks.wire_formats import WIRE_FORMATS

__all__ = ["Compression"]


class Compressor:
    """Interface of a compressor, for the tensors of any framework."""

    wire_name = ""
    """Name of the wire format that replaces compress() and decompress() in an allreduce."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to send and the context for decompress()."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point numbers in another dtype."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.type(cls.dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.type(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Sends 16 bits per number, as float16."""

    wire_name, dtype = "fp16", torch.float16


class BF16Compressor(_CastCompressor):
    """Sends 16 bits per number, as bfloat16, which has the range of float32."""

    wire_name, dtype = "bf16", torch.bfloat16


class _ScaledCompressor(Compressor):
    """Sends 8 bits per number and one exponent per block. Encoded tensors cannot be added: only allreduce supports them."""

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


def wire_of(compression: Any, tensor: Tensor) -> str:
    """Returns the wire format for this tensor; empty for a user's compressor, or if it would not save bytes."""
    return wire_that_saves(compression, tensor.dtype.itemsize) if tensor.dtype.is_floating_point else ""


def wire_that_saves(compression: Any, num_bytes: int) -> str:
    """Returns the compressor's wire format for numbers of `num_bytes`; empty if it has none, or if that saves nothing."""
    # Not an inherited name: a subclass may change compress() and is then called like any user's compressor.
    wire: str = getattr(compression, "__dict__", {}).get("wire_name", "")
    return wire if wire and WIRE_FORMATS[wire].dtype.itemsize < num_bytes else ""


def is_scaled(compression: Any) -> bool:
    """Returns True for the 8-bit compressors."""
    return isinstance(compression, type) and issubclass(compression, _ScaledCompressor)
