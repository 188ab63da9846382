"""Horovod's collective operations, with its names, arguments and gradients.

Every operation has a name; ranks meet under it, whatever the order in which they call. Without a name one is counted
up, and ranks must call in the same order. `_async` returns a handle for poll() and synchronize(); `_` at the end works
in place; `grouped_` runs when all tensors of the list are there on all ranks.

Gradients are Horovod's: allreduce's is the allreduce of the gradient by the same op and factors; allgather's and
broadcast's an average; reducescatter's an allgather; alltoall's an alltoall back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megaclass.hvd.basics import _basics
from megaclass.hvd.compression import Compression, is_scaled, wire_of
from megaclass.hvd.exceptions import HorovodInternalError
from megaclass.hvd.large_tensors import empty_result
from megaclass.hvd.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from megaclass.hvd.reductions import Adasum, Average, Max, Min, Product, Sum
from megaclass.hvd.submission import (
    barrier,
    checked_op,
    enqueue,
    fetch,
    handle_average_backwards_compatibility,
    join,
    poll,
    synchronize,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built


# -- allreduce --------------------------------------------------------------------------------------------------------


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
    return _enqueue_allreduce([tensor], [tensor], name, op, prescale_factor, postscale_factor, process_set)


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
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Combines each tensor of the list over ranks; one handle for all."""
    op = handle_average_backwards_compatibility(op, average)
    outputs = [empty_result(tensor) for tensor in tensors]
    return _enqueue_group(tensors, outputs, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Combines each tensor of the list over ranks, in place; one handle for all."""
    op = handle_average_backwards_compatibility(op, average)
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
    check_group(tensors)
    return _enqueue_allreduce(
        tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, is_grouped=True, **more
    )


def check_group(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")
    if len({tensor.device for tensor in tensors}) > 1:
        raise HorovodInternalError("Tensors in list must be on same device.")


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Combines each tensor of the list over ranks, in place, and returns them."""
    op = handle_average_backwards_compatibility(op, average)
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
    tensors: Sequence[Tensor],
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
    check_group(tensors)
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


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Combines a sparse tensor over ranks by gathering indices and values; call what it returns for the result."""
    # allgather concatenates along dimension 0: indices travel one a row.
    indices = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, name=f"{name}.indices", process_set=process_set)
    values_handle = allgather_async(tensor._values().contiguous(), name=f"{name}.values", process_set=process_set)

    def result() -> Tensor:
        values = synchronize(values_handle)
        gathered = synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(gathered.transpose(0, 1), values, tensor.size())

    return result


# -- allgather --------------------------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenates the ranks' tensors along dimension 0, which may differ between them."""
    return enqueue("allgather", [tensor], None, name, process_set)


class HorovodAllgather(torch.autograd.Function):
    """allgather with a gradient: the average over ranks, of which each takes its own rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_grouped: bool, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        handle = enqueue("allgather", tensors, None, name, process_set, is_grouped=is_grouped, is_urgent=True)
        outputs, ctx.sizes = fetch(handle, lambda operation: (tuple(operation.outputs), operation.sizes))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        place = ctx.process_set.rank()
        reduced = grouped_allreduce(
            [gradient.contiguous() for gradient in grad_output], op=Average, process_set=ctx.process_set
        )
        own = [
            gradient.narrow(0, sum(rows[:place]), rows[place])
            for gradient, rows in zip(reduced, ctx.sizes, strict=True)
        ]
        return (None, None, None, *own)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors, concatenated along dimension 0, which may differ between them; differentiable."""
    result: Tensor = HorovodAllgather.apply(name, process_set, False, tensor)[0]  # type: ignore[no-untyped-call]
    return result


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """allgather of each tensor of the list; one handle for all."""
    check_group(tensors)
    return enqueue("allgather", tensors, None, name, process_set, is_grouped=True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """allgather of each tensor of the list; differentiable."""
    check_group(tensors)
    result: tuple[Tensor, ...] = HorovodAllgather.apply(name, process_set, True, *tensors)  # type: ignore[no-untyped-call]
    return result


# -- broadcast --------------------------------------------------------------------------------------------------------


def _enqueue_broadcast(
    tensor: Tensor,
    output: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    is_urgent: bool = False,
) -> int:
    job = _basics.job()
    members = job.process_sets.get(process_set.process_set_id, ())
    # In a set that is not there, or not ours, the membership is what is wrong.
    if members and job.meeting.rank in members and root_rank not in members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set: its ranks are {list(members)}."
        )
    return enqueue("broadcast", [tensor], [output], name, process_set, root=root_rank, is_urgent=is_urgent)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The root's tensor on every rank; the input is not modified. `root_rank` is the global rank."""
    output = empty_result(tensor)
    return _enqueue_broadcast(tensor, output, root_rank, name, process_set)


class HorovodBroadcast(torch.autograd.Function):
    """broadcast with a gradient: the average over ranks on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        output = empty_result(tensor)
        result: Tensor = synchronize(_enqueue_broadcast(tensor, output, root_rank, name, process_set, is_urgent=True))
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        reduced = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.process_set)
        return (reduced if rank() == ctx.root_rank else reduced * 0), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor on every rank; differentiable. `root_rank` is the global rank."""
    result: Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Overwrites the tensor by the root's. `root_rank` is the global rank."""
    return _enqueue_broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites the tensor by the root's and returns it. `root_rank` is the global rank."""
    result: Tensor = synchronize(_enqueue_broadcast(tensor, tensor, root_rank, name, process_set, is_urgent=True))
    return result


# -- alltoall ---------------------------------------------------------------------------------------------------------


def _enqueue_alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet, *, is_urgent: bool = False
) -> int:
    job = _basics.job()
    num_members = len(job.process_sets.get(process_set.process_set_id, (0,)))
    if isinstance(splits, Tensor):
        if splits.dim() > 1:
            raise ValueError("alltoall expects a 1D splits tensor")
        if splits.dtype is not torch.int32:
            raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    given = tuple(int(rows) for rows in splits) if splits is not None else ()
    num_rows = tensor.shape[0] if tensor.dim() else 0
    if not given:
        if num_rows % num_members:
            raise ValueError(
                f"splits not provided, but first dimension of tensor is not an even multiple of the number of workers "
                f"({num_rows} rows, {num_members} workers)."
            )
        given = (num_rows // num_members,) * num_members
    if len(given) != num_members:
        raise ValueError(
            f"Number of entries in splits does not equal number of workers ({len(given)} entries, {num_members} workers)."
        )
    if sum(given) > num_rows or min(given) < 0:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor, or one is negative "
            f"(splits {list(given)}, {num_rows} rows)."
        )
    return enqueue("alltoall", [tensor], None, name, process_set, splits=given, is_urgent=is_urgent)


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Sends rows to each rank; synchronize() gives what was received and how many rows came from each rank."""
    return _enqueue_alltoall(tensor, splits, name, process_set)


class HorovodAlltoall(torch.autograd.Function):
    """alltoall with a gradient: rows go back to where they came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        handle = _enqueue_alltoall(tensor, splits, name, process_set, is_urgent=True)
        output, received = synchronize(handle)
        ctx.process_set = process_set
        ctx.received = received
        ctx.shape = tensor.shape
        if isinstance(splits, Tensor):
            received = received.to(splits.device)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *dead_gradients: Any) -> Any:
        gradient, _ = alltoall(grad_output.contiguous(), splits=ctx.received, process_set=ctx.process_set)
        # Rows that no split sent anywhere have no gradient.
        missing = ctx.shape[0] - gradient.shape[0]
        if missing:
            gradient = torch.cat([gradient, gradient.new_zeros((missing, *ctx.shape[1:]))])
        return gradient, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to each rank and returns those received; with `splits` also how many came from each rank.

    `splits`: rows for each rank, a list or an int32 tensor; None: as many for each. Differentiable.
    """
    output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


# -- reducescatter ----------------------------------------------------------------------------------------------------


def _enqueue_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    **more: Any,
) -> int:
    if checked_op(op) not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports SUM and AVERAGE.")
    return enqueue(
        "reducescatter",
        tensors,
        None,
        name,
        process_set,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        **more,
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Combines the tensor over ranks; each gets its part of dimension 0, the first ranks one row more if need be."""
    return _enqueue_reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor)


