"""Horovod's API for Keras 3 under its older name: the objects of horovod.tensorflow.keras."""

import typing as _typing

from horovod.keras import callbacks, elastic
from horovod.tensorflow.gradients import with_options as _with_options
from horovod.tensorflow.keras import *
from horovod.tensorflow.keras import __all__ as _names  # type: ignore[attr-defined]
from horovod.tensorflow.keras import optimizer as _optimizer


@_with_options(  # type: ignore[no-redef]
    "optimizer",
    "name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op num_groups groups "
    "backward_passes_per_step average_aggregated_gradients process_set scale_local_gradients",
)
def DistributedOptimizer(optimizer: _typing.Any, **options: _typing.Any) -> _typing.Any:
    """Returns horovod.tensorflow.keras.DistributedOptimizer(...): only the order of the arguments differs."""
    return _optimizer.DistributedOptimizer(optimizer, **options)


if not _typing.TYPE_CHECKING:
    __all__ = list(_names)
