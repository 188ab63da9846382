"""Who is there: rank and size of this process, read from whichever starter is in charge. No torch here.

A starter writes environment variables; this module turns them into one `World`. Known starters: torchrun and
`megaclass run` (the same names; Horovod's with --horovod), Open MPI, Slurm's srun, or nobody: a world of one.
"""

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megaclass.errors import LaunchError

# Ports below the range from which Linux hands out ephemeral ones, so that a derived port is seldom taken.
_DERIVED_PORTS = range(20_000, 32_000)
# Where rank 0 is, in a job that has Horovod's names in place of torchrun's.
OWN_ADDRESS, OWN_PORT = "MEGACLASS_ADDRESS", "MEGACLASS_PORT"
_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOROVOD_NAMES = {
    "RANK": "HOROVOD_RANK",
    "WORLD_SIZE": "HOROVOD_SIZE",
    "LOCAL_RANK": "HOROVOD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "HOROVOD_LOCAL_SIZE",
    "GROUP_RANK": "HOROVOD_CROSS_RANK",
    "GROUP_WORLD_SIZE": "HOROVOD_CROSS_SIZE",
    "MASTER_ADDR": OWN_ADDRESS,
    "MASTER_PORT": OWN_PORT,
}
TORCHRUN_VARIABLES = (
    *_HOROVOD_NAMES,
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
)
"""All that torchrun tells a rank about its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Place of this process among all processes of the job.

    `local_*` count the processes on this host; `cross_*` the hosts that have a process with this local rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    starter: str = "nobody"
    address: str = "127.0.0.1"
    """Host of rank 0, where the ranks find each other."""
    port: int = 0
    """Port there; 0 in a world of one, which needs none."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def name(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


def world_from_environment(env: Mapping[str, str] = os.environ) -> World:
    """The world this process was started into. Contradictions in the environment are a LaunchError."""
    if is_horovods(env):
        # A script may have set torchrun's names itself, for a process group of its own.
        theirs = {ours: env[name] for ours, name in _HOROVOD_NAMES.items() if name in env}
        return _from_torchrun({**env, **theirs})
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _from_open_mpi(env)
    # A batch script carries SLURM_PROCID too; only tasks that srun started carry a step.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return _from_slurm(env)
    return World()


def is_horovods(env: Mapping[str, str] = os.environ) -> bool:
    """Whether `megaclass run --horovod` started this process, and not torchrun within that."""
    return "HOROVOD_RANK" in env and OWN_PORT in env and "TORCHELASTIC_RUN_ID" not in env


def starters_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """Those present without which nobody would be in charge."""
    return [name for name in ("RANK", "WORLD_SIZE", OWN_PORT, "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID") if name in env]


def environment_of(world: World, *, is_horovod: bool = False) -> dict[str, str]:
    """The variables that make `world_from_environment` return this world: what a starter gives its processes.

    is_horovod: Horovod's names, and two of our own, in place of torchrun's.
    """
    values = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(world.cross_rank),
        "GROUP_WORLD_SIZE": str(world.cross_size),
        "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port),
    }
    named = {_HOROVOD_NAMES[name]: value for name, value in values.items()} if is_horovod else values
    return {**named, "MEGACLASS_STARTER": world.starter}


