"""The collective operations of the torch API, with their gradients, alone and in groups.

`_async` returns a handle, `_` at the end works in place, `grouped_` starts when all ranks have all tensors of the list.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, ParamSpec

import torch
from torch import Tensor

from horovod.collectives.compression import Compression, wire_of
from horovod.collectives.handles import (
    ReductionOptions,
    checked_members,
    checked_op,
    enqueue,
    group_of,
    handle_average_backwards_compatibility,
    synchronize,
    waited,
)
from horovod.common.basics import _basics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Adasum, Average, Sum

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]

P = ParamSpec("P")

_outputs = attrgetter("outputs")


def _blocking(start: Callable[P, int], doc: str) -> Callable[P, Any]:
    """Returns the function that calls `start` and waits for its result."""

    @functools.wraps(start)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return waited(lambda: start(*args, **kwargs))

    call.__name__ = call.__qualname__ = start.__name__.replace("_async", "")
    call.__doc__ = doc
    call.__signature__ = inspect.signature(start).replace(return_annotation=Any)  # type: ignore[attr-defined]
    return call


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], gradient_of: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.gradient_of = gradient_of
        results = tuple(run(*tensors))
        ctx.mark_non_differentiable(*[result for result in results if not result.is_floating_point()])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *ctx.gradient_of(*[gradient.contiguous() for gradient in gradients]))


def _differentiable(
    run: Callable[..., Iterable[Tensor]], gradient_of: Callable[..., Iterable[Tensor]], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns run(*tensors), whose gradient is gradient_of(gradients of the results)."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        # An autograd function costs several microseconds, which a small allreduce would notice.
        return tuple(run(*tensors))
    results: tuple[Tensor, ...] = _Differentiable.apply(run, gradient_of, *tensors)  # type: ignore[no-untyped-call]
    return results


def _compressed(
    compression: Any, tensors: Iterable[Tensor], run: Callable[[list[Tensor]], Iterable[Tensor]]
) -> list[Tensor]:
    """Returns the results of run() for the compressed tensors, decompressed."""
    packed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    return [compression.decompress(result, ctx) for result, ctx in zip(run(list(packed)), contexts, strict=True)]


# ---- allreduce: its gradient is the allreduce of the gradient, with the same op and scale factors ----


def start_allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    options: ReductionOptions,
    *,
    in_place: bool = False,
    is_grouped: bool = False,
) -> int:
    """Starts an allreduce and returns its handle."""
    if checked_op(options.op) == Adasum:
        if options.process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(f"Tensor type {tensor.type()} is not supported by Adasum.")
    return enqueue(
        "allreduce",
        tensors,
        name,
        options.process_set,
        in_place=in_place,
        reduction=options,
        is_grouped=is_grouped,
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
    """Starts an allreduce into a new tensor and returns its handle."""
    op = handle_average_backwards_compatibility(op, average)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return start_allreduce([tensor], name, options)


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
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return start_allreduce([tensor], name, options, in_place=True)


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
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return start_allreduce(group_of(tensors), name, options, is_grouped=True)


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
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return start_allreduce(group_of(tensors), name, options, in_place=True, is_grouped=True)


allreduce_ = _blocking(allreduce_async_, "Combines the tensor over ranks in place and returns it.")
grouped_allreduce_ = _blocking(
    grouped_allreduce_async_, "Combines each tensor of the list over ranks in place and returns them."
)


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
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _allreduced([tensor], name, compression, options, is_grouped=False)[0]


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
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _allreduced(group_of(tensors, if_empty=ValueError), name, compression, options, is_grouped=True)


def _allreduced(
    tensors: list[Tensor], name: str | None, compression: Any, options: ReductionOptions, *, is_grouped: bool
) -> list[Tensor]:
    if wire := wire_of(compression, tensors, options.op):
        return list(_combined(tensors, name, options._replace(wire=wire), is_grouped))
    return _compressed(compression, tensors, lambda packed: _combined(packed, name, options, is_grouped))


def _combined(
    tensors: Sequence[Tensor], name: str | None, options: ReductionOptions, is_grouped: bool
) -> tuple[Tensor, ...]:
    def run(*tensors: Tensor) -> Any:
        return waited(start_allreduce, tensors, name, options, is_grouped=is_grouped, pick=_outputs)

    # The operation of the backward pass has no name: the forward one of this name may be in flight again.
    return _differentiable(run, lambda *gradients: _combined(gradients, None, options, is_grouped), tensors)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Starts the sum or average of a sparse tensor by gathering indices and values; the function it returns waits for it."""
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async supports op=Average and op=Sum only, not op={op!r}.")
    # allgather concatenates along dimension 0, so the indices are sent as one row per value.
    indices = tensor._indices().transpose(0, 1).contiguous()
    names = [f"{name}.{part}" if name is not None else None for part in ("indices", "values")]
    indices_handle = allgather_async(indices, names[0], process_set)
    values_handle = allgather_async(tensor._values().contiguous(), names[1], process_set)

    def result() -> Tensor:
        values = synchronize(values_handle)
        gathered = synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(gathered.transpose(0, 1), values, tensor.size())

    return result


# ---- reducescatter: its gradient is an allgather of the gradient ----


