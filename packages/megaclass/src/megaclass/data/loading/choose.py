"""How many processes read the data of one rank, chosen from the CPU cores that it may use."""

import math
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megaclass.data.sources.open_source import format_of
from megaclass_launch.errors import ConfigError
from megaclass_launch.operating_system import num_cores

_CGROUPS = Path("/sys/fs/cgroup")
# Each decodes 4,700 to 5,700 JPEGs per second (benchmarks/loader.md): eight are enough even for the small backbones.
_MAX_PROCESSES = 8
# The thread of the training loop, and those of NCCL, autograd and the checkpoint writer.
_CORES_OF_TRAINING = 2


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Place of the data, and number of processes that read it."""

    path: str
    num_processes: int


def choose_processes(
    path: str, *, workers: int | Literal["auto"], device: torch.device, num_local_ranks: int
) -> LoaderSettings | None:
    """Returns the loader processes of this rank; None: its own threads read.

    workers: data.workers; auto means none if training itself runs on the CPU.
    """
    unknown = _outside_format(path)
    if workers == "auto":
        if device.type != "cuda" or unknown or multiprocessing.current_process().daemon:
            return None
        num_processes = automatic_processes(num_local_ranks)
    else:
        num_processes = workers
    if num_processes and unknown:
        raise ConfigError(
            f"data.workers is {num_processes}, but the data at {path} is read by {unknown}, a format from outside "
            f"the package, which loader processes do not know: set data.workers=0 and raise data.threads."
        )
    if num_processes and multiprocessing.current_process().daemon:
        raise ConfigError(
            f"data.workers is {num_processes}, but this is a daemonic process of multiprocessing, which may not start "
            f"processes: start it with daemon=False, or set data.workers=0 and raise data.threads."
        )
    return LoaderSettings(path=path, num_processes=num_processes) if num_processes else None


def automatic_processes(num_local_ranks: int) -> int:
    """Returns how many loader processes data.workers=auto starts per rank that trains on a GPU of this machine."""
    # More processes than cores would slow the thread that feeds the GPU, which is the one that must never wait.
    return max(1, min(_MAX_PROCESSES, cores_of_rank(num_local_ranks) - _CORES_OF_TRAINING))


def cores_of_rank(num_local_ranks: int) -> int:
    """Returns how many CPU cores each rank of this host may use, at least one."""
    under_slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if under_slurm.isdigit() and "SLURM_PROCID" in os.environ:
        # Slurm may bind each rank to cores of its own, which are then not to be divided again.
        return max(1, min(int(under_slurm), available_cores()))
    return max(1, available_cores() // num_local_ranks)


def available_cores() -> int:
    """Returns how many CPU cores this process may use: by affinity, and by the quota of its container."""
    return max(1, math.ceil(min(num_cores(), _quota())))


def _quota() -> float:
    """Returns the number of cores that the control group allows; infinite without a limit."""
    try:
        # Microseconds of CPU time per period of wall time; "max" without a limit. The older layout follows below.
        limit, period = (_CGROUPS / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (_CGROUPS / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUPS / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    if not limit.isdigit() or not period.isdigit() or int(period) == 0:
        return math.inf
    return int(limit) / int(period)


def _outside_format(path: str) -> str:
    """Returns the name of a format that a user's code has added to FORMATS and this data needs; empty if there is none."""
    for part in format_of(path).parts():
        kind = type(part)
        if not kind.__module__.startswith("megaclass."):
            return f"{kind.__module__}.{kind.__qualname__}"
    return ""
