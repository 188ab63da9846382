"""Gradient compression by Horovod's interface, for TensorFlow's tensors.

The interface and what allreduce does instead of calling these compressors is that of horovod.torch.compression.
"""

from typing import Any

import tensorflow as tf

from horovod.collectives.compression import Compressor as Compressor
from horovod.collectives.compression import NoneCompressor as NoneCompressor
from horovod.collectives.compression import wire_that_saves
from horovod.engine.kinds import Average, Sum

__all__ = ["Compression"]


class _CastCompressor(Compressor):
    """Sends floating-point numbers in another dtype."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, cls.dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class FP16Compressor(_CastCompressor):
    """Sends 16 bits per number, as float16."""

    wire_name, dtype = "fp16", tf.float16


class BF16Compressor(_CastCompressor):
    """Sends 16 bits per number, as bfloat16, which has the range of float32."""

    wire_name, dtype = "bf16", tf.bfloat16


class _ScaledCompressor(NoneCompressor):
    """Sends 8 bits per number and one exponent per block. Such numbers cannot be added: only allreduce supports them."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype.is_floating:
            raise ValueError("8-bit compression is for allreduce with op=Sum and op=Average only.")
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


def wire_of(compression: Any, dtype: Any, op: int) -> str:
    """Returns the wire format of an allreduce; empty if compress() and decompress() are called instead."""
    return wire_that_saves(compression, dtype.size) if dtype.is_floating and op in (Average, Sum) else ""
