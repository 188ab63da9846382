"""Broadcasts of variables, and exchanges of Python objects, which work in eager code, in graphs and in sessions."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
import torch

from horovod.collectives.operations import allgather as allgather_of_torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.bridge import not_rewritten
from horovod.tensorflow.collectives import broadcast_
from horovod.torch import functions

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


@not_rewritten
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrites variables with those of the root; in the graph of a v1 session, returns the operation that does so.

    variables: of TensorFlow or Keras, in the same order on all ranks. `inplace` is accepted for compatibility with Horovod.
    """
    variables = list(variables)
    if tf.executing_eagerly():
        _check_counts(len(variables), process_set)
    values = broadcast_(variables, root_rank, "broadcast_variables", process_set)
    return None if tf.compat.v1.executing_eagerly_outside_functions() else tf.group(*values)


def _check_counts(count: int, process_set: ProcessSet) -> None:
    """Raises the same error on all ranks if they have different numbers of variables; they would wait forever."""
    counts = allgather_of_torch(torch.tensor([count]), "broadcast_variables.count", process_set).tolist()
    if len(set(counts)) > 1:
        raise HorovodInternalError(
            f"broadcast_variables: the ranks pass different numbers of variables: {counts}, ordered by rank. Build the model "
            f"and the optimizer on all ranks first, for example by optimizer.build(model.trainable_variables)."
        )


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that overwrites all global variables of the default graph with the root's."""
    if tf.executing_eagerly() or tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution, which has no list of global variables. "
            "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all global variables when a MonitoredTrainingSession has initialized them."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank; it is pickled. No session is needed."""
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function that takes an object and returns the root's."""
    return lambda obj: functions.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks of the process set, ordered by rank; they are pickled."""
    return functions.gather_objects(obj, name, process_set)


# Names that Horovod's own module has as well.
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.mpi_ops import allgather, broadcast, broadcast_, rank, size
