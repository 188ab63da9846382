"""The agent's side of its workers: their environment, the ports of rank 0, their output, and in elastic jobs a channel each.

    setup     check: folder, command, interfaces -> placed: the variables of one worker
    ports     hold: before any rank starts -> offer_store: rank 0 asks for the socket of its store
    output    watch: a worker was started -> _read whenever its pipes have something -> the end of the stream: it is closed
    channel   open: a worker is about to start -> messages of the worker, and of the driver about generations -> close

The output is not read while `pause_if` was last called with True. The pipes fill then, and the workers wait in their writes, as
for a slow terminal. A read that the agent asks for (read_stderr, read_last, read_rest) is made all the same.

Used by the agent's one thread. Standard library only.
"""

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from megaclass_launch.agent.supervisor import Worker, default_threads, find_command
from megaclass_launch.elastic import FD_NAME, IS_RUNNING_NAME, MAX_RANKS_NAME, Channel
from megaclass_launch.errors import LaunchError
from megaclass_launch.placement import interface_environment, rank_environment, without_other_starters
from megaclass_launch.rendezvous.addresses import (
    SocketOffer,
    hold_store_port,
    interface_towards,
    interfaces,
    offer_store_socket,
    present,
    reserve_port,
)
from megaclass_launch.versions import installed_versions
from megaclass_launch.wire.protocol import Message, ProtocolError
from megaclass_launch.world import World

# ---- folder, command, environment, network interface ----


class WorkerSetup:
    """Prepares the start of the workers on this host. job: the driver's first message; own: the agent's environment."""

    def __init__(self, job: Message, own: Mapping[str, str]) -> None:
        self._job = job
        self.workdir = Path(job["workdir"])
        self.base = _base_environment(job, own)
        """The environment that all workers of this host share."""
        self._interfaces: list[str] = []
        """Those of --network-interface that this host has; written by `check`."""

    def check(self) -> Message:
        """Returns what the driver must know before the workers may start. Raises LaunchError if they cannot."""
        if not self.workdir.is_dir():
            raise LaunchError(f"There is no working folder {str(self.workdir)!r}; give another with --workdir.")
        # Found out now, so nothing is started anywhere if one host lacks the program.
        find_command(self._job["command"], self.base, self.workdir)
        found: Message = {}
        if self._job["interfaces"]:
            self._interfaces = present(self._job["interfaces"])
            found["address"] = interfaces()[self._interfaces[0]][0]
        # With no other host there is nothing to compare them with.
        if not self._job["is_alone"]:
            found["versions"] = installed_versions()
        return found

    def placed(self, world: World, where: Message) -> dict[str, str]:
        """Returns the variables that tell a worker its place and its network interface, beyond `base`.

        where: the driver's message with the address and the port of rank 0.
        """
        given = self._job["given"]
        # Without a choice of the user, the interface towards rank 0: gloo would take that of the host's name, often loopback.
        interface = ",".join(self._interfaces) or interface_towards(where["address"])
        return {
            **(interface_environment(interface, self.base, given) if interface is not None else {}),
            **rank_environment(
                world, host=self._job["host"], address=where["address"], port=where["port"], given=given
            ),
        }


