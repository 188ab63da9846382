"""Horovod's API for TensorFlow: `import horovod.tensorflow as hvd`.

bridge                 runs collectives of the engine on TensorFlow's tensors: eagerly, in tf.function, in v1 sessions
collectives            the collectives and their gradients; mpi_ops: all of them, with rank, size, join and barrier
gradients              DistributedGradientTape, DistributedOptimizer; gradient_aggregation: over several backward passes
functions              broadcasts of variables and objects
sync_batch_norm        SyncBatchNormalization
elastic                run, TensorFlowState, TensorFlowKerasState
keras/                 the API for Keras 3: optimizer, callbacks, load_model

The engine is the one of the torch API, with its negotiation, fusion, process sets, timeline and error messages.
"""

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module

from horovod.common.util import check_extension

check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)

from horovod.common.util import gpu_available, split_list
from horovod.tensorflow.compression import *
from horovod.tensorflow.functions import *
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradients import *
from horovod.tensorflow.mpi_ops import *
from horovod.tensorflow.util import _executing_eagerly, refs_to_vars, vars_to_refs

if _typing.TYPE_CHECKING:
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

if not _typing.TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    _MODULES = {name for name in globals() if f"{__name__}.{name}" in _sys.modules}
    __all__ = [*(name for name in globals() if not name.startswith("_") and name not in _MODULES)]
    __all__ += ["SyncBatchNormalization"]


def __getattr__(name: str) -> _typing.Any:
    if name == "SyncBatchNormalization":
        # Keras is loaded when it is needed only.
        from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name == "elastic":
        return _import_module(f"{__name__}.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
