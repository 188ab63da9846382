"""The collectives of TensorFlow's tensors, with their gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from torch import Tensor

from horovod.collectives.compression import wire_of
from horovod.collectives.handles import ReductionOptions, enqueue, handle_average_backwards_compatibility
from horovod.collectives.operations import (
    alltoall_async,
    broadcast_async,
    start_allreduce,
    start_reducescatter,
)
from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Adasum, Average, Sum
from horovod.tensorflow.bridge import Call, at_run_time, differentiable, not_rewritten, operation_name, run, split
from horovod.tensorflow.compression import Compression

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

_NO_SPARSE_ADASUM = (
    "The Adasum reduction does not support sparse tensors. Pass sparse_as_dense=True to the optimizer or tape, or convert "
    "the tensor with tf.convert_to_tensor()."
)


# ---- allreduce ----


def reduce_units(
    units: Sequence[Sequence[Any]],
    names: Sequence[str | None],
    compression: Any,
    options: ReductionOptions,
    *,
    is_grouped: bool,
) -> list[Any]:
    """Combines units of tensors as one node of a graph; returns the results of all units in a row. Differentiable.

    names: one per unit.
    """
    counts = [len(unit) for unit in units]
    tensors = [tf.convert_to_tensor(tensor) for unit in units for tensor in unit]
    wire = wire_of(compression, tensors, options.op)
    pairs = [(tensor, None) if wire else compression.compress(tensor) for tensor in tensors]

    def forward(*packed: Any) -> list[Any]:
        return run(
            [
                _allreduce_call(part, name, options._replace(wire=wire), is_grouped)
                for part, name in zip(split(packed, counts), names, strict=True)
            ]
        )

    def backward(_: list[Any], gradients: list[Any]) -> list[Any]:
        parts = split(gradients, counts)
        # Under other names: the forward operations of these names may be in flight again.
        automatic = [operation_name("allreduce", None, part) for part in parts]
        same = (compression if wire else Compression.none, options._replace(keeps_error=False))
        return reduce_units(parts, automatic, *same, is_grouped=is_grouped)

    reduced = differentiable(forward, backward, [packed for packed, _ in pairs])
    if wire:
        return reduced
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def _allreduce_call(tensors: Sequence[Any], name: str | None, options: ReductionOptions, is_grouped: bool) -> Call:
    return Call("allreduce", tensors, lambda given: start_allreduce(given, name, options, is_grouped=is_grouped))


@not_rewritten
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns the tensor combined over ranks; differentiable. tf.IndexedSlices are gathered.

    op: Average (the default), Sum, Adasum, Min, Max or Product. The devices are accepted for compatibility with Horovod: a
    tensor is reduced in place on its device.
    """
    op = handle_average_backwards_compatibility(op, average)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _allreduced([tensor], compression, options, name, ignore_name_scope, is_grouped=False)[0]


@not_rewritten
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Returns each tensor of the list combined over ranks; starts when all ranks have all of them. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    tensors = list(tensors)
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        # Sparse tensors are gathered one by one, so there is no group.
        names = [f"{name}.{place}" if name else None for place in range(len(tensors))]
        return [
            _allreduced([tensor], compression, options, each, ignore_name_scope, is_grouped=False)[0]
            for tensor, each in zip(tensors, names, strict=True)
        ]
    return _allreduced(tensors, compression, options, name, ignore_name_scope, is_grouped=True) if tensors else []


def _allreduced(
    tensors: Sequence[Any],
    compression: Any,
    options: ReductionOptions,
    name: str | None,
    ignore_name_scope: bool,
    *,
    is_grouped: bool,
) -> list[Any]:
    if isinstance(tensors[0], tf.IndexedSlices):
        return [sparse_allreduce(tensors[0], options, name)]
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    full_name = operation_name("allreduce", name, tensors, ignore_name_scope)
    options = options._replace(keeps_error=name is not None)
    return reduce_units([tensors], [full_name], compression, options, is_grouped=is_grouped)