def _base_environment(job: Message, own: Mapping[str, str]) -> dict[str, str]:
    """Returns the host's own environment with the driver's part and the user's variables."""
    env = {**own, **job["passed"]}
    if "PATH" in job["passed"] and "PATH" in own:
        # The driver's folders come first, for the same interpreter; the host's own may have more programs.
        folders = [*job["passed"]["PATH"].split(os.pathsep), *own["PATH"].split(os.pathsep)]
        env["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    # A crash, or SIGABRT after a hang, then prints the Python stack of every thread.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env.setdefault("OMP_NUM_THREADS", str(default_threads(job["slots"])))
    return {**without_other_starters(env, job["given"]), **job["given"]}


# ---- the ports on which rank 0 will listen ----

_NUM_HELD = 6
"""Two sockets for the running generation, two for the previous one, whose ranks may still leave it, and two spare ones."""


class Rank0Ports:
    """Holds the ports for the next generation with rank 0 on this host; a job that is not elastic has one generation.

    master_port: the port that the user chose, or 0. store_address: the only address at which the store will listen, or an
    empty text.
    """

    def __init__(self, master_port: int, store_address: str = "") -> None:
        self._master_port = master_port
        self._store_address = store_address
        # Kept here, because a socket that is not referred to any more is closed, and its port is free again.
        self._held: list[socket.socket] = []

    def hold(self) -> Message:
        """Holds the ports and returns them for the driver. Raises LaunchError if the user's port is in use."""
        # If the user chose the port, it is the only one, for all generations: a firewall may block all others.
        if self._master_port:
            self._held = self._held or [reserve_port(self._master_port)]
            return {"port": self._master_port, "store_port": 0}
        # The kernel gives a held port to no process that asks for any free one.
        self._held += [reserve_port(0), hold_store_port(self._store_address)]
        # Closed late: ranks of that generation may still be leaving it, and no other process may listen there meanwhile.
        for old in self._held[:-_NUM_HELD]:
            old.close()
        self._held = self._held[-_NUM_HELD:]
        port, store_port = (held.getsockname()[1] for held in self._held[-2:])
        return {"port": port, "store_port": store_port}

    def offer_store(self, address: str) -> SocketOffer | None:
        """Listens at the store's port for rank 0, which asks for the socket; None if rank 0 has to listen itself.

        To be called before the ranks start: rank 0 asks for it as soon as it has imported torch. address: of this host.
        """
        if self._master_port or not self._held:
            return None
        # If that fails, rank 0 cannot listen there either, and says why.
        with contextlib.suppress(OSError):
            return offer_store_socket(self._held[-1], self._store_address or address)
        return None


READ_BYTES = 1 << 16
_READS_OF_A_FULL_PIPE = 2
_FORWARDED = ("ready", "committed", "failed")
_OF_A_GENERATION = ("generation", "token", "members", "previous_size", "needs_sync", "has_progressed")


class WorkerOutput:
    """Reads the workers' stdout, stderr and results. take: called with a rank, the stream and the bytes of one read."""

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[int, str, bytes], None]) -> None:
        self._selector = selector
        self._take = take
        self._is_paused = False
        self._pipes: dict[int, tuple[Worker, str]] = {}
        """Worker and stream by file number, until the stream ends."""
        self._results: dict[int, IO[bytes]] = {}
        """Pipe for the result by rank, in a job that is a call of a function."""

    def watch(self, worker: Worker, result_fd: int | None = None) -> None:
        """Reads the output of a worker that was started. result_fd: the pipe for its result, if it calls a function."""
        pipes = {"stdout": worker.process.stdout, "stderr": worker.process.stderr}
        if result_fd is not None:
            pipes["result"] = self._results[worker.rank] = os.fdopen(result_fd, "rb", buffering=0)
        for stream, pipe in pipes.items():
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = (worker, stream)
            # An elastic job starts workers at any time, also while the others are not read.
            if not self._is_paused:
                self._listen(pipe.fileno())

    def pause_if(self, is_full: bool) -> None:
        """Stops reading while the driver does not take what was read, and resumes when it does."""
        if is_full == self._is_paused:
            return
        self._is_paused = is_full
        for pipe in self._pipes:
            if is_full:
                self._selector.unregister(pipe)
            else:
                self._listen(pipe)

    def read_stderr(self, rank: int) -> None:
        """Reads what a rank has printed on stderr, while the agent's loop waits for its stacks."""
        self._read_all(
            pipe for pipe, (owner, stream) in self._pipes.items() if (owner.rank, stream) == (rank, "stderr")
        )

    def read_last(self, worker: Worker) -> None:
        """Reads what a worker that has ended left in its pipes, so its last output is sent before its exit code."""
        for pipe in [pipe for pipe, (owner, _) in self._pipes.items() if owner is worker]:
            # Not to the end of the stream: a process that the worker started may hold the pipe open and write without end.
            for _ in range(_READS_OF_A_FULL_PIPE):
                if pipe in self._pipes and not self._read(pipe):
                    break

    def read_rest(self) -> None:
        """Reads everything that is left in the pipes of all workers; no process may write to them any more."""
        self._read_all(self._pipes)

    def _read_all(self, pipes: Iterable[int]) -> None:
        # A list, because a read removes the pipe at the end of its stream.
        for pipe in list(pipes):
            while self._read(pipe):
                continue

    def _listen(self, pipe: int) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, pipe))

    def _read(self, pipe: int) -> bool:
        """Passes on one read of a worker's output; returns whether there may be more."""
        worker, stream = self._pipes[pipe]
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            # It is not registered while the output is paused.
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
            del self._pipes[pipe]
            closed = self._results.get(worker.rank) if stream == "result" else getattr(worker.process, stream)
            assert closed is not None
            # Closed here and not with the worker, which may have ended long before a child that inherited its pipe.
            closed.close()
            return False
        self._take(worker.rank, stream, data)
        return True


