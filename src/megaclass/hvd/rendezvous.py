"""How the ranks of a job find each other: process groups for tensors, links to rank 0 for control messages.

If torch.distributed was initialised by somebody else, its default group is used to make groups of our own and is left
alone; else it is initialised here. One store serves all generations of init() in a process, each under a prefix of its
own: a rank that comes back first waits for the others instead of meeting their past.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaclass.distributed.rendezvous import interface_names, meeting_point
from megaclass.errors import LaunchError
from megaclass.hvd.links import Link, Reception, connect
from megaclass.hvd.settings import Settings
from megaclass.world import World, is_horovods, world_from_environment

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Meeting:
    """All ranks, after they have met."""

    rank: int
    hosts: list[str]
    local_ranks: list[int]
    group: dist.ProcessGroup
    owns_default_group: bool
    is_part: bool
    """Whether the default group has ranks that are no part of this job."""
    links: dict[int, Link]
    address: str
    """Where the other ranks reach this one."""
    uses_nccl: bool
    """Whether every rank has a GPU of its own."""

    @property
    def size(self) -> int:
        return len(self.hosts)


class Meeter:
    """Remembers the store between generations."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None  # type: ignore[name-defined]
        self._generation = 0

    def meet(self, ranks: list[int] | None, settings: Settings) -> Meeting:
        """Collective over the listed ranks, or all. A rank that is not listed must not call it."""
        self._generation += 1
        timeout = timedelta(seconds=settings.start_timeout_s)
        world = _world()
        owns_default_group = not dist.is_initialized()
        if owns_default_group:
            world = meeting_point(world)
            os.environ.update(interface_names(world))
        here = world.rank if owns_default_group else dist.get_rank()
        members = (
            sorted(set(ranks)) if ranks else list(range(world.size if owns_default_group else dist.get_world_size()))
        )
        if here not in members:
            raise ValueError(f"hvd.init(comm={ranks}) was called on rank {here}, which is not among them.")
        if owns_default_group:
            self._join_default_group(world, members, timeout)
        # Timeouts of operations differ from that of the start, so ours is a group of its own.
        places = list(range(dist.get_world_size())) if owns_default_group else members
        is_part = len(places) < dist.get_world_size()
        group = new_group(places, settings, is_part=is_part)
        return _meeting(group, world, owns_default_group, is_part, settings)

    def _join_default_group(self, world: World, members: list[int], timeout: timedelta) -> None:
        if self._store is None:
            self._store = _make_store(world, timeout)
        store = dist.PrefixStore(f"megaclass.hvd/{self._generation}/{members}", self._store)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                "gloo", store=store, rank=members.index(world.rank), world_size=len(members), timeout=timeout
            )
        except RuntimeError as error:
            raise LaunchError(
                f"{world.name()} cannot join the others at {world.address}:{world.port} within "
                f"{timeout.total_seconds():g} s: {error}"
            ) from error


def new_group(ranks: list[int], settings: Settings, *, backend: str = "gloo", is_part: bool) -> dist.ProcessGroup:
    """A process group of these ranks of the default group; every rank of the job calls it, member or not.

    torch names groups by counting them, so that all ranks of the default group must take part. Only where the job is a
    part (`is_part`) of somebody else's default group are the members left among themselves. No device_id: which GPU a
    rank uses is the script's choice, made after init().
    """
    made: Any = dist.new_group(
        ranks,
        timeout=timedelta(seconds=settings.gloo_timeout_s),
        backend=backend,
        use_local_synchronization=is_part,
    )
    group: dist.ProcessGroup = made
    return group


def _meeting(
    group: dist.ProcessGroup, world: World, owns_default_group: bool, is_part: bool, settings: Settings
) -> Meeting:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    reception: Reception | None = None
    mine: dict[str, object] = {
        "host": os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        "local_rank": world.local_rank if world.starter != "nobody" else -1,
        "gpus": num_gpus,
        # A machine may be several hosts by name, and containers on one machine have names of their own.
        "machine": f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}",
    }
    everybody: list[dict[str, object]] = [{} for _ in range(size)]
    dist.all_gather_object(everybody, mine, group=group)
    hosts = [str(entry["host"]) for entry in everybody]
    local_ranks = [int(str(entry["local_rank"])) for entry in everybody]
    # A starter that says nothing about local ranks, two ranks that claim one, or some ranks of a host only: count them.
    places = set(zip(hosts, local_ranks, strict=True))
    if places != {(host, place) for host in hosts for place in range(hosts.count(host))}:
        local_ranks = [hosts[:r].count(hosts[r]) for r in range(size)]
    if rank == 0:
        reception = Reception("127.0.0.1" if len(set(hosts)) == 1 else _own_address(world))
    where: list[Any] = [(reception.address, reception.port, reception.token) if reception else None]
    dist.broadcast_object_list(where, group=group, group_src=0)
    if reception is not None:
        address = reception.address
        arrived = reception.welcome(range(1, size), settings.start_timeout_s)
        links = {peer: Link(connection) for peer, connection in arrived.items()}
    else:
        connection = connect(*where[0], rank=rank, to="rank 0", timeout_s=settings.start_timeout_s)
        address = connection.getsockname()[0]
        links = {0: Link(connection)}
    machines = [entry["machine"] for entry in everybody]
    uses_nccl = all(int(str(entry["gpus"])) >= machines.count(entry["machine"]) for entry in everybody)
    return Meeting(rank, hosts, local_ranks, group, owns_default_group, is_part, links, address, uses_nccl)


def _world() -> World:
    """From the starter's variables, or from Horovod's own where only those are set."""
    if "HOROVOD_RANK" not in os.environ or "RANK" in os.environ or is_horovods():
        return world_from_environment()
    env = dict(os.environ)
    for ours, theirs in (
        ("RANK", "RANK"),
        ("WORLD_SIZE", "SIZE"),
        ("LOCAL_RANK", "LOCAL_RANK"),
        ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        ("GROUP_RANK", "CROSS_RANK"),
        ("GROUP_WORLD_SIZE", "CROSS_SIZE"),
    ):
        if f"HOROVOD_{theirs}" in env:
            env[ours] = env[f"HOROVOD_{theirs}"]
    return world_from_environment(env)


def _make_store(world: World, timeout: timedelta) -> "dist.Store":  # type: ignore[name-defined]
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    # torchrun's agent holds a store at that port already.
    is_master = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    with _bound_to(world) if is_master else contextlib.nullcontext() as listener:
        options: dict[str, Any] = {"master_listen_fd": listener} if listener is not None else {}
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                world.address,
                world.port,
                world.size,
                is_master=is_master,
                timeout=timeout,
                wait_for_workers=False,
                **options,
            )
        except RuntimeError as error:
            raise LaunchError(
                f"{world.name()} cannot reach the store at {world.address}:{world.port}: {error}"
            ) from error


@contextlib.contextmanager
def _bound_to(world: World) -> Iterator[int | None]:
    """A listening socket on the one address in use: a store left to itself listens on all of them."""
    try:
        info = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
    except OSError:
        yield None
        return
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
        listener.listen(1024)
    except OSError:
        # Not an address of this host, as behind a translated network: let the store try on all of them.
        listener.close()
        yield None
        return
    yield listener.detach()


def _own_address(world: World) -> str:
    """The address at which other hosts reach this one."""
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
            except OSError as error:
                raise LaunchError(f"Interface {interface!r} on {socket.gethostname()}: {error.strerror}.") from error
        return socket.inet_ntoa(packed[20:24])
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(world.address, 0, type=socket.SOCK_STREAM)[0][4][0]
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return str(address)
    return socket.gethostbyname(socket.gethostname())
