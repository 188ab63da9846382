"""Gradient compression: the names of Horovod's module."""

from horovod.collectives.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression"]