@not_rewritten
def sparse_allreduce(tensor: Any, options: ReductionOptions, name: str | None) -> Any:
    """Returns the rows of all ranks as one tf.IndexedSlices; rows of the same index add up when it is used."""
    if options.op == Adasum:
        raise NotImplementedError(_NO_SPARSE_ADASUM)
    if options.op not in (Average, Sum):
        raise NotImplementedError(
            f"The allreduce of tf.IndexedSlices supports op=Average and op=Sum, not op={options.op}."
        )
    process_set = options.process_set
    values = allgather(tensor.values, name=f"{name}.values" if name else None, process_set=process_set)
    indices = allgather(tensor.indices, name=f"{name}.indices" if name else None, process_set=process_set)
    factor = options.prescale * options.postscale
    if factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    if options.op == Average:
        values = values / tf.cast(at_run_time(lambda: process_set.size() or 1), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=tensor.dense_shape)


# ---- reducescatter ----


@not_rewritten
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of the tensor combined over ranks; differentiable. op: Average or Sum.

    If rows do not divide evenly, the first ranks get one more.
    """
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _reducescattered([tensor], compression, options, name, ignore_name_scope, is_grouped=False)[0]


@not_rewritten
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Returns the reducescatter of each tensor of the list; differentiable."""
    options = ReductionOptions(op, prescale_factor, postscale_factor, process_set)
    return _reducescattered(tensors, compression, options, None, False, is_grouped=True) if tensors else []


def _reducescattered(
    tensors: Sequence[Any],
    compression: Any,
    options: ReductionOptions,
    name: str | None,
    ignore_name_scope: bool,
    *,
    is_grouped: bool,
) -> list[Any]:
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]

    def forward(*packed: Any) -> list[Any]:
        full_name = operation_name("reducescatter", name, packed, ignore_name_scope)
        shapes = [_with_any_rows(tensor, "reducescatter") for tensor in packed]

        def submit(given: list[Tensor]) -> int:
            return start_reducescatter(given, full_name, options, is_grouped=is_grouped)

        return run([Call("reducescatter", packed, submit, shapes=shapes)])

    def backward(_: list[Any], gradients: list[Any]) -> list[Any]:
        # As in Horovod, gradients are averages over ranks, so the one of a Sum is multiplied by their number.
        size = at_run_time(lambda: (options.process_set.size() or 1) if options.op == Sum else 1)
        factor = options.prescale * options.postscale
        scaled = [gradient * tf.cast(factor, gradient.dtype) * tf.cast(size, gradient.dtype) for gradient in gradients]
        return grouped_allgather(scaled, process_set=options.process_set)

    reduced = differentiable(forward, backward, [packed for packed, _ in pairs])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def _with_any_rows(tensor: Any, kind: str) -> Any:
    """Returns the shape of the tensor, with an unknown number of rows."""
    if tensor.shape.rank == 0:
        raise ValueError(f"{kind} needs a tensor with at least one dimension, along which ranks share it.")
    return tensor.shape if tensor.shape.rank is None else [None, *tensor.shape[1:]]


# ---- allgather ----


@not_rewritten
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the ranks' tensors concatenated along dimension 0, which may differ between ranks; differentiable."""
    return _allgathered([tensor], name, ignore_name_scope, process_set, is_grouped=False)[0]


