"""Operations without arithmetic: allgather, broadcast and alltoall. They move bytes, so that they support every dtype."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from horovod.engine.messages import Request, Response
from horovod.engine.operation import Operation
from horovod.transport.groups import Groups
from megaclass_launch.ranks.collectives import all_gather_single


class Exchanges:
    """Writes results into new tensors of the operation, except for a broadcast, whose output exists already."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def allgather(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        place = self._groups.place(request)
        for given, rows in zip(operation.inputs, response.sizes, strict=True):
            out = given.new_empty((sum(rows), *given.shape[1:]))
            operation.outputs.append(out)
            if not out.numel():
                continue
            if len(set(rows)) == 1:
                group = self._groups.group(request)
                self._groups.staged(out, partial(_gather_even, given=given, group=group))
                continue
            # Views into the result: the blocks of the other ranks arrive in their final places.
            parts = out.split(list(rows))
            parts[place].copy_(given)
            # gloo rejects blocks of different length. All ranks broadcast their block at the same time instead of padding.
            self._groups.staged(out, partial(_broadcast_blocks, rows=rows, group=self._groups.group(request)))
        deliver(operation, request)
        operation.sizes = response.sizes

    def broadcast(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        out, given = operation.outputs[0], operation.inputs[0]
        root = self._groups.ranks(request).index(request.root)
        if self._groups.rank == request.root and out is not given:
            out.copy_(given)
        if out.numel():
            self._groups.staged(
                out, lambda t: dist.broadcast(_bytes(t), group=self._groups.group(request), group_src=root)
            )

    def alltoall(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        given = operation.inputs[0]
        place = self._groups.place(request)
        received = [splits[place] for splits in response.sizes]
        out = given.new_empty((sum(received), *given.shape[1:]))
        self.exchange(out, given, received, list(response.sizes[place]), request)
        operation.outputs.append(out)
        operation.result = (out, torch.tensor(received, dtype=torch.int32, device="cpu"))

    def exchange(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], request: Request
    ) -> None:
        """Exchanges rows between all members; `out` receives them, in any outer shape."""
        row_bytes = _row_bytes(given)
        group = self._groups.group(request)
        source = given if self._groups.is_direct(given) else given.cpu()
        target = out if self._groups.is_direct(out) else torch.empty_like(out, device="cpu")
        # In bytes, with the splits scaled to match: gloo has no all-to-all for every dtype.
        dist.all_to_all_single(
            _bytes(target),
            _bytes(source[: sum(sent)]),
            [rows * row_bytes for rows in received],
            [rows * row_bytes for rows in sent],
            group=group,
        )
        if target is not out:
            out.copy_(target)


def deliver(operation: Operation, request: Request) -> None:
    operation.result = tuple(operation.outputs) if request.is_grouped else operation.outputs[0]


def _gather_even(out: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
    source = given if given.device == out.device else given.to(out.device)
    all_gather_single(_bytes(out), _bytes(source), group=group)


def _broadcast_blocks(out: Tensor, rows: tuple[int, ...], group: dist.ProcessGroup) -> None:
    works = [
        dist.broadcast(_bytes(part), group=group, group_src=place, async_op=True)
        for place, part in enumerate(out.split(list(rows)))
        if part.numel()
    ]
    for work in works:
        assert work is not None
        work.wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    count = 1
    for length in tensor.shape[1:]:
        count *= length
    return count * tensor.element_size()
