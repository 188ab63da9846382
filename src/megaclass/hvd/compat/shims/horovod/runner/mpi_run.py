"""The answers of a Horovod that was built without MPI."""

import os
from typing import Any, NoReturn

_OMPI_IMPL = "OpenMPI"
_SMPI_IMPL = "SpectrumMPI"
_MPICH_IMPL = "MPICH"
_IMPI_IMPL = "IntelMPI"
_UNKNOWN_IMPL = "Unknown"
_MISSING_IMPL = "Missing"
_LARGE_CLUSTER_THRESHOLD = 64


def mpi_available(env: Any = None) -> bool:
    return False


def is_open_mpi(env: Any = None) -> bool:
    return False


def is_mpich(env: Any = None) -> bool:
    return False


def is_intel_mpi(env: Any = None) -> bool:
    return False


def _get_mpi_implementation(env: Any = None) -> str:
    return _MISSING_IMPL


def _get_mpi_implementation_flags(tcp_flag: Any, env: Any = None) -> tuple[None, None, None]:
    return None, None, None


def mpi_run(settings: Any, nics: Any, env: Any, command: Any, stdout: Any = None, stderr: Any = None) -> NoReturn:
    raise NotImplementedError(
        "megaclass does not include MPI: `megaclass run --launcher mpi` starts a job through Open MPI's mpirun."
    )