class WorkerChannels:
    """One channel per worker, and the token of the generation that each worker knows: messages with others are dropped."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        say: Callable[[Message], None],
        on_fault: Callable[[int], None],
        *,
        is_elastic: bool,
    ) -> None:
        """on_fault: ends a worker. is_elastic: in other jobs no worker gets a channel."""
        self._is_elastic = is_elastic
        self._selector = selector
        self._say = say
        self._on_fault = on_fault
        self._channels: dict[int, Channel] = {}
        self._tokens: dict[int, str] = {}

    @property
    def has_unsent(self) -> bool:
        """Returns whether something waits for room; assignments of very large jobs may not fit into a socket at once."""
        return any(channel.has_unsent for channel in self._channels.values())

    @contextmanager
    def open(self, number: int, start: Message) -> Iterator[tuple[dict[str, str], list[int]]]:
        """Opens the channel of a worker and gives the variables and the files that the worker needs for it.

        start: the driver's order. If the block raises an error, there is no channel.
        """
        if not self._is_elastic:
            yield {}, []
            return
        ours, theirs = socket.socketpair()
        # The worker has a copy. With this one open, the end of the worker would not end the channel.
        with theirs:
            try:
                yield (
                    {
                        FD_NAME: str(theirs.fileno()),
                        IS_RUNNING_NAME: str(int(bool(start["is_running"]))),
                        MAX_RANKS_NAME: str(int(start["max_ranks"])),
                        "HOROVOD_ELASTIC": "1",
                    },
                    [theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        self._channels[number] = Channel(ours)
        self._tokens[number] = ""
        self._selector.register(ours, selectors.EVENT_READ, partial(self.read, number))

    def publish(self, generation: Message, environment: Callable[[World, Message], Mapping[str, str]]) -> None:
        """Tells the workers of this host their places in the next generation."""
        for name, world in generation["worlds"].items():
            number = int(name)
            if (channel := self._channels.get(number)) is None:
                continue  # it has ended meanwhile, which the driver learns as well
            self._tokens[number] = generation["token"]
            port = generation["store_port"] or generation["port"]
            channel.send(
                {
                    "say": "assignment",
                    **{name: generation[name] for name in _OF_A_GENERATION},
                    "world": {**world, "address": generation["address"], "port": port},
                    "env": dict(environment(World(**world), generation)),
                }
            )

    def tell_generation(self, order: Message) -> None:
        """Passes on news about a generation to its members only: another worker may be in the next one already."""
        said = {"say": order["do"], **{name: order[name] for name in order if name != "do"}}
        for number, channel in self._channels.items():
            if self._tokens[number] == order["token"]:
                channel.send(said)

    def dismiss(self, numbers: Sequence[int], why: str) -> None:
        """Tells workers that the job continues without them."""
        for number in numbers:
            if number in self._channels:
                self._channels[number].send({"say": "dismissed", "why": why})

    def read(self, number: int) -> None:
        """Passes on what a worker has sent to the driver."""
        if (channel := self._channels.get(number)) is None:
            return
        try:
            messages = channel.receive()
        except ProtocolError as error:
            self._say({"say": "note", "text": f"a worker sent {error} to its agent and is ended"})
            self.close(number)
            self._on_fault(number)
            return
        for message in messages:
            kind = message.get("do")
            # A token of an earlier generation: the worker is late, and what it says concerns that generation only.
            if kind in _FORWARDED and message.get("token") == self._tokens[number]:
                known: Message = {name: message[name] for name in ("why", "text", "token") if name in message}
                self._say({"say": kind, "rank": number, **known})
        if not channel.is_open:
            self.close(number)

    def write(self) -> None:
        """Sends what waits for room."""
        for channel in self._channels.values():
            channel.write()

    def close(self, number: int) -> None:
        """Closes the channel of a worker, if it is still open."""
        if (channel := self._channels.pop(number, None)) is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(channel.fileno())
            channel.close()
