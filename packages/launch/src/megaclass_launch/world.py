"""Place of this process in its job: rank and size, read from the variables of whichever starter is in charge. No torch here.

A starter writes environment variables; this module turns them into one `World`. To support another starter, add one entry
to `STARTERS`.
"""

import hashlib
import itertools
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaclass_launch.errors import LaunchError, clipped

# Ports below the range from which Linux takes ephemeral ones, so a derived port is rarely in use.
_DERIVED_PORTS = range(20_000, 32_000)
# Where rank 0 is, in a job that has Horovod's names in place of torchrun's.
OWN_ADDRESS, OWN_PORT = "MEGACLASS_ADDRESS", "MEGACLASS_PORT"
STORE_PORT = "MEGACLASS_STORE_PORT"
_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_VARIABLES = (
    *_TORCHRUN_NAMES,
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
)
"""All variables by which torchrun tells a rank its place."""
NO_STARTER = "none"
_MAX_SLURM_RANGE = 100_000
"""The largest clusters have about 10,000 hosts. A damaged list must not fill the memory."""


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
    starter: str = NO_STARTER
    """Name of an entry of STARTERS, or what MEGACLASS_STARTER says; "none" for a process that was started by hand."""
    address: str = "127.0.0.1"
    """Host of rank 0, where the ranks meet."""
    port: int = 0
    """Port there; 0 in a world of one, which needs none."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def name(self) -> str:
        """Returns a description for messages: "rank 3 of 8 on gpu-1"."""
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


Environment = Mapping[str, str]
Derived = Callable[[Environment, dict[str, int]], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """The variables by which one starter tells a process its place.

    Of several names for one value the first that is set counts. A value whose variables are not set is taken from
    `derived`; if that has none either, the last name is reported as missing.
    """

    name: str
    is_present: Callable[[Environment], bool]
    """Tells whether the environment is that of this starter."""
    unset: tuple[str, ...]
    """Variables to unset so that this starter is not recognised any more."""
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    cross_rank: tuple[str, ...] = ()
    cross_size: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    derived: dict[str, Derived]
    """Fields of World, computed from the environment and from the fields read before them (in the order of `_FIELDS`)."""
    derived_address: Callable[[Environment], str] = lambda _: "127.0.0.1"
    address_advice: str
    """Advice for a wrong address of rank 0; {own} stands for an address of the host of rank 0."""


_FIELDS = ("size", "rank", "local_size", "local_rank", "cross_size", "cross_rank", "port")
_TORCHRUN_DERIVED: dict[str, Derived] = {
    "local_size": lambda env, found: found["size"],
    "local_rank": lambda env, found: found["rank"] % max(found["local_size"], 1),
    "cross_size": lambda env, found: max(1, found["size"] // max(found["local_size"], 1)),
    "cross_rank": lambda env, found: 0,
}
# In this order: torchrun inside a job of Slurm, or inside `megaclass-run --horovod`, is in charge.
STARTERS = (
    Starter(
        # Only with --horovod; otherwise it sets torchrun's names and MEGACLASS_STARTER. A script may have set torchrun's
        # names itself, for a process group of its own, so these come first.
        name="megaclass-run",
        is_present=lambda env: is_horovods(env),
        unset=(OWN_PORT,),
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        cross_rank=("HOROVOD_CROSS_RANK",),
        cross_size=("HOROVOD_CROSS_SIZE",),
        address=(OWN_ADDRESS,),
        # A port of its own leaves MASTER_PORT to what the script does with torch.distributed itself.
        port=(STORE_PORT, OWN_PORT),
        derived=_TORCHRUN_DERIVED,
        address_advice="name the interface between the hosts with --network-interface.",
    ),
    Starter(
        name="torchrun",
        is_present=lambda env: "RANK" in env or "WORLD_SIZE" in env,
        unset=("RANK", "WORLD_SIZE"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        cross_rank=("GROUP_RANK",),
        cross_size=("GROUP_WORLD_SIZE",),
        port=(STORE_PORT, "MASTER_PORT"),
        derived=_TORCHRUN_DERIVED,
        address_advice="give every torchrun --master-addr {own}, and --node-rank 0 to the one on that host.",
    ),
    Starter(
        name="Open MPI",
        is_present=lambda env: "OMPI_COMM_WORLD_RANK" in env,
        unset=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        cross_size=("OMPI_MCA_orte_num_nodes",),
        derived={
            "cross_size": _TORCHRUN_DERIVED["cross_size"],
            # mpirun does not tell a rank its host's number; by default it fills one host after the other.
            "cross_rank": lambda env, found: min(found["rank"] // max(1, found["local_size"]), found["cross_size"] - 1),
            "port": lambda env, found: _port_of(f"mpi {_open_mpi_job(env)}"),
        },
        # On several hosts the ranks ask mpirun for the address of rank 0 (rendezvous/rank0_address.py).
        address_advice="leave MASTER_ADDR out, or add -x MASTER_ADDR={own}.",
    ),
    Starter(
        name="Slurm",
        # A batch script also has SLURM_PROCID; only tasks that srun started have a step.
        is_present=lambda env: "SLURM_PROCID" in env and "SLURM_STEP_ID" in env,
        unset=("SLURM_STEP_ID",),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        cross_rank=("SLURM_NODEID",),
        cross_size=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        derived={
            "size": lambda env, found: 1,
            "local_size": lambda env, found: _tasks_on_this_slurm_node(env, found["size"]),
            "cross_size": lambda env, found: 1,
            "cross_rank": lambda env, found: 0,
            "port": lambda env, found: _port_of(f"slurm {env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"),
        },
        derived_address=lambda env: slurm_hosts(_slurm_nodes(env))[0],
        address_advice="unset MASTER_ADDR, "
        "or export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1).",
    ),
)


def world_from_environment(env: Environment = os.environ) -> World:
    """Returns the world this process was started into. Raises LaunchError if the variables contradict each other."""
    starter = next((starter for starter in STARTERS if starter.is_present(env)), None)
    return _world(starter, env) if starter is not None else World()


def is_horovods(env: Environment = os.environ) -> bool:
    """Returns whether `megaclass-run --horovod` started this process, and not torchrun within that."""
    return "HOROVOD_RANK" in env and OWN_PORT in env and "TORCHELASTIC_RUN_ID" not in env


def starters_variables(env: Environment = os.environ) -> list[str]:
    """Returns the variables to unset so that no starter is recognised any more."""
    return [name for starter in STARTERS for name in starter.unset if name in env]


def address_advice(world: World, own: str) -> str:
    """Returns what to do if the address of rank 0 is wrong. own: an address of rank 0's host."""
    advice = {starter.name: starter.address_advice for starter in STARTERS}
    return advice.get(world.starter, "export MASTER_ADDR={own}.").replace("{own}", own)


