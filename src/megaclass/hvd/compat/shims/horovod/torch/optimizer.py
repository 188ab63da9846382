import functools
from typing import Any

from megaclass.hvd.compat.util import split_list
from megaclass.hvd.compression import Compression
from megaclass.hvd.functions import broadcast_object
from megaclass.hvd.mpi_ops import (
    Adasum,
    Average,
    ProcessSet,
    Sum,
    allreduce_async_,
    global_process_set,
    grouped_allreduce_async_,
    rocm_built,
    size,
    sparse_allreduce_async,
    synchronize,
)
from megaclass.hvd.optimizer import DistributedOptimizer as _DistributedOptimizerOfMegaclass
from megaclass.hvd.optimizers.adasum import _DistributedAdasumOptimizer
from megaclass.hvd.optimizers.gradients import _DistributedOptimizer


@functools.wraps(_DistributedOptimizerOfMegaclass)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
    wrapped = _DistributedOptimizerOfMegaclass(*args, **kwargs)
    # Lightning recognises an already wrapped optimizer by the word horovod in the name of its class.
    type(wrapped).__module__ = __name__
    return wrapped


DistributedOptimizer.__module__ = __name__
