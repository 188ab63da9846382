"""Gradient compression by Horovod's interface.

A user's compressor is a class with static methods `compress(tensor) -> (tensor, context)` and
`decompress(tensor, context)`; the tensor that compress() returns is reduced in its own dtype. The compressors below are
recognised by allreduce, which then uses a wire format (megaclass_launch/ranks/wire_formats.py) instead: each rank sends
16 or 8 bits per number, and sums are formed in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod.engine.kinds import Average, Sum
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


class CastCompressor(Compressor):
    """Sends floating-point numbers in another dtype, which `cast(tensor, dtype)` changes to."""

    dtype: Any
    cast: Callable[[Any, Any], Any] = staticmethod(Tensor.type)

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (cls.cast(tensor, cls.dtype) if _is_floating(tensor.dtype) else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return cls.cast(tensor, ctx) if _is_floating(ctx) else tensor


def _is_floating(dtype: Any) -> bool:
    return bool(dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.is_floating)


class FP16Compressor(CastCompressor):
    """Sends 16 bits per number, as float16."""

    wire_name, dtype = "fp16", torch.float16


class BF16Compressor(CastCompressor):
    """Sends 16 bits per number, as bfloat16, which has the range of float32."""

    wire_name, dtype = "bf16", torch.bfloat16


class _ScaledCompressor(NoneCompressor):
    """Sends 8 bits per number and one exponent per block. Such numbers cannot be added: only allreduce supports them."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if _is_floating(tensor.dtype):
            raise ValueError(
                "8-bit compression is for allreduce with op=Sum and op=Average only, and for groups in which all tensors are "
                "of floating point."
            )
        return tensor, None


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


def wire_of(compression: Any, tensors: Sequence[Any], op: int) -> str:
    """Returns the wire format of an allreduce; empty if compress() and decompress() are called for each tensor instead.

    These are called of a user's compressor, for Min, Max and Product, and if there is a tensor of integers, or one for which
    the format would not save bytes: an operation has one wire format.
    """
    # Not an inherited name: a subclass may change compress() and is then called like any user's compressor.
    wire: str = getattr(compression, "__dict__", {}).get("wire_name", "")
    if not wire or op not in (Average, Sum):
        return ""
    num_bytes = WIRE_FORMATS[wire].dtype.itemsize
    return wire if all(_is_floating(t.dtype) and num_bytes < _itemsize(t.dtype) for t in tensors) else ""


def _itemsize(dtype: Any) -> int:
    size: int = dtype.itemsize if isinstance(dtype, torch.dtype) else dtype.size
    return size
