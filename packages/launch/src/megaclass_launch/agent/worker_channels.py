"""The channels between an agent and the workers of an elastic job. Standard library only.

    open: a worker is about to start -> messages of the worker, and of the driver about generations -> close: it has ended

Used by the agent's one thread. A worker that sends something else than messages is given to `on_fault`, and is ended.
"""

import selectors
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from megaclass_launch.elastic.channel import FD_NAME, Channel, ChannelError
from megaclass_launch.elastic.worker import IS_RUNNING_NAME, MAX_RANKS_NAME
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World

_FORWARDED = ("ready", "committed", "failed")
_OF_A_GENERATION = ("generation", "token", "secret", "members", "previous_size", "needs_sync", "has_progressed")


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
