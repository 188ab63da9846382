"""The pipes between the agent and its workers: their output, and in elastic jobs a channel each. Standard library only.

    output    watch: a worker was started -> _read whenever its pipes have something -> the end of the stream: it is closed
    channel   open: a worker is about to start -> messages of the worker, and of the driver about generations -> close

The output is not read while `pause_if` was last called with True. The pipes fill then, and the workers wait in their writes, as
for a slow terminal. A read that the agent asks for (read_stderr, read_last, read_rest) is made all the same.

Used by the agent's one thread.
"""

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO

from megaclass_launch.agent.driver_connection import READ_BYTES
from megaclass_launch.agent.supervisor import Worker
from megaclass_launch.elastic.channel import FD_NAME, Channel, ChannelError
from megaclass_launch.elastic.worker import IS_RUNNING_NAME, MAX_RANKS_NAME
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World

_READS_OF_A_FULL_PIPE = 2
_FORWARDED = ("ready", "committed", "failed")
_OF_A_GENERATION = ("generation", "token", "secret", "members", "previous_size", "needs_sync", "has_progressed")


class WorkerOutput:
    """Reads the workers' stdout, stderr and results. take: called with a rank, the stream and the bytes of one read."""

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[int, str, bytes], None]) -> None:
        self._selector = selector
        self._take = take
        self._is_paused = False
        self._pipes: dict[int, tuple[Worker, str]] = {}
        """Worker and stream by file number, until the stream ends."""
        self._results: dict[int, IO[bytes]] = {}
        """Pipe for the result by rank, in jobs of horovod.run()."""

    def watch(self, worker: Worker, result_fd: int | None = None) -> None:
        """Reads the output of a worker that was started. result_fd: the pipe for its result, in jobs of horovod.run()."""
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
                    "worker": number,
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
        except ChannelError as error:
            self._say({"say": "note", "text": f"a worker sent {error} to its agent and is ended"})
            self.close(number)
            self._on_fault(number)
            return
        for message in messages:
            kind = message.get("do")
            # A token of an earlier generation: the worker is late, and what it says concerns that generation only.
            if kind in _FORWARDED and message.get("token") == self._tokens[number]:
                known: Message = {name: message[name] for name in ("why", "step", "text", "token") if name in message}
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
