"""Horovod's API for TensorFlow: `import horovod.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`.

bridge                 runs collectives of the engine on TensorFlow's tensors: eagerly, in tf.function, in v1 sessions
reductions, gathers    the collectives and their gradients; mpi_ops: all of them, with rank, size, join and barrier
gradients              reduction of the gradients of one step; gradient_aggregation: over several backward passes
tape, optimizer        DistributedGradientTape, DistributedOptimizer
functions, sessions    broadcasts of variables and objects; what is left of TensorFlow 1
sync_batch_norm        SyncBatchNormalization
elastic                run, TensorFlowState, TensorFlowKerasState
keras/                 the API for Keras 3: optimizer, callbacks, load_model

The engine is the one of the torch API, with its negotiation, fusion, process sets, timeline and error messages.
"""

import typing as _typing
from importlib import import_module as _import_module

try:
    import tensorflow as _tf
except ImportError as _error:
    raise ImportError(
        "horovod.tensorflow needs TensorFlow 2.16 or later, which is not installed: pip install 'megaclass-horovod[tensorflow]'."
    ) from _error

from horovod.common.util import check_extension, gpu_available, split_list
from horovod.tensorflow.compression import *
from horovod.tensorflow.functions import *
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import *
from horovod.tensorflow.optimizer import *
from horovod.tensorflow.reductions import *
from horovod.tensorflow.sessions import *
from horovod.tensorflow.tape import *

if _typing.TYPE_CHECKING:
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization


def vars_to_refs(variables: _typing.Any) -> _typing.Any:
    """Returns a tuple of references, which can be hashed, for a list of variables or a list of such lists."""
    if isinstance(variables, list):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref() if hasattr(variables, "ref") else variables


def refs_to_vars(references: _typing.Any) -> _typing.Any:
    """Returns the variables of vars_to_refs()."""
    if isinstance(references, tuple):
        return [refs_to_vars(reference) for reference in references]
    return references.deref() if hasattr(references, "deref") else references


if not _typing.TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    _MODULES = {
        "bridge",
        "compression",
        "functions",
        "gathers",
        "gradient_aggregation",
        "gradients",
        "keras",
        "mpi_ops",
    }
    _MODULES |= {"elastic", "optimizer", "reductions", "sessions", "sync_batch_norm", "tape"}
    __all__ = [
        *(name for name in globals() if not name.startswith("_") and name not in _MODULES),
        "SyncBatchNormalization",
    ]


def __getattr__(name: str) -> _typing.Any:
    if name == "SyncBatchNormalization":
        # Keras is loaded when it is needed only.
        from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name == "elastic":
        return _import_module(f"{__name__}.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
