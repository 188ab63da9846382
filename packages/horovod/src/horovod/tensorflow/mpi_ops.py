"""Everything that Horovod has in `horovod.tensorflow.mpi_ops`: the collectives, and questions as TensorFlow's operations."""

import typing as _typing

import tensorflow as _tf

from horovod.collectives import handles as _handles
from horovod.collectives.handles import handle_average_backwards_compatibility
from horovod.common.basics import *
from horovod.common.basics import _basics
from horovod.common.exceptions import *
from horovod.common.process_sets import *
from horovod.engine.job import current as _current
from horovod.engine.kinds import *
from horovod.tensorflow.bridge import at_run_time as _at_run_time
from horovod.tensorflow.bridge import not_rewritten as _not_rewritten
from horovod.tensorflow.collectives import *

is_homogeneous = _basics.is_homogeneous


@_not_rewritten
def _question(ask: _typing.Callable[[], int], name: str | None) -> _typing.Any:
    """Returns the answer as a tensor; in a graph it is asked for in every run, as the answer may change between jobs."""
    return _tf.cast(_at_run_time(ask), _tf.int32, name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> _typing.Any:
    """Returns the number of ranks of the process set."""
    return _question(lambda: len(_current.known().process_sets[process_set_id]), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> _typing.Any:
    """Returns 1 if this rank is a member of the process set, else 0."""
    return _question(lambda: int(_basics.rank() in _current.known().process_sets[process_set_id]), name)


def local_size_op(name: str | None = None) -> _typing.Any:
    """Returns the number of ranks on this host."""
    return _question(_basics.local_size, name)


def rank_op(name: str | None = None) -> _typing.Any:
    """Returns the rank of this process."""
    return _question(_basics.rank, name)


def local_rank_op(name: str | None = None) -> _typing.Any:
    """Returns the rank of this process among those on this host."""
    return _question(_basics.local_rank, name)


def join() -> _typing.Any:
    """Declares that this rank has no more data; returns the rank that joined last, when all have."""
    return _question(_handles.join, None)


def barrier(process_set: ProcessSet = global_process_set) -> _typing.Any:
    """Waits until all ranks of the process set have called it; in the graph of a v1 session, returns the operation."""

    def wait() -> int:
        _handles.barrier(process_set)
        return 0

    answer = _question(wait, None)
    return None if _tf.compat.v1.executing_eagerly_outside_functions() else answer.op


# Adasum works with any number of ranks here.
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2

if not _typing.TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    __all__ = [name for name in globals() if not name.startswith("_")]

# Names that Horovod's own module has as well.
from horovod.common.basics import _Basics as _HorovodBasics
from horovod.common.basics import _basics
from horovod.common.util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
