"""allgather, broadcast and alltoall of TensorFlow's tensors, with their gradients."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
from torch import Tensor

from horovod.collectives.alltoall import alltoall_async
from horovod.collectives.broadcast import _enqueue_broadcast
from horovod.collectives.handles import enqueue
from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Average
from horovod.engine.operation import Operation
from horovod.tensorflow.bridge import Call, at_run_time, differentiable, not_rewritten, operation_name, run
from horovod.transport.reductions import empty_result

__all__ = ["allgather", "alltoall", "broadcast", "broadcast_", "grouped_allgather"]


def _averaged(gradients: Sequence[Any], process_set: ProcessSet) -> list[Any]:
    """Returns the gradients averaged over ranks."""
    from horovod.tensorflow.reductions import allreduce

    # Not as a group: TensorFlow may pass zeros of float32 for tensors of another dtype.
    return [allreduce(gradient, op=Average, process_set=process_set) for gradient in gradients]


# ---- allgather ----


def allgather_call(tensors: Sequence[Any], name: str | None, process_set: ProcessSet, is_grouped: bool = False) -> Call:
    """Describes an allgather of each tensor. The last result is the number of rows of each rank, per tensor."""
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError(
                "allgather needs a tensor with at least one dimension, along which ranks are concatenated."
            )
    unknown = [tensor.shape if tensor.shape.rank is None else [None, *tensor.shape[1:]] for tensor in tensors]
    return Call(
        "allgather",
        tensors,
        lambda given: enqueue("allgather", given, None, name, process_set, is_grouped=is_grouped),
        _gathered,
        [*[tensor.dtype for tensor in tensors], tf.int64],
        [*unknown, [len(tensors), None]],
    )


def _gathered(operation: Operation) -> list[Tensor]:
    return [*operation.outputs, torch.tensor(operation.sizes, dtype=torch.int64)]


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
        return run([allgather_call(given, full_name, process_set, is_grouped)])[0]

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


def broadcast_call(tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Call:
    return Call(
        "broadcast",
        [tensor],
        lambda given: _enqueue_broadcast(given[0], empty_result(given[0]), root_rank, name, process_set),
        lambda operation: list(operation.outputs),
        [tensor.dtype],
        [tensor.shape],
    )


@not_rewritten
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's tensor; differentiable. `root_rank` is the global rank, in a process set too."""

    def forward(given: Any) -> list[Any]:
        full_name = operation_name("broadcast", name, [given], ignore_name_scope)
        return run([broadcast_call(given, root_rank, full_name, process_set)])[0]

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
    calls = [broadcast_call(value, root_rank, f"{base}.{place}", process_set) for place, value in enumerate(values)]
    received = [result for (result,) in run(calls)]
    assigned = [variable.assign(value) for variable, value in zip(variables, received, strict=True)]
    if tf.executing_eagerly():
        return received
    # In a graph the values are those after the assignment, so that whoever uses them has the variables overwritten.
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
            lambda operation: list(operation.result),
            [given.dtype, tf.int32],
            [shape, [None]],
        )
        return run([call])[0]

    def backward(results: list[Any], gradients: list[Any]) -> list[Any]:
        gradient, _ = alltoall(gradients[0], splits=results[1], process_set=process_set)
        # Rows at the end that no split covers were not sent; their gradient is zero.
        missing = tf.shape(tensor)[0] - tf.shape(gradient)[0]
        rest = tf.zeros(tf.concat([[missing], tf.shape(gradient)[1:]], 0), gradient.dtype)
        return [tf.ensure_shape(tf.concat([gradient, rest], 0), tensor.shape)]

    output, received = differentiable(forward, backward, [tensor])
    return output if splits is None else (output, received)
