import importlib
from typing import Any

from megaclass.hvd import *
from megaclass.hvd import __all__ as _names

from . import compression as compression
from . import functions as functions
from . import mpi_ops as mpi_ops
from . import optimizer as optimizer
from . import sync_batch_norm as sync_batch_norm
from .optimizer import DistributedOptimizer as DistributedOptimizer

__all__ = [name for name in _names if name not in ("run", "shims_folder")]

_MPI_LIB_AVAILABLE = True


def _check_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module(f"{__name__}.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
