"""Allreduce in main memory over a ring: each rank sends to the next rank and receives from the previous one.

A tensor is cut into one block per rank. Every block goes round the ring once, while each rank adds its own part, and once more
as the result: each rank sends 2 (W - 1) / W times the tensor. A rank passes on what it has received immediately, without
waiting for the rest of the block, so that there is one stream of bytes in and one out.

Everything happens on the calling thread, and nothing is copied without need. gloo hands every piece to another thread, which
takes longer than sending it.
"""

import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megaclass.distributed.network.store import SignedStore
from megaclass.even_parts import even_part
from megaclass.hvd.engine.control_connection import AuthenticatedListener, Endpoint, connect
from megaclass.hvd.exceptions import HorovodInternalError
from megaclass.hvd.settings import Settings

# Bytes that are received before they are added, and bytes per call of send: more would not stay in the caches, less would cost
# more calls.
_SCRATCH_BYTES = 1024 * 1024
_SENT_BYTES = 512 * 1024


class Ring:
    """The connections of this rank to its two neighbours among the members of a process set."""

    def __init__(
        self, place: int, names: Sequence[str], to_next: socket.socket, from_previous: socket.socket, timeout_s: float
    ) -> None:
        """`names`: of the members, in their order, for errors. `timeout_s`: how long a neighbour may be silent."""
        self._place, self._names, self._timeout_s = place, names, timeout_s
        self._to_next, self._from_previous = to_next, from_previous
        for connection in (to_next, from_previous):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # One thread serves both directions, so that neither may block it.
            connection.setblocking(False)
        self._scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)

    def reduce(
        self, given_N: Tensor, out_N: Tensor, combine: Callable[..., Tensor], finish: Callable[[Tensor], object]
    ) -> None:
        """Combines the `given_N` of all members into `out_N`, which may be the same tensor. All members call it.

        combine: torch.add or a similar function. finish: is applied in place to every part of the result once, by one member,
        before the others receive it, so that the result has the same bits on all members.
        """
        try:
            self._reduce(given_N, out_N, combine, finish)
        except BaseException:
            # The neighbours learn from the closed connections that the rest will not come, and close theirs in turn.
            self.close()
            raise

    def _reduce(
        self, given_N: Tensor, out_N: Tensor, combine: Callable[..., Tensor], finish: Callable[[Tensor], object]
    ) -> None:
        size, item_bytes = len(self._names), given_N.element_size()
        # All members compute the same limits from the same length, so that no message carries them.
        starts = [even_part(given_N.numel(), place, size).start for place in range(size)] + [given_N.numel()]
        given, out = _bytes_of(given_N), _bytes_of(out_N)
        # Blocks in the order of their arrival; each is passed on, except the last one.
        # Step s brings the block that the previous rank sent in step s - 1; after W - 1 steps the same blocks come as results.
        arriving = [(self._place - 1 - step) % size for step in range(2 * (size - 1))]
        blocks = [slice(starts[place] * item_bytes, starts[place + 1] * item_bytes) for place in range(size)]
        # This rank starts the round of its own block, then sends the blocks on in the order in which they arrive.
        outgoing = _Outgoing([given[blocks[self._place]], *(out[blocks[place]] for place in arriving[:-1])])
        for step, place in enumerate(arriving):
            begin, end = starts[place], starts[place + 1]
            # The first W - 1 blocks are partial sums, to which this rank adds its part; the others are results.
            if step < size - 1:
                for part_N in self._parts(given_N.dtype, end - begin, outgoing):
                    place_N = slice(begin, begin + part_N.numel())
                    # Blocks are added up in the order of the ring, whatever the timing: runs do not differ.
                    combine(given_N[place_N], part_N, out=out_N[place_N])
                    # This rank is the last one to add to this block, so that it is complete.
                    if step == size - 2:
                        finish(out_N[place_N])
                    # From now on these bytes may be passed on.
                    outgoing.num_ready += part_N.numel() * item_bytes
                    begin = place_N.stop
            else:
                # A complete block needs no scratch memory: it is received where it belongs.
                block = out[blocks[place]]
                while len(block):
                    count = self._receive(block, outgoing)
                    outgoing.num_ready += count
                    block = block[count:]
        # The next rank may still wait for the last bytes after this one has all of its own.
        while not outgoing.is_done:
            if not self._send(outgoing):
                self._wait(sends=True, receives=False)

    def _parts(self, dtype: torch.dtype, count: int, outgoing: "_Outgoing") -> Iterator[Tensor]:
        """Yields the next `count` elements in pieces, as they arrive; a piece is valid until the next one."""
        scratch = _bytes_of(self._scratch)
        # _SCRATCH_BYTES is a multiple of every element size.
        typed = self._scratch.view(dtype)
        filled = 0
        while count:
            wanted = min(len(scratch), count * dtype.itemsize)
            filled += self._receive(scratch[filled:wanted], outgoing)
            # A piece may end within an element: its bytes wait for the rest at the start of the scratch memory.
            whole = filled // dtype.itemsize
            if whole:
                yield typed[:whole]
                count -= whole
                rest = filled - whole * dtype.itemsize
                scratch[:rest] = scratch[filled - rest : filled]
                filled = rest

    def _receive(self, into: memoryview, outgoing: "_Outgoing") -> int:
        """Receives at least one byte and returns the number of bytes; sends while it waits."""
        while True:
            # Sending comes first: if every rank only received, the ring would stand still.
            has_sent = self._send(outgoing)
            try:
                count = self._from_previous.recv_into(into)
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
        """Sends what is possible without waiting; returns whether anything was sent."""
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
        """Waits until the connections can send or receive."""
        events = select.poll()
        if sends:
            events.register(self._to_next, select.POLLOUT)
        if receives:
            events.register(self._from_previous, select.POLLIN)
        if not events.poll(self._timeout_s * 1000):
            neighbour = self._name(self._place - 1 if receives else self._place + 1)
            raise HorovodInternalError(
                f"{self._name(self._place)} waited {self._timeout_s:g} s for {neighbour}. If that is expected, raise "
                f"HOROVOD_GLOO_TIMEOUT_SECONDS"
            )

    def _gone(self, place: int) -> HorovodInternalError:
        return HorovodInternalError(f"{self._name(place)} has ended its connection to {self._name(self._place)}")

    def _name(self, place: int) -> str:
        return self._names[place % len(self._names)]

    def close(self) -> None:
        for connection in (self._to_next, self._from_previous):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class _Outgoing:
    """Bytes to send, in order; the first `num_ready` of them may be sent now."""

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
    """Connects the ring of the members called `names`, of which this rank is number `place`; None for a single member.

    All members call it, each with its own `place`. They exchange their endpoints through `store`, which only they use.
    address: the address at which the others reach this rank.
    """
    size = len(names)
    if size == 1:
        return None
    # Listening before the endpoint is published: a neighbour that reads it can connect at once.
    listener = AuthenticatedListener(address, secret)
    store.set(f"ring/{place}", listener.endpoint.to_json())
    previous, following = (place - 1) % size, (place + 1) % size
    # Each rank connects to the next one and, at the same time, accepts the connection of the previous one.
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept_ranks, [previous], settings.start_timeout_s)
        try:
            endpoint = Endpoint.from_json(store.get(f"ring/{following}"))
            to_next = connect(endpoint, secret, rank=place, to=names[following], timeout_s=settings.start_timeout_s)
        except BaseException:
            listener.close()
            raise
        try:
            from_previous = accepting.result()[previous]
        except BaseException:
            to_next.close()
            raise
    return Ring(place, names, to_next, from_previous, settings.gloo_timeout_s)
