"""Horovod's collective operations, with its names, arguments and gradients.

Every operation has a name, by which ranks find each other whatever the order of their calls. Operations without a name
get a running number, so ranks must call them in the same order. `_async` returns a handle for poll() and
synchronize(); `_` at the end works in place; `grouped_` starts when all ranks have submitted all tensors of the list.

This module has the names in `__all__` of the modules it imports, and two that Horovod has in this module only.
"""

import typing as _typing

from megaclass.hvd.basics import _basics
from megaclass.hvd.collectives.allgather import *
from megaclass.hvd.collectives.allreduce import *
from megaclass.hvd.collectives.alltoall import *
from megaclass.hvd.collectives.broadcast import *
from megaclass.hvd.collectives.handles import *
from megaclass.hvd.collectives.handles import handle_average_backwards_compatibility
from megaclass.hvd.collectives.reducescatter import *
from megaclass.hvd.engine.kinds import *
from megaclass.hvd.exceptions import *
from megaclass.hvd.lifecycle import *
from megaclass.hvd.process_sets import *

is_homogeneous = _basics.is_homogeneous

if not _typing.TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    __all__ = [name for name in globals() if not name.startswith("_")]
