"""How the ranks of a job find each other: process groups for tensors, connections to rank 0 for control messages.

hvd has its own process groups and never touches torch.distributed's default group, which belongs to the script. The ranks meet
in their own store. Only if torch.distributed was initialised and hvd does not know the starter, it uses the ranks and the
store of the default group. Each call of init() after a shutdown() has its own prefix in the store, so a rank that is early
waits for the others instead of reading their old entries.

Nothing that comes from the store or from a connection is unpickled here. Entries of the store are JSON, signed with the job's
secret (megaclass_launch/ranks/store.py); connections are made by mutual proof of the secret (control_connection.py).
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from horovod.common.settings import Settings
from horovod.engine.control_connection import AuthenticatedListener, ControlConnection, Endpoint, connect
from megaclass_launch.elastic import is_elastic
from megaclass_launch.errors import LaunchError
from megaclass_launch.ranks.devices import ranks_sharing_a_gpu, visible_gpus
from megaclass_launch.ranks.process_group import explained
from megaclass_launch.ranks.store import SignedStore, allow_many_connections, make_store
from megaclass_launch.rendezvous.addresses import interfaces, is_own
from megaclass_launch.rendezvous.connection_watch import ConnectionWatch, network_timeout
from megaclass_launch.rendezvous.job_secret import LocalSecret, job_secret, local_secret, machine_and_network
from megaclass_launch.rendezvous.rank0_address import meeting_point, name_interfaces
from megaclass_launch.world import World, world_from_environment


@dataclass(frozen=True)
class Meeting:
    """All ranks of a job after they have met, as this rank sees them."""

    rank: int
    hosts: list[str]
    local_ranks: list[int]
    store: "dist.Store"  # type: ignore[name-defined]
    """Holds the entries of this init() only."""
    secret: bytes
    """Known to the ranks of the job only, and another one at each init(); empty if the starter gave none."""
    is_one_machine: bool
    connections: dict[int, ControlConnection]
    """By rank: on rank 0 to all other ranks, elsewhere to rank 0 only."""
    uses_nccl: bool
    """True if every rank has a GPU of its own."""

    @property
    def size(self) -> int:
        return len(self.hosts)

    def signed_store(self, name: str) -> SignedStore:
        """Returns the part of the store for one purpose; `name` is the same on all ranks that take part."""
        return SignedStore(self.store, self.secret, name)


class Rendezvous:
    """Brings the ranks together at every init(), and keeps the store in between."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None  # type: ignore[name-defined]

    def meet(self, ranks: list[int] | None, settings: Settings) -> Meeting:
        """Collective over `ranks` (all by default), which meet here; other ranks must not call it."""
        world = world_from_environment()
        # If the starter gave all ranks a port for the store, it does not matter what the script did with torch.distributed.
        uses_default_group = dist.is_initialized() and not os.environ.get("MEGACLASS_STORE_PORT")
        if not uses_default_group:
            world = meeting_point(world)
            name_interfaces(world)
        here, size = (dist.get_rank(), dist.get_world_size()) if uses_default_group else (world.rank, world.size)
        members = tuple(sorted(set(ranks))) if ranks else tuple(range(size))
        if here not in members:
            raise ValueError(f"hvd.init(comm={ranks}) was called on rank {here}, which is not among them.")
        if uses_default_group:
            allow_many_connections()
            base = dist.distributed_c10d._get_default_store()
        else:
            base = self._own_store(world, settings)
        # Each rank counts in the store how often it has met these members. Meetings with other members do not count.
        base = dist.PrefixStore(f"horovod.torch/{members}", base)  # type: ignore[attr-defined]
        # A rank that calls init() for the n-th time waits under prefix n, where only the n-th init() of the others writes.
        generation = base.add(f"generations of {here}", 1)
        store = dist.PrefixStore(str(generation), base)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=settings.start_timeout_s))
        try:
            return _meet(store, members.index(here), len(members), world, settings)
        except RuntimeError as error:
            raise LaunchError(
                f"{world.name()} cannot join the others at {world.address}:{world.port} within "
                f"{settings.start_timeout_s:g} s: {error}"
            ) from error

    def _own_store(self, world: World, settings: Settings) -> "dist.Store":  # type: ignore[name-defined]
        # One for all calls of init(): its port is taken, and a rank that is early writes into it.
        if self._store is None:
            try:
                self._store = make_store(world, settings.start_timeout_s)
            except RuntimeError as error:
                raise LaunchError(
                    f"{world.name()} cannot reach the store at {world.address}:{world.port}: {error}"
                ) from error
        return self._store


