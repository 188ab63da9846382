"""Collectives of plain values, and load_model(): the functions of Horovod's Keras modules."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from horovod.engine.kinds import Average
from horovod.tensorflow import collectives
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras.optimizer import DistributedOptimizer

__all__ = ["allgather", "allreduce", "broadcast", "load_model", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the value, anything that TensorFlow can convert, combined over ranks as a tensor."""
    return collectives.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the values of all ranks, concatenated along dimension 0, as a tensor."""
    return collectives.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's value as a tensor."""
    return collectives.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Returns this rank's rows of the value combined over ranks, as a tensor."""
    return collectives.reducescatter(tf.convert_to_tensor(value), op=op, name=name)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a saved Keras model and wraps its optimizer, state included, in a DistributedOptimizer.

    custom_optimizers: classes of optimizers that are not Keras' own. `legacy_opts` is accepted for compatibility with Horovod.
    """
    objects = {**{cls.__name__: cls for cls in custom_optimizers or ()}, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
