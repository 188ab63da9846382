"""Runs the operations that the ranks have agreed on. Only the thread that drives the controller calls it.

Tensors in main memory are reduced over a ring of direct connections or by gloo (HOROVOD_CPU_OPERATIONS), tensors on GPUs by
NCCL. gloo and NCCL do not support int16, which therefore travels as int32. Operations without arithmetic go through
torch.distributed as bytes, so that they support every dtype.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import all_gather_single
from megaclass.distributed.wire_formats import WIRE_FORMATS, compressed_all_reduce_
from megaclass.even_parts import even_sizes
from megaclass.hvd.collectives.ops import Adasum, Average, Max, Min, Product, Sum
from megaclass.hvd.engine.messages import Request, Response
from megaclass.hvd.engine.operation import Operation
from megaclass.hvd.engine.timeline import Timeline
from megaclass.hvd.transport import small
from megaclass.hvd.transport.adasum import adasum_
from megaclass.hvd.transport.arithmetic import COMBINE, DTYPE_BY_NAME, HALF_PRECISION, finish_, scale_
from megaclass.hvd.transport.fusion_buffers import FusionBuffers
from megaclass.hvd.transport.process_set_table import ProcessSetTable
from megaclass.hvd.transport.ring import Ring

_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}

_MOVES = ("allgather", "broadcast", "alltoall", "reducescatter")


class Executor:
    """Implements OperationRunner: one method per kind of operation."""

    def __init__(self, rank: int, timeline: Timeline, sets: ProcessSetTable, *, uses_nccl: bool) -> None:
        self._rank = rank
        self._timeline = timeline
        self._uses_nccl = uses_nccl
        self._sets = sets
        self._buffers = FusionBuffers()
        # Rounding errors of compressed allreduces, by process set, name of the operation and number of the tensor.
        self._remainders: dict[tuple[int, str, int], Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # The GPU of the latest operation.
        self._gpu: torch.device | None = None
        self._runners: dict[str, Callable[[Response, list[Operation | None]], None]] = {
            "allreduce": self._allreduce,
            "allgather": self._allgather,
            "broadcast": self._broadcast,
            "alltoall": self._alltoall,
            "reducescatter": self._reducescatter,
            "barrier": lambda response, operations: None,
            "add_process_set": self._change_sets,
            "remove_process_set": self._change_sets,
        }

    def perform(self, response: Response, operations: list[Operation | None]) -> None:
        """Runs an agreed operation; an entry is None where this rank has joined and contributes zeros."""
        first = response.requests[0]
        run = self._runners[first.kind]
        # An allreduce shows its transport itself: copies into and out of the fusion buffer come before and after it.
        shown = [first.full_name] if first.kind in _MOVES else []
        with self._timeline.phase(shown, f"{self._transport(first)}_{first.kind.upper()}"):
            if first.device == "cpu":
                run(response, operations)
            else:
                self._on_gpu(lambda: run(response, operations), operations)

    def _on_gpu(self, run: Callable[[], None], operations: list[Operation | None]) -> None:
        """Runs on the executor's own stream, after the streams that wrote the inputs.

        synchronize() makes the caller's stream wait for this one, through `operation.ready`.
        """
        present = [operation for operation in operations if operation is not None]
        if present:
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

    # -- small tensors, which travel with the negotiation -----------------------------------------------------------

    def small_payload(self, operations: list[Operation]) -> bytes:
        return small.small_payload(operations, len(self._sets.ranks[0]))

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        return small.add_payloads(request, payloads)

    def deliver_payload(self, operations: list[Operation | None], payload: bytes) -> None:
        small.deliver_payload(operations, payload, self._buffers)

    # -- reductions -----------------------------------------------------------------------------------------------

    def _allreduce(self, response: Response, operations: list[Operation | None]) -> None:
        first = response.requests[0]
        device = _device_of(operations, first)
        shown = [request.full_name for request in response.requests] if self._timeline.is_active else []
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for request, operation in zip(response.requests, operations, strict=True):
            # A rank that has joined contributes zeros, and its results are not read.
            if operation is not None:
                inputs += operation.inputs
                outputs += operation.outputs
            else:
                zeros = [
                    torch.zeros(shape, dtype=DTYPE_BY_NAME[dtype], device=device)
                    for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
                ]
                inputs += zeros
                outputs += zeros
        names = [
            (request.process_set, request.name, number)
            for request in (response.requests if first.wire else ())
            for number in range(len(request.shapes))
        ]
        if first.op == Adasum:
            with self._timeline.phase(shown, f"{self._transport(first)}_ALLREDUCE"):
                for given, out in zip(inputs, outputs, strict=True):
                    self._adasum(given, out, first)
        elif len(inputs) == 1 and not first.wire:
            with self._timeline.phase(shown, f"{self._transport(first, inputs[0].nbytes)}_ALLREDUCE"):
                self._reduce(inputs[0], outputs[0], first)
        else:
            # The tensors of a grouped operation may have several dtypes: one buffer per dtype, in the order of their firsts.
            for kind in dict.fromkeys(tensor.dtype for tensor in inputs):
                chosen = [i for i, tensor in enumerate(inputs) if tensor.dtype is kind]
                self._reduce_together(
                    [inputs[i] for i in chosen],
                    [outputs[i] for i in chosen],
                    [names[i] for i in chosen] if names else [],
                    first,
                    shown,
                )

    def _reduce(self, given: Tensor, out: Tensor, request: Request) -> None:
        """Writes the scaled and combined `given` of all members into `out`, which may be the same tensor."""
        if not self._is_direct(given):
            staged = given.cpu()
            self._reduce(staged, staged, request)
            out.copy_(staged)
            return
        ring = self._ring(request, given.nbytes)
        # The ring reads and writes different tensors without a copy; all other ways reduce in place.
        if out is not given and (ring is None or request.prescale != 1.0):
            out.copy_(given)
            given = out
        scale_(given, request.prescale)
        if ring is not None:
            ring.reduce(given.view(-1), out.view(-1), COMBINE[request.op], partial(self._finish_, request=request))
            return
        if out.numel() and len(self._sets.connections[request.process_set].ranks) > 1:
            wide = out.int() if out.dtype is torch.int16 else out
            dist.all_reduce(wide, op=_OPS[request.op], group=self._group(request))
            if wide is not out:
                out.copy_(wide)
        self._finish_(out, request)

    def _reduce_together(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        names: list[tuple[int, str, int]],
        request: Request,
        shown: list[str],
    ) -> None:
        """Reduces tensors of one dtype through one buffer, so that all of them pay one latency.

        A single tensor needs a buffer only if it is sent in another dtype.
        """
        is_compressed = bool(request.wire) and inputs[0].is_floating_point()
        dtype = torch.float32 if is_compressed else inputs[0].dtype
        is_alone = len(inputs) == 1 and dtype is inputs[0].dtype
        with self._timeline.phase(shown, "MEMCPY_IN_FUSION_BUFFER"):
            if is_alone:
                buffer = outputs[0].view(-1)
                if outputs[0] is not inputs[0]:
                    outputs[0].copy_(inputs[0])
            else:
                buffer, places = self._buffers.for_fusion(inputs, dtype)
                torch._foreach_copy_(places, inputs)
        with self._timeline.phase(
            shown, f"{self._transport(request, 0 if is_compressed else buffer.nbytes)}_ALLREDUCE"
        ):
            if is_compressed:
                self._reduce_compressed_(buffer, request, names, [tensor.numel() for tensor in inputs])
            else:
                self._reduce(buffer, buffer, request)
        if is_alone:
            return
        with self._timeline.phase(shown, "MEMCPY_OUT_FUSION_BUFFER"):
            torch._foreach_copy_(outputs, places)

    def _reduce_compressed_(
        self, buffer: Tensor, request: Request, names: list[tuple[int, str, int]], counts: list[int]
    ) -> None:
        groups = self._sets.connections[request.process_set]
        scale_(buffer, request.prescale)
        kept: list[Tensor] = []
        remainder = None
        if request.keeps_error:
            kept = [self._remainder(name, count, buffer.device) for name, count in zip(names, counts, strict=True)]
            remainder = kept[0]
        if len(kept) > 1:
            # One vector of all remainders, which the reduction reads and overwrites, like the buffer.
            flat = self._buffers.flat(sum(counts), torch.float32, buffer.device, "remainders")
            remainder = torch.cat(kept, out=flat)
        divisor = float(len(groups.ranks)) if request.op == Average else 1.0
        group = self._group(request)
        compressed_all_reduce_(buffer, WIRE_FORMATS[request.wire], group, divisor=divisor, remainder_N=remainder)
        if remainder is not None and len(kept) > 1:
            for old, new in zip(kept, remainder.split(counts), strict=True):
                old.copy_(new)
        scale_(buffer, request.postscale)

    def _remainder(self, name: tuple[int, str, int], count: int, device: torch.device) -> Tensor:
        remainder = self._remainders.get(name)
        if remainder is None or remainder.numel() != count:
            remainder = self._remainders[name] = torch.zeros(count, device=device)
        return remainder

    def _finish_(self, tensor: Tensor, request: Request) -> None:
        finish_(tensor, request.op, request.postscale, len(self._sets.connections[request.process_set].ranks))

    def _adasum(self, given: Tensor, out: Tensor, request: Request) -> None:
        if out is not given:
            out.copy_(given)
        scale_(out, request.prescale)
        if out.numel():
            self._staged(out, lambda t: adasum_(t, self._group(request)))
        scale_(out, request.postscale)

    def _reducescatter(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        ranks = self._sets.connections[request.process_set].ranks
        place = ranks.index(self._rank)
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

    # -- operations without arithmetic -----------------------------------------------------------------------------------

    def _allgather(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        place = self._sets.connections[request.process_set].ranks.index(self._rank)
        for given, rows in zip(operation.inputs, response.sizes, strict=True):
            out = given.new_empty((sum(rows), *given.shape[1:]))
            operation.outputs.append(out)
            if not out.numel():
                continue
            if len(set(rows)) == 1:
                group = self._group(request)
                self._staged(out, partial(_gather_even, given=given, group=group))
                continue
            parts = out.split(list(rows))
            parts[place].copy_(given)
            # gloo rejects blocks of different length. All ranks broadcast their block at the same time instead of padding.
            self._staged(out, partial(_broadcast_blocks, rows=rows, group=self._group(request)))
        _deliver(operation, request)
        operation.sizes = response.sizes

    def _broadcast(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        out, given = operation.outputs[0], operation.inputs[0]
        root = self._sets.connections[request.process_set].ranks.index(request.root)
        if self._rank == request.root and out is not given:
            out.copy_(given)
        if out.numel():
            self._staged(out, lambda t: dist.broadcast(_bytes(t), group=self._group(request), group_src=root))

    def _alltoall(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        given = operation.inputs[0]
        place = self._sets.connections[request.process_set].ranks.index(self._rank)
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
        group = self._group(request)
        source = given if self._is_direct(given) else given.cpu()
        target = out if self._is_direct(out) else torch.empty_like(out, device="cpu")
        dist.all_to_all_single(
            _bytes(target),
            _bytes(source[: sum(sent)]),
            [rows * row_bytes for rows in received],
            [rows * row_bytes for rows in sent],
            group=group,
        )
        if target is not out:
            out.copy_(target)

    def _change_sets(self, response: Response, operations: list[Operation | None]) -> None:
        operation = operations[0]
        number = self._sets.change(response.requests[0])
        if operation is not None:
            operation.result = number

    # -- groups and buffers ----------------------------------------------------------------------------------------------

    def _group(self, request: Request) -> dist.ProcessGroup:
        groups = self._sets.connections[request.process_set]
        if request.device == "cpu" or not self._uses_nccl:
            return groups.cpu
        assert groups.gpu is not None
        return groups.gpu

    def _ring(self, request: Request, num_bytes: int) -> Ring | None:
        """Returns the ring if it reduces a tensor of this size. The answer is the same on all ranks, as the sizes are."""
        connections = self._sets.connections[request.process_set]
        is_in_main_memory = request.device == "cpu" or not self._uses_nccl
        return connections.ring if is_in_main_memory and num_bytes <= connections.ring_max_bytes else None

    def _transport(self, request: Request, ring_bytes: int = 0) -> str:
        """Returns the name of what carries the tensors, for the timeline.

        ring_bytes: size of the buffer that the ring could reduce; 0 for operations that never use it.
        """
        if request.device != "cpu" and self._uses_nccl:
            return "NCCL"
        return "RING" if ring_bytes and self._ring(request, ring_bytes) is not None else "GLOO"

    def _is_direct(self, tensor: Tensor) -> bool:
        return self._uses_nccl or tensor.device.type == "cpu"

    def _staged(self, tensor: Tensor, run: Callable[[Tensor], object]) -> None:
        """Runs on a copy in main memory where NCCL cannot be used, because not every rank has its own GPU."""
        if self._is_direct(tensor):
            run(tensor)
            return
        copy = tensor.cpu()
        run(copy)
        tensor.copy_(copy)


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
    count = 1
    for length in tensor.shape[1:]:
        count *= length
    return count * tensor.element_size()


def _device_of(operations: list[Operation | None], request: Request) -> torch.device:
    for operation in operations:
        if operation is not None:
            device: torch.device = operation.inputs[0].device
            return device
    return torch.device(request.device)