def start_reducescatter(
    tensors: Sequence[Tensor], name: str | None, options: ReductionOptions, *, is_grouped: bool = False
) -> int:
    """Starts a reducescatter and returns its handle."""
    if checked_op(options.op) not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports SUM and AVERAGE.")
    return enqueue("reducescatter", tensors, name, options.process_set, reduction=options, is_grouped=is_grouped)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter and returns its handle. If rows do not divide evenly, the first ranks get one more."""
    return start_reducescatter([tensor], name, ReductionOptions(op, prescale_factor, postscale_factor, process_set))


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
    return start_reducescatter(group_of(tensors), name, options, is_grouped=True)


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
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _reducescattered([tensor], name, compression, options, is_grouped=False)[0]


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
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _reducescattered(group_of(tensors, if_empty=ValueError), name, compression, options, is_grouped=True)


def _reducescattered(
    tensors: list[Tensor], name: str | None, compression: Any, options: ReductionOptions, *, is_grouped: bool
) -> list[Tensor]:
    def run(*tensors: Tensor) -> Any:
        return waited(start_reducescatter, tensors, name, options, is_grouped=is_grouped, pick=_outputs)

    def gradient_of(*gradients: Tensor) -> tuple[Tensor, ...]:
        # As in Horovod, gradients are averages over ranks, so the one of a Sum is multiplied by their number.
        num_ranks = (options.process_set.size() or 1) if options.op == Sum else 1
        factor = options.prescale * options.postscale * num_ranks
        return grouped_allgather([gradient * factor for gradient in gradients], process_set=options.process_set)

    return _compressed(compression, tensors, lambda packed: _differentiable(run, gradient_of, packed))


# ---- allgather: in its gradient each rank takes its own rows of the gradient averaged over ranks ----


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an allgather and returns its handle."""
    return enqueue("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather of each tensor of the list; returns one handle for all."""
    return enqueue("allgather", group_of(tensors), name, process_set, is_grouped=True)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the ranks' tensors concatenated along dimension 0, which may differ between ranks; differentiable."""
    return _allgathered([tensor], name, process_set, is_grouped=False)[0]


def grouped_allgather(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Returns the allgather of each tensor of the list; differentiable."""
    return _allgathered(group_of(tensors), name, process_set, is_grouped=True)


def _allgathered(
    tensors: list[Tensor], name: str | None, process_set: ProcessSet, *, is_grouped: bool
) -> tuple[Tensor, ...]:
    sizes: tuple[tuple[int, ...], ...] = ()

    def run(*tensors: Tensor) -> Any:
        nonlocal sizes
        pick = attrgetter("outputs", "sizes")
        outputs, sizes = waited(enqueue, "allgather", tensors, name, process_set, is_grouped=is_grouped, pick=pick)
        return outputs

    def gradient_of(*gradients: Tensor) -> list[Tensor]:
        rank = process_set.rank() or 0
        reduced = grouped_allreduce(gradients, op=Average, process_set=process_set)
        return [gradient.narrow(0, sum(rows[:rank]), rows[rank]) for gradient, rows in zip(reduced, sizes, strict=True)]

    return _differentiable(run, gradient_of, tensors)


# ---- broadcast: its gradient is the average over ranks on the root, zeros elsewhere ----


def start_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> int:
    """Starts a broadcast and returns its handle."""
    members = checked_members("broadcast", process_set)
    if root_rank not in members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set: its ranks are {list(members)}."
        )
    return enqueue("broadcast", [tensor], name, process_set, in_place=in_place, root=root_rank)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast into a new tensor and returns its handle. `root_rank` is the global rank."""
    return start_broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast in place and returns its handle. `root_rank` is the global rank."""
    return start_broadcast(tensor, root_rank, name, process_set, in_place=True)


broadcast_ = _blocking(
    broadcast_async_, "Overwrites the tensor with the root's and returns it. `root_rank` is the global rank."
)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the root's tensor; differentiable. `root_rank` is the global rank, also in a process set."""

    def run(tensor: Tensor) -> list[Tensor]:
        return [waited(broadcast_async, tensor, root_rank, name, process_set)]

    def gradient_of(gradient: Tensor) -> list[Tensor]:
        reduced = allreduce(gradient, op=Average, process_set=process_set)
        return [reduced if _basics.rank() == root_rank else reduced * 0]

    return _differentiable(run, gradient_of, [tensor])[0]


# ---- alltoall: its gradient sends every row back to where it came from ----


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall and returns its handle; synchronize() gives the received rows and their number per rank."""
    num_members = len(checked_members("alltoall", process_set))
    if isinstance(splits, Tensor):
        if splits.dim() > 1:
            raise ValueError("alltoall expects a 1D splits tensor")
        if splits.dtype is not torch.int32:
            raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    # An empty list means the same as None, as in Horovod.
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
    return enqueue("alltoall", [tensor], name, process_set, splits=given)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank and returns the received ones; differentiable.

    splits: number of rows for each rank, a list or an int32 tensor; the number received from each rank is then returned
    too. None sends the same number of rows to each.
    """
    received: Any = None
    shape = tensor.shape

    def run(tensor: Tensor) -> list[Tensor]:
        nonlocal received
        output, received = waited(alltoall_async, tensor, splits, name, process_set)
        return [output]

    def gradient_of(gradient: Tensor) -> list[Tensor]:
        returned, _ = alltoall(gradient, splits=received, process_set=process_set)
        # Rows at the end that no split covers were not sent; their gradient is zero.
        missing = shape[0] - returned.shape[0]
        return [torch.cat([returned, returned.new_zeros((missing, *shape[1:]))]) if missing else returned]

    (output,) = _differentiable(run, gradient_of, [tensor])
    if splits is None:
        return output
    return output, received.to(splits.device) if isinstance(splits, Tensor) else received
