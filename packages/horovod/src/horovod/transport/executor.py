"""Runs the operations that the ranks have agreed on. Only the engine thread calls it.

The executor has one method per kind of operation, of the name of the kind. Allgather, broadcast and alltoall move bytes, so
they support every dtype; allreduce and reducescatter do arithmetic. Tensors in main memory are sent by gloo, tensors on GPUs by
NCCL if every rank has a GPU of its own. All ranks choose alike, because they choose by the request, which they have agreed on.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from horovod.engine.kinds import Adasum, Average, Max, Min, Product, Sum
from horovod.engine.messages import Request, Response
from horovod.engine.operation import Operation
from horovod.engine.timeline import Timeline
from horovod.transport import arithmetic
from horovod.transport.adasum import adasum_
from horovod.transport.arithmetic import DTYPE_BY_NAME, HALF_PRECISION, finish_, scale_, views_like
from horovod.transport.process_set_table import ProcessSetTable
from megaclass_launch.even_parts import even_sizes
from megaclass_launch.ranks.collectives import all_gather_single
from megaclass_launch.ranks.wire_formats import WIRE_FORMATS, compressed_all_reduce_

_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class Executor:
    """Runs operations for the controller. An operation is None if this rank has joined and contributes zeros."""

    small_payload = staticmethod(arithmetic.small_payload)
    add_payloads = staticmethod(arithmetic.add_payloads)
    deliver_payload = staticmethod(arithmetic.deliver_payload)

    def __init__(self, timeline: Timeline, sets: ProcessSetTable) -> None:
        self._timeline = timeline
        self._sets = sets
        # Memory that is used again, by dtype, device and use.
        self._buffers: dict[tuple[torch.dtype, torch.device, str], Tensor] = {}
        # Rounding errors of compressed allreduces, by process set, name of the operation and number of the tensor.
        self._remainders: dict[tuple[int, str, int], Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # The GPU of the latest operation.
        self._gpu: torch.device | None = None

    def perform(self, response: Response, operations: list[Operation | None]) -> None:
        """Runs an agreed operation."""
        first = response.requests[0]
        run = partial(getattr(self, first.kind), response, operations)
        # If there are tensors, the trace shows what carries them. An allreduce shows it itself: copies into and out of the
        # fusion buffer come before and after it.
        shown = [first.full_name] if first.shapes and first.kind != "allreduce" else []
        with self._timeline.phase(shown, f"{self._sets.transport(first)}_{first.kind.upper()}"):
            if first.device == "cpu":
                run()
            else:
                self._on_gpu(run, operations)

    def _on_gpu(self, run: Callable[[], None], operations: list[Operation | None]) -> None:
        """Runs on the executor's own stream, after the streams that wrote the inputs.

        synchronize() makes the caller's stream wait for this one, through `operation.ready`.
        """
        present = [operation for operation in operations if operation is not None]
        if present:
            # A script chooses its GPU after init(), so it is learned from the tensors.
            self._gpu = present[0].inputs[0].device
        # A rank that has joined sends its zeros from the GPU it used last.
        device = self._gpu or torch.device("cuda", torch.cuda.current_device())
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for operation in present:
                assert operation.ready is not None
                stream.wait_event(operation.ready)
            run()
            done = torch.cuda.Event()
            done.record(stream)
        for operation in present:
            operation.ready = done
            # The allocator must not reuse their memory before this stream has finished with it.
            for tensor in (*operation.inputs, *operation.outputs):
                tensor.record_stream(stream)

    # -- kinds that move bytes: their results are new tensors, except for a broadcast, whose output exists already --------

    def allgather(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        place = self._sets.place(request)
        for given, rows in zip(operation.inputs, response.sizes, strict=True):
            out = given.new_empty((sum(rows), *given.shape[1:]))
            operation.outputs.append(out)
            if not out.numel():
                continue
            if len(set(rows)) == 1:
                group = self._sets.group(request)
                self._sets.staged(out, partial(_gather_even, given=given, group=group))
                continue
            # Views into the result: the blocks of the other ranks arrive in their final places.
            parts = out.split(list(rows))
            parts[place].copy_(given)
            # gloo rejects blocks of different length. All ranks broadcast their block at the same time instead of padding.
            self._sets.staged(out, partial(_broadcast_blocks, rows=rows, group=self._sets.group(request)))
        _deliver(operation, request)
        operation.sizes = response.sizes

    def broadcast(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        out, given = operation.outputs[0], operation.inputs[0]
        root = self._sets.members(request).index(request.root)
        if self._sets.rank == request.root and out is not given:
            out.copy_(given)
        if out.numel():
            self._sets.staged(out, lambda t: dist.broadcast(_bytes(t), group=self._sets.group(request), group_src=root))

    def alltoall(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        given = operation.inputs[0]
        place = self._sets.place(request)
        received = [splits[place] for splits in response.sizes]
        out = given.new_empty((sum(received), *given.shape[1:]))
        self._exchange(out, given, received, list(response.sizes[place]), request)
        operation.outputs.append(out)
        operation.result = (out, torch.tensor(received, dtype=torch.int32, device="cpu"))

    def _exchange(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], request: Request
    ) -> None:
        """Exchanges rows between all members; `out` receives them, in any outer shape."""
        row_bytes = _row_bytes(given)
        group = self._sets.group(request)
        source = given if self._sets.is_direct(given) else given.cpu()
        target = out if self._sets.is_direct(out) else torch.empty_like(out, device="cpu")
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

    def barrier(self, response: Response, operations: list[Operation | None]) -> None:
        """Does nothing: that all ranks have agreed on it is enough."""

    def add_process_set(self, response: Response, operations: list[Operation | None]) -> None:
        number = self._sets.change(response.requests[0])
        if operations[0] is not None:
            operations[0].result = number

    remove_process_set = add_process_set

    # -- kinds with arithmetic --------------------------------------------------------------------------------------

    def allreduce(self, response: Response, operations: list[Operation | None]) -> None:
        first = response.requests[0]
        shown = [request.full_name for request in response.requests] if self._timeline.is_active else []
        present = [operation for operation in operations if operation is not None]
        if len(present) < len(operations):
            device = present[0].inputs[0].device if present else torch.device(first.device)
            pairs = zip(response.requests, operations, strict=True)
            present = [operation or _zeros(request, device) for request, operation in pairs]
        inputs = [tensor for operation in present for tensor in operation.inputs]
        outputs = [tensor for operation in present for tensor in operation.outputs]
        names = [
            (request.process_set, request.name, number)
            for request in (response.requests if first.wire else ())
            for number in range(len(request.shapes))
        ]
        # The tensors of a grouped operation may have several dtypes: they are reduced together by dtype, in the order of their
        # firsts. Adasum combines each tensor by itself.
        alike: dict[object, list[int]] = {}
        for i, tensor in enumerate(inputs):
            alike.setdefault(i if first.op == Adasum else tensor.dtype, []).append(i)
        for chosen in alike.values():
            ours, out = [inputs[i] for i in chosen], [outputs[i] for i in chosen]
            if len(chosen) > 1 or (first.wire and ours[0].is_floating_point()):
                self._reduce_together(ours, out, [names[i] for i in chosen] if names else [], first, shown)
                continue
            with self._timeline.phase(shown, f"{self._sets.transport(first)}_ALLREDUCE"):
                if out[0] is not ours[0]:
                    out[0].copy_(ours[0])
                self._sets.staged(out[0], partial(self._reduce_, request=first))

    def _reduce_(self, tensor: Tensor, request: Request) -> None:
        """Overwrites the tensor with the scaled and combined tensors of all members."""
        scale_(tensor, request.prescale)
        num_members = len(self._sets.members(request))
        if tensor.numel() and num_members > 1:
            group = self._sets.group(request)
            # gloo and NCCL do not support int16. The sum is rounded back by wrap-around, as an int16 sum would.
            wide = tensor.int() if tensor.dtype is torch.int16 else tensor
            if request.op == Adasum:
                adasum_(wide, group)
            else:
                dist.all_reduce(wide, op=_OPS[request.op], group=group)
            if wide is not tensor:
                tensor.copy_(wide)
        finish_(tensor, request.op, request.postscale, num_members)

    def _reduce_together(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        names: list[tuple[int, str, int]],
        request: Request,
        shown: list[str],
    ) -> None:
        """Reduces tensors of one dtype through one buffer, so all of them pay one latency."""
        is_compressed = bool(request.wire) and inputs[0].is_floating_point()
        dtype = torch.float32 if is_compressed else inputs[0].dtype
        counts = [tensor.numel() for tensor in inputs]
        buffer = self._buffer(sum(counts), dtype, inputs[0].device, "fusion")
        places = views_like(buffer, inputs)
        with self._timeline.phase(shown, "MEMCPY_IN_FUSION_BUFFER"):
            torch._foreach_copy_(places, inputs)
        with self._timeline.phase(shown, f"{self._sets.transport(request)}_ALLREDUCE"):
            if is_compressed:
                self._reduce_compressed_(buffer, request, names, counts)
            else:
                self._sets.staged(buffer, partial(self._reduce_, request=request))
        with self._timeline.phase(shown, "MEMCPY_OUT_FUSION_BUFFER"):
            torch._foreach_copy_(outputs, places)

    def _reduce_compressed_(
        self, buffer: Tensor, request: Request, names: list[tuple[int, str, int]], counts: list[int]
    ) -> None:
        scale_(buffer, request.prescale)
        kept: list[Tensor] = []
        remainder = None
        if request.keeps_error:
            kept = [self._remainder(name, count, buffer.device) for name, count in zip(names, counts, strict=True)]
            remainder = kept[0]
        if len(kept) > 1:
            # One vector of all remainders, which the reduction reads and overwrites, like the buffer.
            flat = self._buffer(sum(counts), torch.float32, buffer.device, "remainders")
            remainder = torch.cat(kept, out=flat)
        divisor = float(len(self._sets.members(request))) if request.op == Average else 1.0
        group = self._sets.group(request)
        compressed_all_reduce_(buffer, WIRE_FORMATS[request.wire], group, divisor=divisor, remainder_N=remainder)
        if remainder is not None and len(kept) > 1:
            for old, new in zip(kept, remainder.split(counts), strict=True):
                old.copy_(new)
        scale_(buffer, request.postscale)

    def _remainder(self, name: tuple[int, str, int], count: int, device: torch.device) -> Tensor:
        # Kept per name: the rounding error of a gradient is added to the same gradient of the next step.
        remainder = self._remainders.get(name)
        if remainder is None or remainder.numel() != count:
            remainder = self._remainders[name] = torch.zeros(count, device=device)
        return remainder

    def reducescatter(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        ranks, place = self._sets.members(request), self._sets.place(request)
        for given in operation.inputs:
            # Every rank receives all versions of its own rows and adds them up itself: gloo has no reduce-scatter for every
            # dtype, and the sum of half-precision numbers is formed in float32.
            rows = even_sizes(given.shape[0], len(ranks))
            block = given.new_empty((len(ranks), rows[place], *given.shape[1:]))
            scaled = scale_(given.clone(), request.prescale) if request.prescale != 1.0 else given
            self._exchange(block, scaled, [rows[place]] * len(ranks), rows, request)
            half = given.dtype in HALF_PRECISION
            out = block.sum(0, dtype=torch.float32 if half else given.dtype)
            out = finish_(out, request.op, request.postscale, len(ranks))
            operation.outputs.append(out.to(given.dtype))
        _deliver(operation, request)

    def _buffer(self, count: int, dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
        """Returns `count` elements, which the next call for the same dtype, device and use may overwrite."""
        buffer = self._buffers.get((dtype, device, use))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[dtype, device, use] = torch.empty(count, dtype=dtype, device=device)
        return buffer[:count]


def _zeros(request: Request, device: torch.device) -> Operation:
    """Returns the part of a rank that has joined: it contributes zeros, and its results are not read."""
    pairs = zip(request.dtypes, request.shapes, strict=True)
    tensors = [torch.zeros(shape, dtype=DTYPE_BY_NAME[dtype], device=device) for dtype, shape in pairs]
    return Operation(request, tensors, tensors)


def _deliver(operation: Operation, request: Request) -> None:
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
    return math.prod(tensor.shape[1:]) * tensor.element_size()
