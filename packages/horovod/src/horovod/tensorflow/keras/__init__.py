"""Horovod's API for Keras 3.

`import horovod.tensorflow.keras as hvd`.

Keras runs on TensorFlow here: KERAS_BACKEND is tensorflow, its default.
"""

import typing as _typing

import keras as _keras

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"Keras uses the backend {_keras.backend.backend()}: horovod.tensorflow.keras needs KERAS_BACKEND=tensorflow. "
        f"With the torch backend, use horovod.torch, the API for torch."
    )

from horovod.common.basics import *
from horovod.common.process_sets import *
from horovod.common.util import is_version_greater_equal_than
from horovod.engine.kinds import Adasum, Average, Max, Min, Product, Sum
from horovod.tensorflow.compression import *
from horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.keras import callbacks, elastic
from horovod.tensorflow.keras.optimizer import *

if not _typing.TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    __all__ = [name for name in globals() if not name.startswith("_") and name != "optimizer"]
