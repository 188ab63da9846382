from megaclass.hvd.basics import _basics
from megaclass.hvd.compression import Compression
from megaclass.hvd.mpi_ops import *  # noqa: F403

__all__ = ["Compression", "_basics"]
