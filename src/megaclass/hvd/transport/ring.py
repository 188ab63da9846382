"""Allreduce in main memory: each rank sends to the next and receives from the one before, on the thread that asks.

A tensor is cut into one block a rank. Every block goes round once, each rank adding its own part, and once more as the
result. A rank passes on what it has received as it comes, without waiting for the rest of the block, so that all of it
is one stream of bytes in and one out. No thread but the caller's takes part, and nothing is copied that need not be:
gloo hands every piece from thread to thread, which takes longer than sending it.
"""

import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megaclass.distributed.network.store import SignedStore
from megaclass.hvd.engine.control_connection import AuthenticatedListener, Endpoint, connect
from megaclass.hvd.exceptions import HorovodInternalError
from megaclass.hvd.settings import Settings

# What is received at a time to be added, and what is sent at a time: more falls out of the caches on the way, less costs
# more calls.
_SCRATCH_BYTES = 1024 * 1024
_SENT_BYTES = 512 * 1024


class Ring:
    """This rank's place among the members of a process set."""

    def __init__(
        self, place: int, names: Sequence[str], to_next: socket.socket, from_last: socket.socket, timeout_s: float
    ) -> None:
        """`names` of the members, in their order, for errors; `timeout_s`: how long a neighbour may be silent."""
        self._place, self._names, self._timeout_s = place, names, timeout_s
        self._to_next, self._from_last = to_next, from_last
        for connection in (to_next, from_last):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        self._scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)

    def reduce(
        self, given_N: Tensor, out_N: Tensor, combine: Callable[..., Tensor], finish: Callable[[Tensor], object]
    ) -> None:
        """Puts the `given_N` of all members, combined, into `out_N`, which may be the same tensor. All members call it.

        `combine` is torch.add or its like. `finish` is applied to every part of the result once, by one member, in
        place, before the others receive it: all end with the same bits.
        """
        try:
            self._reduce(given_N, out_N, combine, finish)
        except BaseException:
            # Whoever waits for the rest learns by this that it will not come, and then those behind them.
            self.close()
            raise

    def _reduce(
        self, given_N: Tensor, out_N: Tensor, combine: Callable[..., Tensor], finish: Callable[[Tensor], object]
    ) -> None:
        size, item_bytes = len(self._names), given_N.element_size()
        starts = [given_N.numel() * place // size for place in range(size + 1)]
        given, out = _bytes_of(given_N), _bytes_of(out_N)
        # In the order of their arrival; each is passed on, but for the last.
        arriving = [(self._place - 1 - step) % size for step in range(2 * (size - 1))]
        blocks = [slice(starts[place] * item_bytes, starts[place + 1] * item_bytes) for place in range(size)]
        outgoing = _Outgoing([given[blocks[self._place]], *(out[blocks[place]] for place in arriving[:-1])])
        for step, place in enumerate(arriving):
            begin, end = starts[place], starts[place + 1]
            if step < size - 1:
                for part_N in self._parts(given_N.dtype, end - begin, outgoing):
                    place_N = slice(begin, begin + part_N.numel())
                    combine(given_N[place_N], part_N, out=out_N[place_N])
                    if step == size - 2:
                        finish(out_N[place_N])
                    outgoing.num_ready += part_N.numel() * item_bytes
                    begin = place_N.stop
            else:
                block = out[blocks[place]]
                while len(block):
                    count = self._receive(block, outgoing)
                    outgoing.num_ready += count
                    block = block[count:]
        while not outgoing.is_done:
            if not self._send(outgoing):
                self._wait(sends=True, receives=False)

    def _parts(self, dtype: torch.dtype, count: int, outgoing: "_Outgoing") -> Iterator[Tensor]:
        """The next `count` elements as they come, in pieces; each is valid until the next."""
        scratch = _bytes_of(self._scratch)
        typed = self._scratch.view(dtype)
        filled = 0
        while count:
            wanted = min(len(scratch), count * dtype.itemsize)
            filled += self._receive(scratch[filled:wanted], outgoing)
            whole = filled // dtype.itemsize
            if whole:
                yield typed[:whole]
                count -= whole
                rest = filled - whole * dtype.itemsize
                scratch[:rest] = scratch[filled - rest : filled]
                filled = rest

    def _receive(self, into: memoryview, outgoing: "_Outgoing") -> int:
        """Number of bytes that came, at least one; sends while it waits."""
        while True:
            has_sent = self._send(outgoing)
            try:
                count = self._from_last.recv_into(into)
            except BlockingIOError:
                if not has_sent:
                    self._wait(sends=outgoing.can_go, receives=True)
                continue
            except OSError as error:
                raise self._gone(self._place - 1) from error
            if not count:
                raise self._gone(self._place - 1)
            return count

    def _send(self, outgoing: "_Outgoing") -> bool:
        """Whether anything went out."""
        if not outgoing.can_go:
            return False
        try:
            outgoing.skip(self._to_next.send(outgoing.front()))
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone(self._place + 1) from error
        return True

    def _wait(self, *, sends: bool, receives: bool) -> None:
        """Until one of them is possible."""
        events = select.poll()
        if sends:
            events.register(self._to_next, select.POLLOUT)
        if receives:
            events.register(self._from_last, select.POLLIN)
        if not events.poll(self._timeout_s * 1000):
            neighbour = self._name(self._place - 1 if receives else self._place + 1)
            raise HorovodInternalError(
                f"{self._name(self._place)} waited {self._timeout_s:g} s for {neighbour}. If that can be, set "
                f"HOROVOD_GLOO_TIMEOUT_SECONDS"
            )

    def _gone(self, place: int) -> HorovodInternalError:
        return HorovodInternalError(f"{self._name(place)} has ended its connection to {self._name(self._place)}")

    def _name(self, place: int) -> str:
        return self._names[place % len(self._names)]

    def close(self) -> None:
        for connection in (self._to_next, self._from_last):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class _Outgoing:
    """Bytes to be sent, in order, the first `num_ready` of which may be."""

    def __init__(self, blocks: list[memoryview]) -> None:
        self._blocks = [block for block in blocks if len(block)]
        self._number = 0
        self.num_ready = len(blocks[0])

    @property
    def is_done(self) -> bool:
        return self._number == len(self._blocks)

    @property
    def can_go(self) -> bool:
        return self.num_ready > 0 and not self.is_done

    def front(self) -> memoryview:
        return self._blocks[self._number][: min(self.num_ready, _SENT_BYTES)]

    def skip(self, count: int) -> None:
        self.num_ready -= count
        self._blocks[self._number] = self._blocks[self._number][count:]
        if not len(self._blocks[self._number]):
            self._number += 1


def _bytes_of(tensor_N: Tensor) -> memoryview:
    return tensor_N.view(torch.uint8).numpy().data


def connect_ring(
    store: SignedStore, secret: bytes, place: int, names: Sequence[str], address: str, settings: Settings
) -> Ring | None:
    """The ring of the members called `names`, of which this rank is number `place`. None for one that is alone.

    All members call it, each with its own `place`. They tell each other through the store, which must be theirs alone,
    where they listen. address: where the others reach this rank.
    """
    size = len(names)
    if size == 1:
        return None
    listener = AuthenticatedListener(address, secret)
    store.set(f"ring/{place}", listener.endpoint.to_json())
    last, following = (place - 1) % size, (place + 1) % size
    # Each waits to be let in by the next one while it lets in the one before.
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept_ranks, [last], settings.start_timeout_s)
        try:
            endpoint = Endpoint.from_json(store.get(f"ring/{following}"))
            to_next = connect(endpoint, secret, rank=place, to=names[following], timeout_s=settings.start_timeout_s)
        except BaseException:
            listener.close()
            raise
        try:
            from_last = accepting.result()[last]
        except BaseException:
            to_next.close()
            raise
    return Ring(place, names, to_next, from_last, settings.gloo_timeout_s)
