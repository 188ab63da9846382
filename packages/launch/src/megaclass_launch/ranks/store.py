"""The key-value store through which the ranks of a job find each other. The only place that creates a TCPStore.

A TCPStore cannot authenticate: every process that reaches its port can read, write and delete keys. Therefore it listens on
one address only (loopback when all ranks are on one machine) and holds plain data only. `SignedStore` adds proof that a
value was written by a rank of this job.
"""

import contextlib
import errno
import hmac
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaclass_launch.errors import ConnectionLostError, LaunchError
from megaclass_launch.rendezvous.addresses import OFFER_NAME, source_towards, take_socket
from megaclass_launch.rendezvous.connection_watch import JUDGED_AFTER, LIMIT_NAME, network_timeout
from megaclass_launch.rendezvous.rank0_address import is_one_machine
from megaclass_launch.world import STORE_PORT, World

_BACKLOG = 4096
_MAC_BYTES = 32
_RETRY_S = 0.25
# A closed port or a firewall that rejects; the last three come from ICMP messages.
_REFUSALS = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES)


def make_store(world: World, timeout_s: float, *, waits_for_all: bool = False) -> "dist.Store":  # type: ignore[name-defined]
    """Creates the job's store: rank 0 serves it, the other ranks connect to it.

    Args:
        waits_for_all: whether rank 0 returns only when all ranks have connected.

    Raises:
        RuntimeError: from torch, when a rank cannot connect within `timeout_s`.
        ConnectionLostError: when another host refuses the connection for MEGACLASS_NETWORK_TIMEOUT.
    """
    # A single process needs no port, which could be in use.
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    # torchrun's agent may already serve a store at that port.
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = world.is_main and not is_shared
    address = "127.0.0.1" if is_one_machine(world) and not is_shared else world.address
    allow_many_connections()
    if not world.is_main and not is_one_machine(world):
        _wait_while_refused(world, min(JUDGED_AFTER * network_timeout(), timeout_s))
    options: dict[str, Any] = {"master_listen_fd": _listening(address, world.port)} if is_master else {}
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        world.port,
        world.size,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=waits_for_all and not is_shared,
        **options,
    )


def _wait_while_refused(world: World, limit_s: float) -> None:
    """Connects to rank 0's port once, and again while the connection is refused; raises when that lasts for `limit_s`.

    Rank 0 may start later than this rank, so one refusal is not an error. torch retries refused connections silently for its
    whole timeout, and its error names neither host nor port. ConnectionWatch cannot see refusals: such an attempt is over
    before the watch looks. All other failures are left to torch and to the watch. A limit of 0 disables the check.
    """
    refused_since: float | None = None
    while limit_s:
        try:
            socket.create_connection((world.address, world.port), timeout=limit_s).close()
            return
        except OSError as error:
            if error.errno not in _REFUSALS:
                return
            now = time.monotonic()
            refused_since = now if refused_since is None else refused_since
            if now - refused_since >= limit_s:
                raise ConnectionLostError(
                    f"{world.name()}: connections from {source_towards(world.address) or 'this host'} to {world.address} port "
                    f"{world.port} (rank 0) have been refused for {limit_s:g} s ({error.strerror}). Does a firewall reject "
                    f"them, or is rank 0 not running? {LIMIT_NAME}={network_timeout():g} is the limit in seconds: raise it "
                    f"if rank 0 starts later."
                ) from error
        time.sleep(_RETRY_S)


def allow_many_connections() -> None:
    """Raises this process's limit on open files to its hard limit.

    The store and gloo keep every connection open, also those of strangers, and gloo aborts the process when no file
    descriptor is left for another one.
    """
    import resource  # not on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listening(address: str, port: int) -> int:
    """Returns the descriptor of a socket that listens on this address only; by default a TCPStore listens on all addresses."""
    info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if (handed_over := _handed_over(str(info[4][0]), port)) is not None:
        return handed_over
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(info[0], socket.SOCK_STREAM))
        # The launcher may hold the port: with SO_REUSEPORT alone, only processes of the same user can bind it as well.
        # A port that is not held may still be in TIME_WAIT from an earlier connection, which SO_REUSEADDR ignores.
        is_held = os.environ.get(STORE_PORT) == str(port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if is_held else socket.SO_REUSEADDR, 1)
        try:
            # Bound before the other ranks look for it, and to one address: strangers on other interfaces cannot reach it.
            listener.bind(info[4])
            listener.listen(_BACKLOG)
        except OSError as error:
            raise LaunchError(
                f"Rank 0 on {socket.gethostname()} cannot listen at {address} port {port}: {error.strerror}."
            ) from error
        undo.pop_all()
    return listener.detach()


def _handed_over(address: str, port: int) -> int | None:
    """Returns a copy of the socket with which the launcher listens for this store; None if there is none."""
    listener = take_socket(name) if (name := os.environ.get(OFFER_NAME)) else None
    if listener is not None and listener.getsockname()[:2] == (address, port):
        return listener.detach()
    return None


class SignedStore(dist.Store):  # type: ignore[name-defined,misc]
    """A part of a store whose values carry an HMAC over prefix, key and value.

    Reading a value that was not written with this secret, under this prefix and this key raises LaunchError. Without a secret
    the store only detects accidents. gloo finds its peers through this store: a stranger cannot direct a rank to another
    address, and cannot copy an entry from one group to another.
    """

    def __init__(self, store: "dist.Store", secret: bytes, prefix: str) -> None:  # type: ignore[name-defined]
        """prefix: separates the keys of this part from all others; it is signed with each of them."""
        super().__init__()
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._secret, self._prefix = secret, prefix

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._mac(key, content) + content)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        signed = bytes(self._store.get(key))
        mac, content = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            raise LaunchError(
                f"The entry {key!r} in the job's store was not written by a rank of this job: {len(signed)} bytes without "
                f"a valid signature. Another job uses the same port, or another process writes to this store."
            )
        return content

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def _mac(self, key: str, content: bytes) -> bytes:
        # With the whole key in the text: a value cannot be replayed under another one. Keys hold no null byte.
        return hmac.digest(self._secret, f"{self._prefix}\0{key}\0".encode() + content, "sha256")
