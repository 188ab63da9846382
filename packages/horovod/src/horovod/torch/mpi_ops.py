"""Horovod's collective operations, with its names, arguments and gradients.

Every operation has a name, by which ranks find each other whatever the order of their calls. Operations without a name
get a running number, so ranks must call them in the same order. `_async` returns a handle for poll() and
synchronize(); `_` at the end works in place; `grouped_` starts when all ranks have submitted all tensors of the list.

This module has the names in `__all__` of the modules it imports, and two that Horovod has in this module only.
"""

import typing as _typing

from horovod.collectives.handles import *
from horovod.collectives.handles import handle_average_backwards_compatibility
from horovod.collectives.operations import *
from horovod.common.basics import *
from horovod.common.basics import _basics
from horovod.common.exceptions import *
from horovod.common.process_sets import *
from horovod.engine.kinds import *

is_homogeneous = _basics.is_homogeneous

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
from horovod.torch.compression import Compression
