"""Places ranks on hosts and builds their environments. Standard library only."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.rendezvous.addresses import OFFER_NAME
from megaclass_launch.rendezvous.job_secret import JOB_SECRET
from megaclass_launch.world import OWN_ADDRESS, OWN_PORT, STORE_PORT, TORCHRUN_VARIABLES, World, environment_of

STARTER = "megaclass-run"

HOROVOD_MARK = "MEGACLASS_HOROVOD"
"""If this variable is given to the ranks, they get horovodrun's environment in place of torchrun's."""

# Variables of the driver that ranks on other hosts get; the rest of their environment is that host's own.
PASSED_ON_PREFIXES = (
    *("MEGACLASS_", "HOROVOD_", "TORCH", "PYTORCH_", "TRITON_", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "UCX_", "FI_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "PYTHON", "LC_", "HF_", "WANDB_", "MLFLOW_"),
)
PASSED_ON_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LANGUAGE", "TZ")
# Every host decides which GPUs it offers, and a rank takes the GPU of its local rank. If the driver is itself a rank of
# another job, that job's secret and store port must not reach this one.
_NEVER_PASSED_ON = ("CUDA_VISIBLE_DEVICES", JOB_SECRET, STORE_PORT, OFFER_NAME)


def place_ranks(hosts: Sequence[Host], num_processes: int) -> list[Host]:
    """Fills one host after the other, as Horovod does; returns those with a rank, with as many slots as they get ranks.

    Raises LaunchError if there are too few slots.
    """
    num_slots = sum(host.slots for host in hosts)
    if num_processes > num_slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {num_processes} needs more slots than there are: {num_slots} on {listed}. "
            f"Lower -np, or raise the slots of a host."
        )
    filled: list[Host] = []
    for host in hosts:
        num_left = num_processes - sum(before.slots for before in filled)
        if num_left:
            filled.append(replace(host, slots=min(host.slots, num_left)))
    return filled


def places_on(hosts: Sequence[Host]) -> list[tuple[str, int]]:
    """Returns host and slot of each rank."""
    return [(host.name, slot) for host in hosts for slot in range(host.slots)]


def worlds_of(places: Sequence[tuple[str, int]]) -> list[World]:
    """Returns the world of each rank. places: host and slot of each, in the order of the ranks.

    Local ranks follow the slots, not the ranks: in an elastic job a process that keeps its slot keeps its local rank
    whenever the slots below it are filled, and a new process never gets the GPU of an old one.
    """
    slots: dict[str, list[int]] = {}
    for host, slot in places:
        slots.setdefault(host, []).append(slot)
    hosts = {host: index for index, host in enumerate(slots)}
    local_ranks = {host: {slot: local for local, slot in enumerate(sorted(found))} for host, found in slots.items()}
    sizes = [len(found) for found in slots.values()]
    worlds = []
    for rank, (host, slot) in enumerate(places):
        local_rank = local_ranks[host][slot]
        worlds.append(
            World(
                rank=rank,
                size=len(places),
                local_rank=local_rank,
                local_size=len(slots[host]),
                # Among the ranks with the same local rank: hosts with fewer slots have none of them.
                cross_rank=sum(size > local_rank for size in sizes[: hosts[host]]),
                cross_size=sum(size > local_rank for size in sizes),
                starter=STARTER,
            )
        )
    return worlds


def rank_environment(
    world: World, *, host: str, address: str, port: int | str, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the variables that tell a rank its place: torchrun's names and Horovod's.

    With HOROVOD_MARK among the variables `given` to the ranks, torchrun's names are left out, and two of our own tell where
    rank 0 is: libraries that look for torchrun's (webdataset, Lightning, Accelerate) then behave as under horovodrun.
    """
    is_horovod = HOROVOD_MARK in (given or {})
    placed = environment_of(replace(world, address=address), is_horovod=is_horovod)
    return {
        **placed,
        (OWN_PORT if is_horovod else "MASTER_PORT"): str(port),
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(world.cross_rank),
        "HOROVOD_CROSS_SIZE": str(world.cross_size),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "PYTHONUNBUFFERED": "1",
    }


