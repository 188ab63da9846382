"""Gradient compression by Horovod's interface, for TensorFlow's tensors.

The interface and what allreduce does instead of calling these compressors is that of horovod.torch.compression.
"""

import tensorflow as tf

from horovod.collectives.compression import (
    CastCompressor,
    Compressor,
    FP8Compressor,
    Int8Compressor,
    NoneCompressor,
)

__all__ = ["Compression"]


class FP16Compressor(CastCompressor):
    """Sends 16 bits per number, as float16."""

    wire_name, dtype, cast = "fp16", tf.float16, staticmethod(tf.cast)


class BF16Compressor(CastCompressor):
    """Sends 16 bits per number, as bfloat16, which has the range of float32."""

    wire_name, dtype, cast = "bf16", tf.bfloat16, staticmethod(tf.cast)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp8 = FP8Compressor
    int8 = Int8Compressor
