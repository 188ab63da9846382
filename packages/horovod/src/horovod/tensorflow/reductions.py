"""allreduce and reducescatter of TensorFlow's tensors, alone and in groups, with their gradients."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.collectives.allreduce import _enqueue_allreduce
from horovod.collectives.handles import handle_average_backwards_compatibility, synchronize
from horovod.collectives.reducescatter import _enqueue_reducescatter
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Adasum, Average, Sum
from horovod.tensorflow.bridge import (
    Call,
    at_run_time,
    check_dtype,
    could_possibly_record,
    differentiable,
    marked,
    not_rewritten,
    operation_name,
    run,
    to_tensorflow,
    to_torch,
)
from horovod.tensorflow.compression import Compression, wire_of
from horovod.tensorflow.gathers import allgather, allgather_call, grouped_allgather
from horovod.transport.reductions import empty_result

__all__ = ["allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter"]

NO_SPARSE_ADASUM = (
    "The Adasum reduction does not support sparse tensors. Pass sparse_as_dense=True to the optimizer or tape, or convert "
    "the tensor with tf.convert_to_tensor()."
)


# ---- allreduce ----


def allreduce_call(
    tensors: Sequence[Any],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    wire: str = "",
    keeps_error: bool = False,
    is_grouped: bool = False,
) -> Call:
    """Describes an allreduce of each tensor, all under one name.

    keeps_error: the rounding error of a compressed tensor is added to the next tensor of the name.
    """
    return Call(
        "allreduce",
        tensors,
        lambda given: _enqueue_allreduce(
            given,
            [empty_result(tensor) for tensor in given],
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            wire=wire,
            keeps_error=keeps_error,
            is_grouped=is_grouped,
        ),
        lambda operation: list(operation.outputs),
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
    )


@marked
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
    tensor is reduced where it is.
    """
    op = handle_average_backwards_compatibility(op, average)
    # In this order: the question for tf.IndexedSlices takes longer.
    if not isinstance(tensor, tf.Tensor):
        if isinstance(tensor, tf.IndexedSlices):
            return _sparse_allreduce(tensor, op, prescale_factor * postscale_factor, name, process_set)
        tensor = tf.convert_to_tensor(tensor)
    if tf.executing_eagerly() and not could_possibly_record():
        return _allreduced_at_once(tensor, compression, op, prescale_factor, postscale_factor, name, process_set)
    (result,) = _allreduced(
        [tensor], compression, op, prescale_factor, postscale_factor, name, process_set, ignore_name_scope, False
    )
    return result


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
    tensors = list(tensors)
    if not tensors:
        return []
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        # Sparse tensors are gathered one by one, so that there is no group.
        names = [f"{name}.{place}" if name else None for place in range(len(tensors))]
        factors = (prescale_factor, postscale_factor)
        return [
            allreduce(tensor, None, "", "", compression, op, *factors, each, process_set, ignore_name_scope)
            for tensor, each in zip(tensors, names, strict=True)
        ]
    return _allreduced(
        tensors, compression, op, prescale_factor, postscale_factor, name, process_set, ignore_name_scope, True
    )