def job_environment(secret: str, store_port: int, store_socket: str = "") -> dict[str, str]:
    """Returns the job's secret and the port of its store, which all ranks share and no output shows.

    store_port: 0 lets the store use MASTER_PORT. store_socket: where rank 0 gets the store's listening socket (SocketOffer).
    """
    # Empty rather than absent: the driver may have inherited the port of another job.
    return {JOB_SECRET: secret, STORE_PORT: str(store_port) if store_port else "", OFFER_NAME: store_socket}


def without_other_starters(env: Mapping[str, str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns `env` without the variables of another starter inside which this job is started; `given` ones stay.

    rank_environment overwrites torchrun's names if the job uses them, but in a job with Horovod's names they would stay,
    and vice versa.
    """
    given = given or {}
    others = TORCHRUN_VARIABLES if HOROVOD_MARK in given else (OWN_ADDRESS, OWN_PORT, HOROVOD_MARK)
    return {name: value for name, value in env.items() if name not in others or name in given}


def interface_environment(interface: str, env: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL use an interface, or several with commas; those in `env` stay."""
    chosen = env.get("GLOO_SOCKET_IFNAME", interface)
    # Horovod's variable holds one interface only.
    found = {"GLOO_SOCKET_IFNAME": interface, "HOROVOD_GLOO_IFACE": chosen.partition(",")[0]}
    # NCCL chooses by itself among ranks of one host, which also works without a network; horovodrun does name lo.
    if interface != "lo" or HOROVOD_MARK in given:
        found["NCCL_SOCKET_IFNAME"] = interface
    return {name: value for name, value in found.items() if name not in env}


def passed_on(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the part of the driver's environment that ranks on other hosts get."""
    return {
        name: value
        for name, value in env.items()
        if (name.startswith(PASSED_ON_PREFIXES) or name in PASSED_ON_NAMES) and name not in _NEVER_PASSED_ON
    }


def describe_plan(
    hosts: Sequence[Host],
    agents: Sequence[Sequence[str]],
    *,
    command: Sequence[str],
    workdir: str,
    given: Mapping[str, str],
    passed: Mapping[str, str],
) -> str:
    """Describes everything that a job would do. Variables are named without their values, which may be secrets.

    hosts: with as many slots as ranks are to be started there. agents: the command that starts each host's agent.
    """
    worlds = iter(worlds_of(places_on(hosts)))
    size = sum(host.slots for host in hosts)
    on_hosts = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    lines = [f"{size} rank{'s' if size > 1 else ''} on {on_hosts}", f"command: {shlex.join(command)}"]
    lines.append(f"working folder: {workdir}")
    lines.append(f"given with -x or --env-file (values not shown): {_names(given)}")
    if not all(host.is_local for host in hosts):
        lines.append(f"passed on to other hosts (values not shown): {_names(passed)}")
    for host, agent in zip(hosts, agents, strict=True):
        here = [next(worlds) for _ in range(host.slots)]
        ranks = f"rank {here[0].rank}" if len(here) == 1 else f"ranks {here[0].rank}-{here[-1].rank}"
        where = " (this machine)" if host.is_local else ""
        lines += ["", f"{host.name}{where}: {ranks}", f"  agent: {shlex.join(agent)}"]
        for world in here:
            env = rank_environment(
                world,
                host=host.name,
                address=f"<address of {hosts[0].name}>" if len(hosts) > 1 else "127.0.0.1",
                port=f"<free port of {hosts[0].name}>",
                given=given,
            )
            lines.append(f"  rank {world.rank}: " + " ".join(f"{name}={value}" for name, value in env.items()))
    return "\n".join(lines)


def _names(env: Mapping[str, str]) -> str:
    return " ".join(sorted(env)) if env else "nothing"
