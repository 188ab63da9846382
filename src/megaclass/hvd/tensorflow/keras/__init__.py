"""Horovod's API for Keras 3.

`import megaclass.hvd.tensorflow.keras as hvd` replaces `import horovod.tensorflow.keras as hvd`.

Keras runs on TensorFlow here: KERAS_BACKEND is tensorflow, its default.
"""

import typing as _typing

import keras as _keras

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"Keras uses the backend {_keras.backend.backend()}: megaclass.hvd.tensorflow.keras needs KERAS_BACKEND=tensorflow. "
        f"With the torch backend, use megaclass.hvd, the API for torch."
    )

from megaclass.hvd.compat.util import is_version_greater_equal_than
from megaclass.hvd.engine.kinds import Adasum, Average, Max, Min, Product, Sum
from megaclass.hvd.lifecycle import *
from megaclass.hvd.process_sets import *
from megaclass.hvd.tensorflow.compression import *
from megaclass.hvd.tensorflow.functions import *
from megaclass.hvd.tensorflow.keras import callbacks, elastic
from megaclass.hvd.tensorflow.keras.optimizer import *
from megaclass.hvd.tensorflow.keras.values import *

if not _typing.TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    __all__ = [name for name in globals() if not name.startswith("_") and name not in ("optimizer", "values")]
