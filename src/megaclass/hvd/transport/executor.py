"""Runs the operations that the ranks have agreed on. Only the thread that drives the controller calls it.

Tensors in main memory are reduced over a ring of direct connections or by gloo (HOROVOD_CPU_OPERATIONS), tensors on GPUs by
NCCL. gloo and NCCL do not support int16, which therefore travels as int32. Operations without arithmetic go through
torch.distributed as bytes, so that they support every dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import all_gather_single
from megaclass.distributed.wire_formats import WIRE_FORMATS, compressed_all_reduce_
from megaclass.hvd.collectives.ops import Adasum, Average, Max, Min, Product, Sum
from megaclass.hvd.engine.controller import Operation
from megaclass.hvd.engine.messages import Request, Response
from megaclass.hvd.engine.timeline import Timeline
from megaclass.hvd.transport.adasum import adasum_
from megaclass.hvd.transport.ring import Ring

_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}

DTYPES = {
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_MOVES = ("allgather", "broadcast", "alltoall", "reducescatter")
# Most bytes that rank 0 takes from all others together in one cycle of small tensors.
_SMALL_BYTES = 256 * 1024
_COMBINATIONS: dict[int, Callable[..., Tensor]] = {
    Average: torch.add,
    Sum: torch.add,
    Min: torch.minimum,
    Max: torch.maximum,
    Product: torch.mul,
}

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class SetGroups:
    """The connections of one process set."""

    ranks: tuple[int, ...]
    cpu: dist.ProcessGroup
    gpu: dist.ProcessGroup | None
    """NCCL's, where every rank has a GPU of its own."""
    ring: Ring | None
    """For reductions in main memory; None with HOROVOD_CPU_OPERATIONS=gloo, or where this rank is the only member."""

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
        for group in (self.cpu, self.gpu):
            if group is not None:
                group.shutdown()