def _allreduced_at_once(
    tensor: Any,
    compression: Any,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    """Combines one tensor in eager code that no tape records.

    This is the most common call. The general way below would take longer than the allreduce of a small tensor itself. Every
    function that is called here costs several times what it costs in a loop, because the exchange with the other ranks leaves
    little code in the processor's caches.
    """
    if compression is Compression.none:
        packed, ctx, wire = tensor, None, ""
    else:
        wire = wire_of(compression, tensor.dtype, op)
        packed, ctx = (tensor, None) if wire else compression.compress(tensor)
    dtype = packed.dtype
    check_dtype("allreduce", dtype)
    given = to_torch(packed)
    out = empty_result(given)
    # Before the exchange, which writes into the same memory: to_torch() has just fetched most of the code that this needs. On a
    # GPU it is done afterwards, as it waits for what has been written so far.
    early = to_tensorflow(out, dtype) if out.is_cpu else None
    handle = _enqueue_allreduce(
        [given], [out], name, op, prescale_factor, postscale_factor, process_set, wire=wire, is_urgent=True
    )
    synchronize(handle)
    result = to_tensorflow(out, dtype) if early is None else early
    return result if wire else compression.decompress(result, ctx)


@not_rewritten
def _allreduced(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    is_grouped: bool,
) -> list[Any]:
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    wires = {wire_of(compression, tensor.dtype, op) for tensor in tensors}
    # A group has one wire format. Where its tensors differ in it, compress() is called for each of them instead.
    wire = wires.pop() if len(wires) == 1 else ""
    pairs = [(tensor, None) if wire else compression.compress(tensor) for tensor in tensors]

    def forward(*packed: Any) -> list[Any]:
        full_name = operation_name("allreduce", name, packed, ignore_name_scope)
        call = allreduce_call(
            packed,
            full_name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            wire=wire,
            keeps_error=name is not None,
            is_grouped=is_grouped,
        )
        return run([call])[0]

    def backward(_: list[Any], gradients: list[Any]) -> list[Any]:
        # Without the name: the forward operation of this name may be in flight again.
        same = (compression if wire else Compression.none, op, prescale_factor, postscale_factor)
        return _allreduced(gradients, *same, None, process_set, False, is_grouped)

    reduced = differentiable(forward, backward, [packed for packed, _ in pairs])
    if wire:
        return reduced
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def sparse_calls(
    tensor: Any, op: int, names: tuple[str | None, str | None], process_set: ProcessSet
) -> tuple[Call, Call]:
    """Describes the allreduce of sparse rows: allgathers of their values and of their indices."""
    if op == Adasum:
        raise NotImplementedError(NO_SPARSE_ADASUM)
    if op not in (Average, Sum):
        raise NotImplementedError(f"The allreduce of tf.IndexedSlices supports op=Average and op=Sum, not op={op}.")
    return (
        allgather_call([tensor.values], names[0], process_set),
        allgather_call([tensor.indices], names[1], process_set),
    )


def sparse_result(tensor: Any, values: Any, indices: Any, op: int, factor: float, process_set: ProcessSet) -> Any:
    """Returns the rows of all ranks as one tf.IndexedSlices; rows of the same index add up when it is used."""
    if factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    if op == Average:
        values = values / tf.cast(at_run_time(lambda: process_set.size() or 1), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=tensor.dense_shape)


@not_rewritten
def _sparse_allreduce(tensor: Any, op: int, factor: float, name: str | None, process_set: ProcessSet) -> Any:
    sparse_calls(tensor, op, (None, None), process_set)
    values = allgather(tensor.values, name=f"{name}.values" if name else None, process_set=process_set)
    indices = allgather(tensor.indices, name=f"{name}.indices" if name else None, process_set=process_set)
    return sparse_result(tensor, values, indices, op, factor, process_set)


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

    Where rows do not divide evenly, the first ranks get one more.
    """
    (result,) = _reducescattered(
        [tensor], compression, op, name, process_set, ignore_name_scope, prescale_factor, postscale_factor, False
    )
    return result


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
    if not tensors:
        return []
    return _reducescattered(tensors, compression, op, None, process_set, False, prescale_factor, postscale_factor, True)


def _reducescattered(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    prescale_factor: float,
    postscale_factor: float,
    is_grouped: bool,
) -> list[Any]:
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]

    def forward(*packed: Any) -> list[Any]:
        full_name = operation_name("reducescatter", name, packed, ignore_name_scope)
        call = Call(
            "reducescatter",
            packed,
            lambda given: _enqueue_reducescatter(
                given, full_name, op, process_set, prescale_factor, postscale_factor, is_grouped=is_grouped
            ),
            lambda operation: list(operation.outputs),
            [tensor.dtype for tensor in packed],
            [_shape_of_own_rows(tensor) for tensor in packed],
        )
        return run([call])[0]

    def backward(_: list[Any], gradients: list[Any]) -> list[Any]:
        # As in Horovod, gradients are averages over ranks, so that the one of a Sum is multiplied by their number.
        size = at_run_time(lambda: process_set.size() or 1) if op == Sum else 1
        factor = prescale_factor * postscale_factor
        scaled = [gradient * tf.cast(factor, gradient.dtype) * tf.cast(size, gradient.dtype) for gradient in gradients]
        return grouped_allgather(scaled, process_set=process_set)

    reduced = differentiable(forward, backward, [packed for packed, _ in pairs])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def _shape_of_own_rows(tensor: Any) -> Any:
    shape = tensor.shape
    if shape.rank is None:
        return shape
    if shape.rank == 0:
        raise ValueError("reducescatter needs a tensor with at least one dimension, along which it is split.")
    return tf.TensorShape([None, *shape[1:]])
