"""Horovod's API over torch.distributed: `import megaclass.hvd as hvd` in place of `import horovod.torch as hvd`.

basics          init, shutdown, who is there
mpi_ops         the collective operations: reducing, moving, scattering
optimizer       DistributedOptimizer
functions       objects, parameters, optimizer states
running         run(): a function on every rank, through the launcher
controller      how ranks agree on what to do next (read this, then coordinator)
data_plane      how it is done

Names come from `api` when they are first used: a launcher that asks for `shims_folder()` loads no torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megaclass.launch.horovod_options import shims_folder as shims_folder

if TYPE_CHECKING:
    from megaclass.hvd.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "elastic":
        raise AttributeError("hvd.elastic is not there yet: elastic jobs are not supported.")
    # Python asks here before it imports a module of this package by `from megaclass.hvd import …`.
    if find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module {__name__}.{name} is not imported yet")
    api = import_module("megaclass.hvd.api")
    # From now on they are found without asking here.
    globals().update({public: getattr(api, public) for public in api.__all__})
    return getattr(api, name)


def __dir__() -> list[str]:
    return list(import_module("megaclass.hvd.api").__all__)
