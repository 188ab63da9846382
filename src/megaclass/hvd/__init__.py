"""Horovod's API over torch.distributed: `import megaclass.hvd as hvd` in place of `import horovod.torch as hvd`.

lifecycle       init, shutdown, rank, size and the questions about the build
collectives/    one file per operation: allreduce, allgather, broadcast, alltoall, reducescatter; handles: call -> handle
optimizer       DistributedOptimizer; optimizers/ has its two kinds: gradients, adasum
functions       broadcasts of objects, parameters and optimizer states
elastic/        jobs whose number of ranks changes: run, TorchState, ElasticSampler
run_function    run(): calls a function on every rank, through the launcher
engine/         how ranks agree on what to do next (read controller.py, then negotiation.py, then rank0/)
transport/      how agreed operations are executed
compat/         Horovod's own module paths

Public names are the `__all__` of the modules in _MODULES. They are loaded on first use, so a launcher that asks
for `shims_folder()` does not load torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megaclass.launch.horovod_options import shims_folder as shims_folder

if TYPE_CHECKING:
    from megaclass.hvd.compression import *
    from megaclass.hvd.functions import *
    from megaclass.hvd.mpi_ops import *
    from megaclass.hvd.optimizer import *
    from megaclass.hvd.run_function import *
    from megaclass.hvd.sync_batch_norm import *

_MODULES = ("mpi_ops", "compression", "functions", "optimizer", "run_function", "sync_batch_norm")
# Horovod has these in mpi_ops only.
_NOT_HERE = {"handle_average_backwards_compatibility", "is_homogeneous"}


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return import_module(f"{__name__}.elastic")
    # `from megaclass.hvd import <module>` asks here first; AttributeError makes Python import the module itself.
    if find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module {__name__}.{name} is not imported yet")
    public = _public_names()
    # From now on Python finds them without calling this function.
    globals().update(public, __all__=sorted(public))
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def _public_names() -> dict[str, Any]:
    modules = [import_module(f"{__name__}.{module}") for module in _MODULES]
    found = {name: getattr(module, name) for module in modules for name in module.__all__ if name not in _NOT_HERE}
    return {**found, "shims_folder": shims_folder}


def __dir__() -> list[str]:
    return sorted(_public_names())