def _from_torchrun(env: Mapping[str, str]) -> World:
    starter = env.get("MEGACLASS_STARTER", "torchrun")
    size = _number(env, "WORLD_SIZE", starter)
    local_size = _number(env, "LOCAL_WORLD_SIZE", starter, default=size)
    world = World(
        rank=_number(env, "RANK", starter),
        size=size,
        local_rank=_number(env, "LOCAL_RANK", starter, default=_number(env, "RANK", starter) % max(local_size, 1)),
        local_size=local_size,
        cross_rank=_number(env, "GROUP_RANK", starter, default=0),
        cross_size=_number(env, "GROUP_WORLD_SIZE", starter, default=max(1, size // max(local_size, 1))),
        starter=starter,
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        # A port of our own leaves MASTER_PORT to what the script does with torch.distributed itself.
        port=_number(env, "MEGACLASS_STORE_PORT" if env.get("MEGACLASS_STORE_PORT") else "MASTER_PORT", starter)
        if size > 1
        else 0,
    )
    return _checked(world)


def _from_open_mpi(env: Mapping[str, str]) -> World:
    starter = "Open MPI"
    size = _number(env, "OMPI_COMM_WORLD_SIZE", starter)
    rank = _number(env, "OMPI_COMM_WORLD_RANK", starter)
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", starter)
    num_hosts = _number(env, "OMPI_MCA_orte_num_nodes", starter, default=max(1, size // max(1, local_size)))
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("OMPI_MCA_orte_ess_jobid", "")
    world = World(
        rank=rank,
        size=size,
        local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", starter),
        local_size=local_size,
        # mpirun tells no rank its host's number; unless told otherwise it fills one host after the other.
        cross_rank=min(rank // max(1, local_size), num_hosts - 1),
        cross_size=num_hosts,
        starter=starter,
        # On several hosts the ranks ask mpirun where rank 0 is when they meet (distributed/network/rank0_address.py).
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(env, "MASTER_PORT", starter, default=_port_of(f"mpi {job}")) if size > 1 else 0,
    )
    return _checked(world)


def _from_slurm(env: Mapping[str, str]) -> World:
    starter = "Slurm"
    size = _number(env, "SLURM_STEP_NUM_TASKS", starter, default=_number(env, "SLURM_NTASKS", starter, default=1))
    num_nodes = _number(env, "SLURM_STEP_NUM_NODES", starter, default=_number(env, "SLURM_NNODES", starter, default=1))
    node = _number(env, "SLURM_NODEID", starter, default=0)
    tasks = tasks_on_slurm_nodes(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    step = f"slurm {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    world = World(
        rank=_number(env, "SLURM_PROCID", starter),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", starter),
        local_size=tasks[node] if node < len(tasks) else max(1, size // num_nodes),
        cross_rank=node,
        cross_size=num_nodes,
        starter=starter,
        address=env.get("MASTER_ADDR") or first_slurm_host(nodes),
        port=_number(env, "MASTER_PORT", starter, default=_port_of(step)) if size > 1 else 0,
    )
    return _checked(world)


def first_slurm_host(node_list: str) -> str:
    """First host of Slurm's short form: 'gpu[07-09,12],login' -> 'gpu07', 'rack[1-2]-[4,5]' -> 'rack1-4'."""
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", node_list)
    if match is None:
        raise LaunchError(
            f"Cannot read the first host of Slurm's node list {node_list!r}: expected for example gpu[07-09]."
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def tasks_on_slurm_nodes(text: str) -> list[int]:
    """Tasks on each node from Slurm's short form: '2(x3),1' -> [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise LaunchError(f"Cannot read {part!r} in SLURM_TASKS_PER_NODE={text!r}: expected for example 2(x3),1.")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _number(env: Mapping[str, str], name: str, starter: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is not None:
            return default
        left_over = " ".join(name for name in _TORCHRUN_NAMES if name in env)
        unset = f"type `unset {left_over}` if what is there is left over, " if left_over else ""
        raise LaunchError(
            f"The environment is that of {starter}, but {name} is not set. "
            f"Set {name}, {unset}or start with `megaclass run -np N …`, which sets all of them."
        )
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise LaunchError(f"{name}={text!r} in the environment of {starter}: expected a whole number of 0 or more.")
    return int(text)


def _checked(world: World) -> World:
    for what, rank, size in (
        ("rank", world.rank, world.size),
        ("local rank", world.local_rank, world.local_size),
        ("cross rank", world.cross_rank, world.cross_size),
    ):
        if not 0 <= rank < size:
            raise LaunchError(
                f"{world.starter} says {what} {rank} of {size}: it must lie in [0, {size}). "
                f"Look for leftover RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE in the environment."
            )
    if world.size > 1 and not 0 < world.port < 2**16:
        raise LaunchError(f"MASTER_PORT={world.port} in the environment of {world.starter}: it must lie in [1, 65535].")
    return world


def _port_of(job: str) -> int:
    """All ranks of one job compute the same port from the job's name; two jobs seldom share one."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    return _DERIVED_PORTS[digest % len(_DERIVED_PORTS)]
