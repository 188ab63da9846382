"""Horovod's API for PyTorch: `import horovod.torch as hvd`.

mpi_ops         the collective operations, and init, shutdown, rank, size and the questions about the build
optimizer       DistributedOptimizer; optimizers/ has its two kinds: gradients, adasum
functions       broadcasts of objects, parameters and optimizer states
compression, sync_batch_norm
elastic/        jobs whose number of ranks changes: run, TorchState, ElasticSampler

Public names are the `__all__` of the modules in _MODULES. They are loaded on first use, because the modules of the other
frameworks import some of these modules while they are being imported themselves.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.torch.compression import *
    from horovod.torch.functions import *
    from horovod.torch.mpi_ops import *
    from horovod.torch.optimizer import *
    from horovod.torch.sync_batch_norm import *

_MODULES = ("mpi_ops", "compression", "functions", "optimizer", "sync_batch_norm")
# Horovod has these in mpi_ops only.
_NOT_HERE = {"handle_average_backwards_compatibility", "is_homogeneous"}
_MPI_LIB_AVAILABLE = True


def _check_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    public = _public_names()
    # From now on Python finds them without calling this function.
    globals().update(public, __all__=sorted(public))
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def _public_names() -> dict[str, Any]:
    modules = [import_module(f"{__name__}.{module}") for module in _MODULES]
    return {name: getattr(module, name) for module in modules for name in module.__all__ if name not in _NOT_HERE}


def __dir__() -> list[str]:
    return sorted(_public_names())
