"""DistributedOptimizer: combines gradients over ranks while backward is still running; step() applies them.

The wrapped optimizer keeps its class name, state and hooks. Both share their param_groups, so that a scheduler may be
created for either. optimizers/ has the two kinds.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Adasum, Average
from horovod.torch.compression import Compression
from horovod.torch.optimizers.adasum import _DistributedAdasumOptimizer
from horovod.torch.optimizers.base import DistributedBase
from horovod.torch.optimizers.gradients import _DistributedOptimizer

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the optimizer with gradients combined over ranks before they are applied.

    named_parameters: names of the reductions, usually model.named_parameters().
    compression: hvd.Compression.none, fp16, bf16, fp8 or int8, or a user's compressor.
    backward_passes_per_step: number of passes whose gradients are summed locally before they are sent.
    op: Average, Sum or Adasum.
    gradient_predivide_factor: f multiplies gradients by 1/f before the sum and by f/size after it; ignored with groups.
    groups: a number of groups, or lists of parameters, whose gradients are reduced together.
    sparse_as_dense: converts sparse gradients to dense ones before the reduction.
    num_groups: deprecated name of groups.
    """
    if isinstance(optimizer, DistributedBase):
        raise TypeError(
            f"This {type(optimizer).__name__} is a DistributedOptimizer already: wrap the plain optimizer, once."
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        if groups is None:
            groups = num_groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    is_adasum = op == Adasum and _basics.size() > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    base = _DistributedAdasumOptimizer if is_adasum else _DistributedOptimizer
    # As in Horovod, the result is a new subclass of the optimizer's class under the same name: isinstance() holds, and
    # hooks, schedulers and checkpoints see the optimizer they know.
    kind = type(optimizer.__class__.__name__, (base, optimizer.__class__), {"__module__": __name__})
    wrapped: Any = object.__new__(kind)
    # A scheduler replaces `step` on the instance it was created for; that must not hide the step of this class.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._prepare(named_parameters, compression, backward_passes_per_step)
    if is_adasum:
        wrapped._set_up()
    else:
        wrapped._set_up(op, gradient_predivide_factor, groups, sparse_as_dense, process_set)
    return wrapped


# Names that Horovod's own module has as well.
from horovod.common.util import split_list
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import (
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    rocm_built,
    size,
    sparse_allreduce_async,
    synchronize,
)