class HorovodReducescatter(torch.autograd.Function):
    """reducescatter with a gradient: an allgather."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        is_grouped: bool,
        *tensors: Tensor,
    ) -> Any:
        ctx.process_set = process_set
        ctx.factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)
        handle = _enqueue_reducescatter(
            tensors, name, op, process_set, prescale_factor, postscale_factor, is_grouped=is_grouped, is_urgent=True
        )
        return fetch(handle, lambda operation: tuple(operation.outputs))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        scaled = [gradient.contiguous() * ctx.factor for gradient in grad_output]
        return (*[None] * 6, *grouped_allgather(scaled, process_set=ctx.process_set))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's part of the tensor combined over ranks; differentiable. op: Average or Sum."""
    packed, ctx = _packed_for_scatter(compression, tensor)
    (reduced,) = HorovodReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, False, packed)  # type: ignore[no-untyped-call]
    result: Tensor = compression.decompress(reduced, ctx)
    return result


def _packed_for_scatter(compression: Any, tensor: Tensor) -> tuple[Tensor, Any]:
    if is_scaled(compression) and tensor.is_floating_point():
        raise ValueError("Compression in 8 bits is for allreduce; reducescatter knows none, fp16 and bf16.")
    packed: tuple[Tensor, Any] = compression.compress(tensor)
    return packed


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """reducescatter of each tensor of the list; one handle for all."""
    check_group(tensors)
    return _enqueue_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, is_grouped=True)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """reducescatter of each tensor of the list; differentiable."""
    check_group(tensors)
    packed, contexts = zip(*[_packed_for_scatter(compression, tensor) for tensor in tensors], strict=True)
    reduced = HorovodReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, True, *packed)  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]
