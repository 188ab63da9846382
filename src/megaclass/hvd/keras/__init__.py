"""Horovod's API for Keras 3 under its older name: the objects of megaclass.hvd.tensorflow.keras."""

import typing as _typing

from megaclass.hvd.engine.kinds import Average
from megaclass.hvd.keras import callbacks, elastic
from megaclass.hvd.tensorflow.compression import Compression
from megaclass.hvd.tensorflow.keras import *
from megaclass.hvd.tensorflow.keras import __all__ as _names  # type: ignore[attr-defined]
from megaclass.hvd.tensorflow.keras import optimizer as _optimizer


def DistributedOptimizer(  # type: ignore[no-redef]
    optimizer: _typing.Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: _typing.Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: _typing.Any = None,
    **more: _typing.Any,
) -> _typing.Any:
    """Returns megaclass.hvd.tensorflow.keras.DistributedOptimizer(...): only the order of the arguments differs."""
    arguments = {name: value for name, value in locals().items() if name != "more"}
    return _optimizer.DistributedOptimizer(**arguments, **more)


if not _typing.TYPE_CHECKING:
    __all__ = list(_names)
