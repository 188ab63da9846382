"""torch's key-value store, through which the ranks find each other: bound to one address, values signed.

A TCPStore cannot authenticate: whoever reaches its port can read, write and delete keys. Therefore it listens on one
address only, on loopback when all ranks are on one machine, and holds plain data only. `SignedStore` adds the proof that
a value was written by a rank of this job.
"""

import contextlib
import hmac
import os
import resource
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaclass.distributed.network.rank0_address import is_one_machine
from megaclass.errors import LaunchError
from megaclass.world import World

_BACKLOG = 4096
_MAC_BYTES = 32


def make_store(world: World, timeout_s: float, *, waits_for_all: bool = False) -> "dist.Store":  # type: ignore[name-defined]
    """The store of the job: rank 0 serves it, the others connect. RuntimeError from torch when they cannot.

    waits_for_all: rank 0 returns when all ranks have connected.
    """
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    # torchrun's agent may hold a store at that port already.
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = world.is_main and not is_shared
    address = "127.0.0.1" if is_one_machine(world) and not is_shared else world.address
    allow_many_connections()
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


def allow_many_connections() -> None:
    """Raises this process's limit of open files to the most it may have.

    The store and gloo keep every connection open, a stranger's too, and gloo aborts the process when it has no file left
    for another one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listening(address: str, port: int) -> int:
    """File number of a socket that listens on the one address in use: a store left to itself listens on all of them."""
    info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(info[0], socket.SOCK_STREAM))
        # With SO_REUSEPORT alone, a port that the launcher holds for this user is free to this user and to nobody else.
        # Ports that nobody holds may still be waiting for the end of earlier connections, which SO_REUSEADDR ignores.
        is_held = os.environ.get("MEGACLASS_STORE_PORT") == str(port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if is_held else socket.SO_REUSEADDR, 1)
        try:
            listener.bind(info[4])
            listener.listen(_BACKLOG)
        except OSError as error:
            raise LaunchError(
                f"Rank 0 on {socket.gethostname()} cannot listen at {address} port {port}: {error.strerror}."
            ) from error
        undo.pop_all()
    return listener.detach()


class SignedStore(dist.Store):  # type: ignore[name-defined,misc]
    """A store whose values carry an HMAC over key and value.

    A value that was not written with the job's secret is a LaunchError. Without a secret it only guards against
    accidents. gloo finds its peers through it as well: a stranger cannot send a rank to an address of his.
    """

    def __init__(self, store: "dist.Store", secret: bytes) -> None:  # type: ignore[name-defined]
        super().__init__()
        self._store, self._secret = store, secret

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._mac(key, content) + content)

    def get(self, key: str) -> bytes:
        signed = bytes(self._store.get(key))
        mac, content = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            raise LaunchError(
                f"The entry {key!r} in the job's store was not written by a rank of this job: {len(signed)} bytes without "
                f"a valid signature. Another job uses the same port, or somebody interferes."
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
        return hmac.digest(self._secret, key.encode() + b"\0" + content, "sha256")