class DataPlane:
    """Runs responses."""

    def __init__(self, rank: int, timeline: Timeline, *, uses_nccl: bool) -> None:
        self._rank = rank
        self._timeline = timeline
        self._uses_nccl = uses_nccl
        self.sets: dict[int, SetGroups] = {}
        self.change_sets: Callable[[Request], int] = lambda request: -1
        """Adds or removes a process set, by request of all ranks."""
        self._buffers: dict[tuple[torch.dtype, torch.device, str], Tensor] = {}
        self._remainders: dict[tuple[int, str, int], Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
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
        """An operation is None where this rank has joined: it contributes zeros."""
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
        """On a stream of our own, after the streams that made the inputs; who waits makes their stream wait for ours."""
        present = [operation for operation in operations if operation is not None]
        if present:
            self._gpu = present[0].inputs[0].device
        # A rank that has joined sends its zeros from the GPU it used before.
        device = self._gpu or torch.device("cuda", torch.cuda.current_device())
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for operation in present:
                stream.wait_event(operation.ready)
            run()
            done = torch.cuda.Event()
            done.record(stream)
        for operation in present:
            operation.ready = done
            for tensor in (*operation.inputs, *operation.outputs):
                tensor.record_stream(stream)

    # -- small tensors, which travel with the negotiation -----------------------------------------------------------

    def small_payload(self, operations: list[Operation]) -> bytes:
        """The tensors of a cycle that is one plain allreduce of a few kilobytes."""
        first = operations[0].request
        if first.kind != "allreduce" or first.process_set or first.wire or first.op == Adasum or first.device != "cpu":
            return b""
        largest = _SMALL_BYTES // max(1, len(self.sets[0].ranks) - 1)
        if sum([operation.request.terms.num_bytes for operation in operations]) > largest:
            return b""
        tensors = [tensor for operation in operations for tensor in operation.inputs]
        dtype = tensors[0].dtype
        if len(operations) > 1 and any(not _is_alike(first, operation.request) for operation in operations[1:]):
            return b""
        if len(tensors) > 1 and any(tensor.dtype is not dtype for tensor in tensors):
            return b""
        flat = tensors[0].reshape(-1) if len(tensors) == 1 else _flatten(tensors)
        if first.prescale != 1.0:
            flat = scale_(flat.clone(), first.prescale)
        return flat.view(torch.uint8).numpy().tobytes()

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        """In the order of ranks, half precision in float32."""
        dtype = _BY_NAME[request.dtypes[0]]
        parts = [torch.frombuffer(bytearray(payload), dtype=dtype) for payload in payloads]
        total = parts[0].float() if dtype in (torch.float16, torch.bfloat16) else parts[0]
        for part in parts[1:]:
            _COMBINATIONS[request.op](total, part.to(total.dtype), out=total)
        total = total.to(dtype)
        self._scale_back_(total, request)
        return total.view(torch.uint8).numpy().tobytes()

    def deliver_payload(self, operations: list[Operation | None], payload: bytes) -> None:
        outputs = [out for operation in operations if operation is not None for out in operation.outputs]
        flat = torch.frombuffer(bytearray(payload), dtype=outputs[0].dtype)
        if len(outputs) == 1:
            outputs[0].copy_(flat.view(outputs[0].shape))
        else:
            torch._foreach_copy_(outputs, _parts_like(flat, outputs))

    # -- reductions -----------------------------------------------------------------------------------------------

    def _allreduce(self, response: Response, operations: list[Operation | None]) -> None:
        first = response.requests[0]
        device = _device_of(operations, first)
        shown = [request.full_name for request in response.requests] if self._timeline.is_active else []
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for request, operation in zip(response.requests, operations, strict=True):
            if operation is not None:
                inputs += operation.inputs
                outputs += operation.outputs
            else:
                zeros = [
                    torch.zeros(shape, dtype=_BY_NAME[dtype], device=device)
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
            with self._timeline.phase(shown, f"{self._transport(first)}_ALLREDUCE"):
                self._reduce(inputs[0], outputs[0], first)
        else:
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
        """All members' `given`, scaled and combined, into `out`, which may be the same tensor."""
        if not self._is_direct(given):
            staged = given.cpu()
            self._reduce(staged, staged, request)
            out.copy_(staged)
            return
        ring = self._ring(request)
        if out is not given and (ring is None or request.prescale != 1.0):
            out.copy_(given)
            given = out
        scale_(given, request.prescale)
        if ring is not None:
            scale_back_ = partial(self._scale_back_, request=request)
            ring.reduce(given.view(-1), out.view(-1), _COMBINATIONS[request.op], scale_back_)
            return
        if out.numel() and len(self.sets[request.process_set].ranks) > 1:
            wide = out.int() if out.dtype is torch.int16 else out
            dist.all_reduce(wide, op=_OPS[request.op], group=self._group(request))
            if wide is not out:
                out.copy_(wide)
        self._scale_back_(out, request)

    def _reduce_together(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        names: list[tuple[int, str, int]],
        request: Request,
        shown: list[str],
    ) -> None:
        """Through one buffer: one latency for all of them. One by itself needs none, but for another dtype to be sent in."""
        counts = [tensor.numel() for tensor in inputs]
        is_compressed = bool(request.wire) and inputs[0].is_floating_point()
        dtype = torch.float32 if is_compressed else inputs[0].dtype
        is_alone = len(inputs) == 1 and dtype is inputs[0].dtype
        with self._timeline.phase(shown, "MEMCPY_IN_FUSION_BUFFER"):
            if is_alone:
                buffer = outputs[0].view(-1)
                if outputs[0] is not inputs[0]:
                    outputs[0].copy_(inputs[0])
            else:
                buffer = self._buffer(sum(counts), dtype, inputs[0].device)
                parts = _parts_like(buffer, inputs)
                torch._foreach_copy_(parts, inputs)
        with self._timeline.phase(shown, f"{self._transport(request, is_compressed=is_compressed)}_ALLREDUCE"):
            if is_compressed:
                self._reduce_compressed_(buffer, request, names, counts)
            else:
                self._reduce(buffer, buffer, request)
        if is_alone:
            return
        with self._timeline.phase(shown, "MEMCPY_OUT_FUSION_BUFFER"):
            torch._foreach_copy_(outputs, parts)

    def _reduce_compressed_(
        self, buffer: Tensor, request: Request, names: list[tuple[int, str, int]], counts: list[int]
    ) -> None:
        groups = self.sets[request.process_set]
        scale_(buffer, request.prescale)
        kept: list[Tensor] = []
        remainder = None
        if request.keeps_error:
            kept = [self._remainder(name, count, buffer.device) for name, count in zip(names, counts, strict=True)]
            remainder = kept[0]
        if len(kept) > 1:
            remainder = torch.cat(kept, out=self._buffer(sum(counts), torch.float32, buffer.device, "remainders"))
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

    def _scale_back_(self, tensor: Tensor, request: Request) -> None:
        scale_(tensor, request.postscale)
        if request.op == Average:
            divide_(tensor, len(self.sets[request.process_set].ranks))

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
        ranks = self.sets[request.process_set].ranks
        place = ranks.index(self._rank)
        for given in operation.inputs:
            rows = rows_of_members(given.shape[0], len(ranks))
            block = given.new_empty((len(ranks), rows[place], *given.shape[1:]))
            scaled = scale_(given.clone(), request.prescale) if request.prescale != 1.0 else given
            self._exchange(block, scaled, [rows[place]] * len(ranks), rows, request)
            half = given.dtype in (torch.float16, torch.bfloat16)
            out = block.sum(0, dtype=torch.float32 if half else given.dtype)
            out = scale_(out, request.postscale)
            if request.op == Average:
                divide_(out, len(ranks))
            operation.outputs.append(out.to(given.dtype))
        _deliver(operation, request)

    # -- moving ---------------------------------------------------------------------------------------------------

    def _allgather(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        place = self.sets[request.process_set].ranks.index(self._rank)
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
            # gloo rejects blocks of different length; each rank broadcasts its own, all at once, and nothing is padded.
            self._staged(out, partial(_broadcast_blocks, rows=rows, group=self._group(request)))
        _deliver(operation, request)
        operation.sizes = response.sizes

    def _broadcast(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        out, given = operation.outputs[0], operation.inputs[0]
        root = self.sets[request.process_set].ranks.index(request.root)
        if self._rank == request.root and out is not given:
            out.copy_(given)
        if out.numel():
            self._staged(out, lambda t: dist.broadcast(_bytes(t), group=self._group(request), group_src=root))

    def _alltoall(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        given = operation.inputs[0]
        place = self.sets[request.process_set].ranks.index(self._rank)
        received = [splits[place] for splits in response.sizes]
        out = given.new_empty((sum(received), *given.shape[1:]))
        self._exchange(out, given, received, list(response.sizes[place]), request)
        operation.outputs.append(out)
        operation.result = (out, torch.tensor(received, dtype=torch.int32, device="cpu"))

    def _exchange(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], request: Request
    ) -> None:
        """All-to-all of rows; `out` holds the received rows in any outer shape."""
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
        number = self.change_sets(response.requests[0])
        if operation is not None:
            operation.result = number

    # -- places ---------------------------------------------------------------------------------------------------

    def _group(self, request: Request) -> dist.ProcessGroup:
        groups = self.sets[request.process_set]
        if request.device == "cpu" or not self._uses_nccl:
            return groups.cpu
        assert groups.gpu is not None
        return groups.gpu

    def _ring(self, request: Request) -> Ring | None:
        return self.sets[request.process_set].ring if request.device == "cpu" or not self._uses_nccl else None

    def _transport(self, request: Request, *, is_compressed: bool = False) -> str:
        """The name of what carries the tensors, for the timeline."""
        if request.device != "cpu" and self._uses_nccl:
            return "NCCL"
        if request.kind != "allreduce" or request.op == Adasum or is_compressed or self._ring(request) is None:
            return "GLOO"
        return "RING"

    def _is_direct(self, tensor: Tensor) -> bool:
        return self._uses_nccl or tensor.device.type == "cpu"

    def _staged(self, tensor: Tensor, run: Callable[[Tensor], object]) -> None:
        """Through main memory where the ranks have no GPU each, as NCCL needs."""
        if self._is_direct(tensor):
            run(tensor)
            return
        copy = tensor.cpu()
        run(copy)
        tensor.copy_(copy)

    def _buffer(self, count: int, dtype: torch.dtype, device: torch.device, use: str = "fusion") -> Tensor:
        """The start of a buffer that is kept and grows: nothing is allocated in the steady state."""
        buffer = self._buffers.get((dtype, device, use))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[dtype, device, use] = torch.empty(count, dtype=dtype, device=device)
        return buffer[:count]


# One call into torch for all of many tensors: a view and a copy of each from here would cost several times what they do.
# torch's own gradient buckets are made by the same two.
_flatten = torch._C._nn.flatten_dense_tensors


def _parts_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Views of `flat`, one after the other, in the shapes of the tensors."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, tensors))


def _is_alike(one: Request, two: Request) -> bool:
    """Whether two allreduces are combined and scaled in the same way."""
    return (one.kind, one.process_set, one.op, one.prescale, one.postscale, one.device, one.wire) == (
        two.kind,
        two.process_set,
        two.op,
        two.prescale,
        two.postscale,
        two.device,
        two.wire,
    )


def _deliver(operation: Operation, request: Request) -> None:
    operation.result = tuple(operation.outputs) if request.is_grouped else operation.outputs[0]


def rows_of_members(num_rows: int, size: int) -> list[int]:
    """How dimension 0 is dealt out by reducescatter: as evenly as possible, the first ranks one more."""
    quotient, rest = divmod(num_rows, size)
    return [quotient + (place < rest) for place in range(size)]


def scale_(tensor: Tensor, factor: float) -> Tensor:
    """As Horovod scales: whole numbers in float64 and cut off, half precision in float32."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return tensor.copy_((tensor.double() * factor).to(tensor.dtype))
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.copy_(tensor.float() * factor)
    return tensor.mul_(factor)


def divide_(tensor: Tensor, size: int) -> Tensor:
    if tensor.is_floating_point():
        # The same bits, in less time.
        is_power_of_two = size & (size - 1) == 0
        return tensor.mul_(1 / size) if is_power_of_two else tensor.div_(size)
    # Horovod averages whole numbers by a factor in float64, and cuts off.
    return tensor.div_(size, rounding_mode="trunc")


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