def watch_connections() -> ConnectionWatch:
    """Watches the connections of this process to other hosts; there are none if all ranks are on one machine."""
    world = world_from_environment()
    limit_s = network_timeout() if world.local_size < world.size else 0.0
    return ConnectionWatch(world.name(), limit_s, ends_process=not is_elastic()).start()


def new_group(
    meeting: Meeting, name: str, ranks: tuple[int, ...], settings: Settings, *, backend: str = "gloo"
) -> dist.ProcessGroup:
    """Creates a process group of these ranks that torch.distributed does not list; only its members call it.

    torch.distributed's functions work with it as long as ranks are passed as `group_src` and `group_dst`. It has no device_id,
    because the script chooses the GPU of a rank after init().
    """
    place, size = ranks.index(meeting.rank), len(ranks)
    timeout = timedelta(seconds=settings.gloo_timeout_s)
    kinds = dist.ProcessGroup.BackendType
    made: Any
    devices: tuple[str, ...]
    if backend == "gloo":
        # gloo looks up the addresses of its peers there. The signature keeps strangers from changing them.
        store: Any = meeting.signed_store(f"{name}/gloo")
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = _gloo_devices(meeting)
        kind, devices = kinds.GLOO, ("cpu", "cuda")
        try:
            made = dist.ProcessGroupGloo(store, place, size, options)
        except RuntimeError as error:
            raise LaunchError(
                f"Rank {meeting.rank} on {socket.gethostname()} cannot join the others: {explained(error)}"
            ) from error
    else:
        # NCCL's threads use the store as long as the group lives, and must not need Python for it: it is not signed.
        store = dist.PrefixStore(f"{name}/nccl", meeting.store)  # type: ignore[attr-defined]
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        made, kind, devices = dist.ProcessGroupNCCL(store, place, size, options), kinds.NCCL, ("cuda",)
    group = dist.ProcessGroup(store, place, size)
    group._set_default_backend(kind)
    for device in devices:
        # gloo also takes CUDA tensors, through main memory: what ranks that share a GPU use.
        group._register_backend(torch.device(device), kind, made)
    return group


def _gloo_devices(meeting: Meeting) -> list[Any]:
    """Returns loopback on one machine; otherwise the interfaces in GLOO_SOCKET_IFNAME, or that of the host's name."""
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [gloo.create_device(interface=name) for name in names]
    return [gloo.create_device(hostname="127.0.0.1") if meeting.is_one_machine else gloo.create_default_device()]


def _meet(store: Any, rank: int, size: int, world: World, settings: Settings) -> Meeting:
    network = machine_and_network()
    secret = job_secret() or _shared_secret(store, rank, size, network, settings)
    signed = SignedStore(store, secret, "meeting")
    mine: dict[str, object] = {
        "host": os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        "local_rank": world.local_rank if world.starter != "none" else -1,
        "gpus": visible_gpus() if dist.is_nccl_available() else [],
        # One machine may have several host names, and containers on one machine have different ones.
        "machine": f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}",
        "network": network,
        "nonce": secrets.token_hex(16),
    }
    # Checked although signed: without a secret the signature proves nothing.
    entries = [_checked_entry(entry) for entry in _exchange(signed, "who", mine, rank, size)]
    secret = _secret_of_this_init(secret, [str(entry["nonce"]) for entry in entries], rank, str(mine["nonce"]))
    # From here on with the secret of this init().
    signed = SignedStore(store, secret, "meeting")
    hosts = [str(entry["host"]) for entry in entries]
    local_ranks = [int(entry["local_rank"]) for entry in entries]
    # Local ranks are counted here if the starter does not set them, if two ranks have the same one, or if only some ranks of
    # a host take part.
    places = set(zip(hosts, local_ranks, strict=True))
    if places != {(host, place) for host in hosts for place in range(hosts.count(host))}:
        local_ranks = [hosts[:r].count(hosts[r]) for r in range(size)]
    is_one_machine = len({entry["network"] for entry in entries}) == 1
    # A job of one rank opens no port.
    if size == 1:
        connections = {}
    elif rank == 0:
        # On one machine at loopback, which no other host reaches.
        listener = AuthenticatedListener("127.0.0.1" if is_one_machine else _own_address(world), secret)
        signed.set("endpoint", json.dumps(listener.endpoint))
        arrived = listener.accept_ranks(range(1, size), settings.start_timeout_s)
        connections = {peer: ControlConnection(connection) for peer, connection in arrived.items()}
    else:
        endpoint = Endpoint(*json.loads(signed.get("endpoint")))
        connection = connect(endpoint, secret, rank=rank, to="rank 0", timeout_s=settings.start_timeout_s)
        connections = {0: ControlConnection(connection)}
    uses_nccl = _has_gpu_per_rank([str(entry["machine"]) for entry in entries], [entry["gpus"] for entry in entries])
    return Meeting(rank, hosts, local_ranks, store, secret, is_one_machine, connections, uses_nccl)