@not_rewritten
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the allgather of each tensor of the list; differentiable."""
    if not tensors:
        return []
    return _allgathered(tensors, name, ignore_name_scope, process_set, is_grouped=True)


def _allgathered(
    tensors: Sequence[Any], name: str | None, ignore_name_scope: bool, process_set: ProcessSet, *, is_grouped: bool
) -> list[Any]:
    def forward(*given: Any) -> list[Any]:
        full_name = operation_name("allgather", name, given, ignore_name_scope)
        call = Call(
            "allgather",
            given,
            lambda ours: enqueue("allgather", ours, full_name, process_set, is_grouped=is_grouped),
            # The last result is the number of rows of each rank, per tensor.
            lambda operation: [*operation.outputs, torch.tensor(operation.sizes, dtype=torch.int64)],
            [*[tensor.dtype for tensor in given], tf.int64],
            [*[_with_any_rows(tensor, "allgather") for tensor in given], [len(given), None]],
        )
        return run([call])

    def backward(results: list[Any], gradients: list[Any]) -> list[Any]:
        sizes = results[-1]
        place = at_run_time(lambda: process_set.rank() or 0)
        own = []
        for number, gradient in enumerate(_averaged(gradients[:-1], process_set)):
            start = tf.reduce_sum(sizes[number, :place])
            own.append(gradient[start : start + sizes[number, place]])
        return own

    return differentiable(forward, backward, [tf.convert_to_tensor(tensor) for tensor in tensors])[:-1]


# ---- broadcast ----


def _broadcast_call(tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Call:
    return Call("broadcast", [tensor], lambda given: broadcast_async(given[0], root_rank, name, process_set))


@not_rewritten
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's tensor; differentiable. `root_rank` is the global rank, also in a process set."""

    def forward(given: Any) -> list[Any]:
        full_name = operation_name("broadcast", name, [given], ignore_name_scope)
        return run([_broadcast_call(given, root_rank, full_name, process_set)])

    def backward(_: list[Any], gradients: list[Any]) -> list[Any]:
        averaged = _averaged(gradients, process_set)
        is_root = at_run_time(lambda: int(_basics.rank() == root_rank))
        return [gradient * tf.cast(is_root, gradient.dtype) for gradient in averaged]

    return differentiable(forward, backward, [tf.convert_to_tensor(tensor)])[0]


@not_rewritten
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrites the variables with the root's and returns their new values. `root_rank` is the global rank."""
    variables = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    if not values:
        return []
    base = operation_name("broadcast_", name or "HorovodBroadcastInplace", values)
    calls = [_broadcast_call(value, root_rank, f"{base}.{place}", process_set) for place, value in enumerate(values)]
    received = run(calls)
    assigned = [variable.assign(value) for variable, value in zip(variables, received, strict=True)]
    if tf.executing_eagerly():
        return received
    # In a graph the values are those after the assignment, so whoever uses them has the variables overwritten.
    operations = [done.op if hasattr(done, "op") else done for done in assigned if done is not None]
    with tf.control_dependencies(operations):
        return [tf.identity(value) for value in received]


# ---- alltoall ----


@not_rewritten
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank and returns the received ones; differentiable.

    splits: number of rows for each rank, a list or tensor of integers; the number received from each rank is then returned
    too. None sends the same number of rows to each.
    """
    tensor = tf.convert_to_tensor(tensor)
    sent = tf.cast(
        tf.convert_to_tensor([] if splits is None else splits, tf.int32 if splits is None else None), tf.int32
    )

    def forward(given: Any) -> list[Any]:
        full_name = operation_name("alltoall", name, [given], ignore_name_scope)
        shape = given.shape if given.shape.rank in (None, 0) else [None, *given.shape[1:]]
        call = Call(
            "alltoall",
            [given, sent],
            # No splits means equal parts.
            lambda both: alltoall_async(both[0], both[1] if both[1].numel() else None, full_name, process_set),
            lambda operation: operation.result,
            [given.dtype, tf.int32],
            [shape, [None]],
        )
        return run([call])

    def backward(results: list[Any], gradients: list[Any]) -> list[Any]:
        gradient, _ = alltoall(gradients[0], splits=results[1], process_set=process_set)
        # Rows at the end that no split covers were not sent; their gradient is zero.
        missing = tf.shape(tensor)[0] - tf.shape(gradient)[0]
        rest = tf.zeros(tf.concat([[missing], tf.shape(gradient)[1:]], 0), gradient.dtype)
        return [tf.ensure_shape(tf.concat([gradient, rest], 0), tensor.shape)]

    output, received = differentiable(forward, backward, [tensor])
    return output if splits is None else (output, received)


def _averaged(gradients: Sequence[Any], process_set: ProcessSet) -> list[Any]:
    """Returns the gradients averaged over ranks."""
    # Not as a group: TensorFlow may pass zeros of float32 for tensors of another dtype.
    return [allreduce(gradient, op=Average, process_set=process_set) for gradient in gradients]
