"""init(), shutdown(), rank(), size() and so on, as functions: the methods of this process's one `_Basics`.

`__all__` is generated from the assignments, so that each name is written once.
"""

import typing as _typing

from horovod.common.basics import _basics

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built

if not _typing.TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    __all__ = [name for name in globals() if not name.startswith("_")]