def _exchange(store: Any, name: str, mine: object, rank: int, size: int) -> list[Any]:
    """Returns the values of all ranks by rank. Rank 0 collects them as JSON, and the others read its list."""
    # Through rank 0: about 2 * W reads in all, instead of W * W if each rank read the entries of all others.
    if rank:
        store.set(f"{name}/{rank}", json.dumps(mine))
        found = _parsed(store.get(name), name)
    else:
        found = [mine, *(_parsed(store.get(f"{name}/{other}"), f"{name}/{other}") for other in range(1, size))]
        store.set(name, json.dumps(found))
    if not isinstance(found, list) or len(found) != size:
        raise LaunchError(f"The entry {name!r} in the job's store is not a list of {size} entries.")
    return found


def _parsed(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"The entry {name!r} in the job's store was not written by a rank: it is not JSON."
        ) from error


def _checked_entry(entry: Any) -> dict[str, Any]:
    texts = ("host", "machine", "network", "nonce")
    expected = {"local_rank": int, "gpus": list} | dict.fromkeys(texts, str)
    if not isinstance(entry, dict) or {name: type(entry.get(name)) for name in expected} != expected:
        raise LaunchError(f"A rank described itself in the job's store as {str(entry)[:200]!r}, which no rank would.")
    return entry


def _has_gpu_per_rank(machines: list[str], gpus: list[list[str]]) -> bool:
    """Returns whether every rank has a GPU of its own: NCCL refuses two ranks on one GPU.

    All ranks pass the same lists, so all of them decide alike. The script chooses its GPU after init(): by its local rank if
    it sees the GPUs of the whole machine, or the only one that its starter shows it.
    """
    by_machine: dict[str, list[list[str]]] = {}
    for machine, visible in zip(machines, gpus, strict=True):
        by_machine.setdefault(machine, []).append(visible)
    for seen in by_machine.values():
        sees_enough = all(len(visible) >= len(seen) for visible in seen)
        together = [gpu for visible in seen for gpu in visible]
        is_disjoint = all(seen) and ranks_sharing_a_gpu(together) is None
        if not (sees_enough or is_disjoint):
            return False
    return True


def _secret_of_this_init(secret: bytes, nonces: list[str], rank: int, own: str) -> bytes:
    """Returns a secret that no other init() has, made of the job's secret and a random number of each rank.

    A recorded entry or object of an earlier init() was signed with another secret. A recorded list of all ranks is
    recognised, because this rank's number is new.
    """
    if nonces[rank] != own:
        raise LaunchError(
            f"The list of ranks in the job's store does not hold what rank {rank} wrote for this init(): it is a copy of an "
            f"earlier one. Another process writes to this store."
        )
    # Without a secret of the job any process could compute this one, so it stays empty: nothing is trusted then.
    return hmac.digest(secret, "\0".join(nonces).encode(), "sha256") if secret else b""


def _shared_secret(store: Any, rank: int, size: int, network: str, settings: Settings) -> bytes:
    """Returns a secret for ranks whose starter gave none, if all are on one machine and of one user; else empty bytes.

    The entries are not signed. A forged entry leads to an error, or to a job without a secret, in which no object of a class is
    ever unpickled. It never leads to a secret that the forger knows.
    """
    if size == 1 or _exchange(store, "networks", network, rank, size) != size * [network]:
        return b""
    if rank == 0:
        offered = LocalSecret(size - 1, settings.start_timeout_s)
        store.set("secret is at", offered.name)
        return offered.secret
    return local_secret(store.get("secret is at").decode(errors="replace"))


def _own_address(world: World) -> str:
    """Returns the address at which other hosts reach this one."""
    # gloo takes a list of interfaces and divides its connections among them; a listener has one address.
    listed = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME", "")
    interface = listed.partition(",")[0]
    if interface:
        found = interfaces()
        if interface not in found:
            raise LaunchError(
                f"{socket.gethostname()} has no network interface {interface!r} with an address: it has {', '.join(found)}."
            )
        return found[interface][0]
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(world.address, 0, type=socket.SOCK_STREAM)[0][4][0])
        if is_own(address):
            return address
    return socket.gethostbyname(socket.gethostname())
