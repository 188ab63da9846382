"""allreduce, alone and in groups. Its gradient is the allreduce of the gradient by the same op and factors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megaclass.hvd.collectives.handles import (
    checked_op,
    enqueue,
    group_of,
    handle_average_backwards_compatibility,
    synchronize,
)
from megaclass.hvd.collectives.ops import Adasum, Average, Sum
from megaclass.hvd.compression import Compression, is_scaled, wire_of
from megaclass.hvd.process_sets import ProcessSet, global_process_set
from megaclass.hvd.transport.result_memory import empty_result

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
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    **more: Any,
) -> int:
    if checked_op(op) == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(f"Tensor type {tensor.type()} is not supported by Adasum.")
    return enqueue(
        "allreduce",
        tensors,
        outputs,
        name,
        process_set,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        **more,
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Combines the tensor over ranks; the input is not modified."""
    op = handle_average_backwards_compatibility(op, average)
    output = empty_result(tensor)
    return _enqueue_allreduce([tensor], [output], name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Combines the tensor over ranks, in place."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = [tensor]
    return _enqueue_allreduce(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combines the tensor over ranks, in place, and returns it."""
    op = handle_average_backwards_compatibility(op, average)
    handle = _enqueue_allreduce(
        [tensor], [tensor], name, op, prescale_factor, postscale_factor, process_set, is_urgent=True
    )
    result: Tensor = synchronize(handle)
    return result


def compressed_allreduce_async_(
    tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet, wire: str
) -> int:
    """In place, narrow on the wire; under a name, what rounding loses is added the next time."""
    return _enqueue_allreduce(
        [tensor], [tensor], name, op, prescale, postscale, process_set, wire=wire, keeps_error=True
    )


class HorovodAllreduce(torch.autograd.Function):
    """allreduce with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        wire: str,
    ) -> Tensor:
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set, wire)
        return _allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set, wire)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        reduced = HorovodAllreduce.apply(grad_output.contiguous(), None, *ctx.arguments)  # type: ignore[no-untyped-call]
        return (reduced, *[None] * 6)


def _allreduce(
    tensor: Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    wire: str,
) -> Tensor:
    output = empty_result(tensor)
    handle = _enqueue_allreduce(
        [tensor],
        [output],
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        wire=wire,
        keeps_error=bool(wire),
        is_urgent=True,
    )
    result: Tensor = synchronize(handle)
    return result


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
    """The tensor combined over ranks; differentiable. op: Average (default), Sum, Adasum, Min, Max or Product."""
    op = handle_average_backwards_compatibility(op, average)
    wire = _wire_for(compression, tensor, op)
    packed, ctx = (tensor, None) if wire else compression.compress(tensor)
    if packed.requires_grad and torch.is_grad_enabled():
        reduced = HorovodAllreduce.apply(packed, name, op, prescale_factor, postscale_factor, process_set, wire)  # type: ignore[no-untyped-call]
    else:
        reduced = _allreduce(packed, name, op, prescale_factor, postscale_factor, process_set, wire)
    result: Tensor = reduced if wire else compression.decompress(reduced, ctx)
    return result


def _wire_for(compression: Any, tensor: Tensor, op: int) -> str:
    """Sums and averages are made on the wire; the other ops leave it to compress() and decompress()."""
    wire = wire_of(compression, tensor)
    if op in (Average, Sum):
        return wire
    if wire and is_scaled(compression):
        raise ValueError(f"Compression in 8 bits knows the ops Sum and Average, not {op}.")
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
    """Combines each tensor of the list over ranks; one handle for all."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors)
    outputs = [empty_result(tensor) for tensor in tensors]
    return _enqueue_group(tensors, outputs, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Combines each tensor of the list over ranks, in place; one handle for all."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors)
    return _enqueue_group(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set)


def _enqueue_group(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    **more: Any,
) -> int:
    return _enqueue_allreduce(
        tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, is_grouped=True, **more
    )


def grouped_allreduce_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Combines each tensor of the list over ranks, in place, and returns them."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors)
    result: tuple[Tensor, ...] = synchronize(
        _enqueue_group(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set, is_urgent=True)
    )
    return result


class HorovodGroupedAllreduce(torch.autograd.Function):
    """grouped_allreduce with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        wire: str,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set, wire)
        outputs = [empty_result(tensor) for tensor in tensors]
        handle = _enqueue_group(
            tensors,
            outputs,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            wire=wire,
            keeps_error=bool(wire),
            is_urgent=True,
        )
        result: tuple[Tensor, ...] = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        grads = [gradient.contiguous() for gradient in grad_output]
        return (*[None] * 6, *HorovodGroupedAllreduce.apply(None, *ctx.arguments, *grads))  # type: ignore[no-untyped-call]


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
    """Each tensor of the list combined over ranks; differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    tensors = group_of(tensors)
    wires = {_wire_for(compression, tensor, op) for tensor in tensors}
    # A list in which some tensors gain nothing by compression goes the plain way, where compress() decides for each.
    wire = wires.pop() if len(wires) == 1 else ""
    if wire:
        return list(
            HorovodGroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, process_set, wire, *tensors)  # type: ignore[no-untyped-call]
        )
    if is_scaled(compression) and any(tensor.is_floating_point() for tensor in tensors):
        raise ValueError("Compression in 8 bits takes groups of floating-point tensors only.")
    packed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    reduced = HorovodGroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, process_set, "", *packed)  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]
