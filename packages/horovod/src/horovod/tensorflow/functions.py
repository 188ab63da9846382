"""Broadcasts of variables, and exchanges of Python objects, which work in eager code, in graphs and in sessions."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
import torch

from horovod.collectives.allgather import allgather as allgather_of_torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.bridge import not_rewritten
from horovod.tensorflow.gathers import broadcast_
from horovod.torch import functions

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]


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
