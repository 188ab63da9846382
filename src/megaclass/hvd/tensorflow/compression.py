"""Gradient compression by Horovod's interface, for TensorFlow's tensors.

A user's compressor is a class with static methods `compress(tensor) -> (tensor, context)` and
`decompress(tensor, context)`; the tensor that compress() returns is reduced in its own dtype. The compressors of this module
are recognised by allreduce, which uses a wire format of the engine instead: each rank sends 16 or 8 bits per number, and
sums are formed in float32.
"""

from typing import Any

import tensorflow as tf

from megaclass.distributed.wire_formats import WIRE_FORMATS
from megaclass.hvd.collectives.ops import Average, Sum

__all__ = ["Compression"]


class Compressor:
    """Interface of a compressor."""

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


class FP16Compressor(Compressor):
    """Sends 16 bits per number, as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class BF16Compressor(Compressor):
    """Sends 16 bits per number, as bfloat16, which has the range of float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.bfloat16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class _ScaledCompressor(Compressor):
    """Sends 8 bits per number and one exponent per block. Such numbers cannot be added: only allreduce supports them."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype.is_floating:
            raise ValueError("8-bit compression is for allreduce with op=Sum and op=Average only.")
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP8Compressor(_ScaledCompressor):
    """Sends 8 bits per number, as scaled float8 (E4M3)."""


class Int8Compressor(_ScaledCompressor):
    """Sends 8 bits per number, as scaled integers."""


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


def wire_of(compression: Any, dtype: Any, op: int) -> str:
    """Returns the wire format of an allreduce; empty where compress() and decompress() are called instead."""
    wire = _WIRES.get(compression, "")
    if not wire or not dtype.is_floating or op not in (Average, Sum):
        return ""
    return wire if WIRE_FORMATS[wire].dtype.itemsize < dtype.size else ""
