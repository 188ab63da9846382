"""Horovod's API for PyTorch: `import horovod.torch as hvd`.

mpi_ops         the collective operations, and init, shutdown, rank, size and the questions about the build
optimizer       DistributedOptimizer
functions       broadcasts of objects, parameters and optimizer states
compression, sync_batch_norm
elastic/        jobs whose number of ranks changes: run, TorchState, ElasticSampler
"""

import torch as _torch

from horovod.common.util import check_extension
from horovod.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm
from horovod.torch.compression import *
from horovod.torch.functions import *
from horovod.torch.mpi_ops import *
from horovod.torch.optimizer import *
from horovod.torch.sync_batch_norm import *

_MPI_LIB_AVAILABLE = True
_PUBLIC_MODULES = (mpi_ops, compression, functions, optimizer, sync_batch_norm)
# Horovod has these in mpi_ops only.
_NOT_HERE = {"handle_average_backwards_compatibility", "is_homogeneous"}
__all__ = sorted({name for module in _PUBLIC_MODULES for name in module.__all__} - _NOT_HERE)


def _check_has_gpu() -> bool:
    return _torch.cuda.is_available()


def __dir__() -> list[str]:
    return __all__