def environment_of(world: World, *, is_horovod: bool = False) -> dict[str, str]:
    """Returns the variables that make `world_from_environment` return this world: what a starter gives its processes.

    is_horovod: Horovod's names, and two of our own, in place of torchrun's.
    """
    starter = next(starter for starter in STARTERS if starter.name == ("megaclass-run" if is_horovod else "torchrun"))
    fields = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "address", "port")
    placed = {getattr(starter, field)[-1]: str(getattr(world, field)) for field in fields}
    return {**placed, "MEGACLASS_STARTER": world.starter}


def _world(starter: Starter, env: Environment) -> World:
    name = starter.name
    if name in ("torchrun", "megaclass-run"):
        # This package's launchers set torchrun's names, and their own name here.
        name = env.get("MEGACLASS_STARTER", name)
    found: dict[str, int] = {}
    for what in _FIELDS:
        names: tuple[str, ...] = getattr(starter, what)
        # An empty store port stands for none (placement.py).
        given = next(
            (variable for variable in names if variable in env and (env[variable] or variable != STORE_PORT)), None
        )
        if what == "port" and found["size"] == 1:
            found[what] = 0
        elif given is not None:
            found[what] = _number(env, given, name)
        elif what in starter.derived:
            found[what] = starter.derived[what](env, found)
        else:
            raise _missing(names[-1], env, name)
    address = next((env[variable] for variable in starter.address if env.get(variable)), "")
    return _checked(World(**found, starter=name, address=address or starter.derived_address(env)))


def _open_mpi_job(env: Environment) -> str:
    return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("OMPI_MCA_orte_ess_jobid", "")


def _slurm_nodes(env: Environment) -> str:
    return env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"


def _tasks_on_this_slurm_node(env: Environment, size: int) -> int:
    tasks = tasks_on_slurm_nodes(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size))
    node = _number(env, "SLURM_NODEID", "Slurm") if "SLURM_NODEID" in env else 0
    if node < len(tasks):
        return tasks[node]
    num_nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES", "1")
    return max(1, size // int(num_nodes)) if num_nodes.isdecimal() and int(num_nodes) else 1


def slurm_hosts(node_list: str) -> list[str]:
    """Returns the hosts of Slurm's short form: 'gpu[07-09,12],login' -> gpu07 gpu08 gpu09 gpu12 login."""
    hosts: list[str] = []
    part = r"(?:[^,\[\]]|\[[^\[\]]+\])+"
    if not re.fullmatch(f"{part}(?:,{part})*", node_list):
        raise LaunchError(f"Cannot read Slurm's node list {clipped(node_list)}: expected for example gpu[07-09,12].")
    for host in re.findall(part, node_list):
        pieces = re.split(r"\[([^\[\]]*)\]", host)
        choices = [[piece] if i % 2 == 0 else _numbers(piece, node_list) for i, piece in enumerate(pieces)]
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def _numbers(text: str, node_list: str) -> list[str]:
    """Returns the numbers of '07-09,12', with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(_MAX_SLURM_RANGE):
            raise LaunchError(
                f"Cannot read {part!r} in Slurm's node list {clipped(node_list)}: expected for example gpu[07-09,12]."
            )
        numbers += [f"{number:0{len(match[1])}d}" for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def tasks_on_slurm_nodes(text: str) -> list[int]:
    """Returns the tasks of each node from Slurm's short form: '2(x3),1' -> [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise LaunchError(
                f"Cannot read {part!r} in SLURM_TASKS_PER_NODE={clipped(text)}: expected for example 2(x3),1."
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _number(env: Environment, name: str, starter: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", env[name]):
        raise LaunchError(
            f"{name}={env[name]!r} in the environment of {starter}: expected a whole number of 0 or more."
        )
    return int(env[name])


def _missing(name: str, env: Environment, starter: str) -> LaunchError:
    left_over = " ".join(variable for variable in _TORCHRUN_NAMES if variable in env)
    unset = f"type `unset {left_over}` if they are left over from another job, " if left_over else ""
    return LaunchError(
        f"The environment is that of {starter}, but {name} is not set. "
        f"Set {name}, {unset}or start with `megaclass-run -np N …`, which sets all of them."
    )


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
    """Derives a port from the job's name: all ranks of a job get the same one, and two jobs rarely share one."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    return _DERIVED_PORTS[digest % len(_DERIVED_PORTS)]
