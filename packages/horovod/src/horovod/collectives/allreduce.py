"""allreduce, alone and in groups.

Its gradient is the allreduce of the gradient, with the same op and scale factors.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod.collectives.compression import Compression, is_scaled, wire_of
from horovod.collectives.handles import (
    ReductionOptions,
    checked_op,
    enqueue,
    group_of,
    handle_average_backwards_compatibility,
    waited,
)
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Adasum, Average, Sum
from horovod.transport.arithmetic import empty_result

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def _enqueue_allreduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    options: ReductionOptions,
    *,
    is_grouped: bool = False,
) -> int:
    if checked_op(options.op) == Adasum:
        if options.process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(f"Tensor type {tensor.type()} is not supported by Adasum.")
    return enqueue("allreduce", tensors, outputs, name, options.process_set, reduction=options, is_grouped=is_grouped)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce into a new tensor and returns its handle."""
    op = handle_average_backwards_compatibility(op, average)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _enqueue_allreduce([tensor], [empty_result(tensor)], name, options)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce in place and returns its handle."""
    op = handle_average_backwards_compatibility(op, average)
    # One list for both: enqueue() recognises an operation in place by it.
    tensors = [tensor]
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _enqueue_allreduce(tensors, tensors, name, options)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combines the tensor over ranks in place and returns it."""
    op = handle_average_backwards_compatibility(op, average)
    arguments = (name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = waited(lambda: allreduce_async_(tensor, None, *arguments))
    return result


def combine(is_grouped: bool, name: str | None, options: ReductionOptions, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Combines the tensors into new ones, which it waits for."""
    outputs = tuple([empty_result(tensor) for tensor in tensors])
    waited(lambda: _enqueue_allreduce(tensors, outputs, name, options, is_grouped=is_grouped))
    return outputs


class HorovodAllreduce(torch.autograd.Function):
    """allreduce with a gradient; takes the arguments of combine()."""

    @staticmethod
    def forward(
        ctx: Any, is_grouped: bool, name: str | None, options: ReductionOptions, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        # The operation of the backward pass has no name: the forward one of this name may be in flight again.
        ctx.arguments = (is_grouped, None, options)
        return combine(is_grouped, name, options, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        gradients = [gradient.contiguous() for gradient in grad_output]
        return (None, None, None, *HorovodAllreduce.apply(*ctx.arguments, *gradients))  # type: ignore[no-untyped-call]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the tensor combined over ranks; differentiable.

    op: Average (the default), Sum, Adasum, Min, Max or Product.
    """
    op = handle_average_backwards_compatibility(op, average)
    wire = _wire_for(compression, tensor, op)
    packed, ctx = (tensor, None) if wire else compression.compress(tensor)
    arguments = (False, name, ReductionOptions(op, prescale_factor, postscale_factor, process_set, wire), packed)
    if packed.requires_grad and torch.is_grad_enabled():
        (reduced,) = HorovodAllreduce.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        # An autograd function costs several microseconds, which a small allreduce would notice.
        (reduced,) = combine(*arguments)
    result: Tensor = reduced if wire else compression.decompress(reduced, ctx)
    return result


def _wire_for(compression: Any, tensor: Tensor, op: int) -> str:
    """Returns the wire format; empty if compress() and decompress() are called instead, as for Min, Max and Product."""
    wire = wire_of(compression, tensor)
    if op in (Average, Sum):
        return wire
    if wire and is_scaled(compression):
        raise ValueError(f"8-bit compression supports op=Sum and op=Average only, not op={op}.")
    return ""


def grouped_allreduce_async(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce of each tensor of the list into new tensors; returns one handle for all."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _enqueue_allreduce(tensors, [empty_result(tensor) for tensor in tensors], name, options, is_grouped=True)


def grouped_allreduce_async_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce of each tensor of the list in place; returns one handle for all."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _enqueue_allreduce(tensors, tensors, name, options, is_grouped=True)


def grouped_allreduce_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Combines each tensor of the list over ranks in place and returns them."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors)
    arguments = (name, op, prescale_factor, postscale_factor, process_set)
    result: tuple[Tensor, ...] = waited(lambda: grouped_allreduce_async_(tensors, None, *arguments))
    return result


def grouped_allreduce(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Returns each tensor of the list combined over ranks; differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors, if_empty=ValueError)
    wires = {_wire_for(compression, tensor, op) for tensor in tensors}
    # A group has one wire format. If its tensors differ in it, compress() is called for each of them instead.
    wire = wires.pop() if len(wires) == 1 else ""
    if not wire and is_scaled(compression) and any(tensor.is_floating_point() for tensor in tensors):
        raise ValueError("8-bit compression takes groups of floating-point tensors only.")
    pairs = [(tensor, None) if wire else compression.compress(tensor) for tensor in tensors]
    packed, contexts = zip(*pairs, strict=True)
    # Always through autograd: the cost is that of one function for the whole group.
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set, wire)
    reduced = HorovodAllreduce.apply(True, name, options, *packed)  # type: ignore[no-untyped-call]
    if wire:
        return list(reduced)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]
