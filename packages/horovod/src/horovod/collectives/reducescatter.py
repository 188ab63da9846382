"""reducescatter, alone and in groups. Its gradient is an allgather of the gradient."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod.collectives.compression import Compression, is_scaled
from horovod.collectives.exchanges import grouped_allgather
from horovod.collectives.handles import ReductionOptions, checked_op, enqueue, group_of, waited
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Average, Sum

__all__ = ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


def _enqueue_reducescatter(
    tensors: Sequence[Tensor], name: str | None, options: ReductionOptions, *, is_grouped: bool = False
) -> int:
    if checked_op(options.op) not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports SUM and AVERAGE.")
    return enqueue("reducescatter", tensors, None, name, options.process_set, reduction=options, is_grouped=is_grouped)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter and returns its handle. If rows do not divide evenly, the first ranks get one more."""
    return _enqueue_reducescatter([tensor], name, ReductionOptions(op, prescale_factor, postscale_factor, process_set))


class HorovodReducescatter(torch.autograd.Function):
    """reducescatter with a gradient: an allgather."""

    @staticmethod
    def forward(ctx: Any, is_grouped: bool, name: str | None, options: ReductionOptions, *tensors: Tensor) -> Any:
        ctx.process_set = options.process_set
        # As in Horovod, gradients are averages over ranks, so the one of a Sum is multiplied by their number.
        num_ranks = (options.process_set.size() or 1) if options.op == Sum else 1
        ctx.factor = options.prescale * options.postscale * num_ranks
        return waited(
            lambda: _enqueue_reducescatter(tensors, name, options, is_grouped=is_grouped),
            lambda operation: tuple(operation.outputs),
        )

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        scaled = [gradient.contiguous() * ctx.factor for gradient in grad_output]
        return (None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Returns this rank's rows of the tensor combined over ranks; differentiable.

    op: Average or Sum.
    """
    packed, ctx = _compressed(compression, tensor)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    (reduced,) = HorovodReducescatter.apply(False, name, options, packed)  # type: ignore[no-untyped-call]
    result: Tensor = compression.decompress(reduced, ctx)
    return result


def _compressed(compression: Any, tensor: Tensor) -> tuple[Tensor, Any]:
    if is_scaled(compression) and tensor.is_floating_point():
        raise ValueError(
            "reducescatter supports Compression.none, fp16 and bf16; 8-bit compression is for allreduce only."
        )
    packed: tuple[Tensor, Any] = compression.compress(tensor)
    return packed


def grouped_reducescatter_async(
    tensors: Iterable[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter of each tensor of the list; returns one handle for all."""
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _enqueue_reducescatter(group_of(tensors), name, options, is_grouped=True)


def grouped_reducescatter(
    tensors: Iterable[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Returns the reducescatter of each tensor of the list; differentiable."""
    tensors = group_of(tensors, if_empty=ValueError)
    packed, contexts = zip(*[_compressed(compression, tensor) for tensor in tensors], strict=True)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    reduced = HorovodReducescatter.apply(True, name, options, *packed)  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]
