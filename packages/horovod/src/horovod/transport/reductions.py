"""Operations with arithmetic: allreduce and reducescatter.

    FusionBuffers     buffers that are kept between steps
    small_payload     allreduces of small tensors, which travel with the negotiation: every rank sends its tensors with its
                      announcement, and rank 0 combines them and sends the result with the response
    Reductions        all others: tensors in main memory by gloo, tensors on GPUs by NCCL

gloo and NCCL do not support int16, which therefore travels as int32. The arithmetic has Horovod's roundings.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from horovod.engine.kinds import Adasum, Average, Max, Min, Product, Sum
from horovod.engine.messages import Request, Response
from horovod.engine.operation import Operation
from horovod.engine.timeline import Timeline
from horovod.transport.adasum import adasum_
from horovod.transport.exchanges import Exchanges, deliver
from horovod.transport.groups import Groups
from megaclass_launch.even_parts import even_sizes
from megaclass_launch.ranks.reused_memory import ReusedMemory
from megaclass_launch.ranks.wire_formats import WIRE_FORMATS, compressed_all_reduce_

_SMALL_BYTES = 256 * 1024
"""Rank 0 receives at most this much per cycle from all ranks together."""
_LARGE_BYTES = 4 * 1024 * 1024
_KEPT_BYTES = 256 * 1024 * 1024
# Layouts that are remembered per buffer: those of the batches of gradients of one step, and some more.
_NUM_LAYOUTS = 32

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
DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
HALF_PRECISION = (torch.float16, torch.bfloat16)

_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
COMBINE: dict[int, Callable[..., Tensor]] = {
    Average: torch.add,
    Sum: torch.add,
    Min: torch.minimum,
    Max: torch.maximum,
    Product: torch.mul,
}


def scale_(tensor: Tensor, factor: float) -> Tensor:
    """Scales in place as Horovod does: integers in float64 and truncated, half precision in float32."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return tensor.copy_((tensor.double() * factor).to(tensor.dtype))
    if tensor.dtype in HALF_PRECISION:
        return tensor.copy_(tensor.float() * factor)
    return tensor.mul_(factor)


def finish_(tensor: Tensor, op: int, postscale: float, num_members: int) -> Tensor:
    """Applies in place what comes after the reduction: the scale and, for averages, the division."""
    scale_(tensor, postscale)
    return _divide_(tensor, num_members) if op == Average else tensor


def _divide_(tensor: Tensor, divisor: int) -> Tensor:
    if tensor.is_floating_point():
        # A multiplication by a power of two gives the same bits in less time.
        is_power_of_two = divisor & (divisor - 1) == 0
        return tensor.mul_(1 / divisor) if is_power_of_two else tensor.div_(divisor)
    # Horovod averages integers by a factor in float64, and truncates.
    return tensor.div_(divisor, rounding_mode="trunc")


# One call into torch for many tensors: one view and one copy per tensor from Python would take several times as long. torch
# builds its own gradient buckets with the same two functions.
flatten = torch._C._nn.flatten_dense_tensors


def views_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Returns consecutive views of `flat` in the shapes of the tensors."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, tensors))


# ---- memory that is used again ----

_memory = ReusedMemory(_KEPT_BYTES)
release_memory = _memory.release


def empty_result(like: Tensor) -> Tensor:
    """Returns a tensor as torch.empty_like does, without a gradient and contiguous."""
    num_bytes = like.numel() * like.element_size()
    if num_bytes < _LARGE_BYTES or num_bytes > _KEPT_BYTES // 2 or like.device.type != "cpu":
        return torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
    return torch.from_numpy(_memory.take(num_bytes)).view(like.dtype).view(like.shape)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Consecutive places in a buffer for tensors of these shapes."""

    shapes: list[torch.Size]
    flat: Tensor
    """All places together."""
    places: list[Tensor]


class FusionBuffers:
    """One buffer per dtype, device and use; the next call for the same three may overwrite its content."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device, str], Tensor] = {}
        # Layouts in the current buffer for fusion, the latest first.
        self._layouts: dict[tuple[torch.dtype, torch.device], deque[_Layout]] = {}

    def flat(self, count: int, dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
        """Returns `count` elements."""
        buffer = self._buffers.get((dtype, device, use))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[dtype, device, use] = torch.empty(count, dtype=dtype, device=device)
        return buffer[:count]

    def for_fusion(self, tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Returns room for all tensors in a row, and for each tensor its place in it, of its shape."""
        device = tensors[0].device
        shapes = [tensor.shape for tensor in tensors]
        layouts = self._layouts.get((dtype, device))
        # Making a thousand views takes longer than filling them, and most steps repeat the shapes of the previous step.
        for layout in layouts or ():
            if layout.shapes == shapes:
                return layout.flat, layout.places
        num_elements = sum([tensor.numel() for tensor in tensors])
        old = self._buffers.get((dtype, device, "fusion"))
        flat = self.flat(num_elements, dtype, device, "fusion")
        if layouts is None or self._buffers[dtype, device, "fusion"] is not old:
            # The buffer is another one: layouts of the old one would keep its memory in use.
            layouts = self._layouts[dtype, device] = deque(maxlen=_NUM_LAYOUTS)
        layout = _Layout(shapes, flat, views_like(flat, tensors))
        layouts.appendleft(layout)
        return layout.flat, layout.places


# ---- small tensors, which travel with the negotiation ----


def small_payload(operations: list[Operation], num_ranks: int) -> bytes:
    """Returns the tensors of a cycle that is one plain allreduce of a few kilobytes; else nothing."""
    first = operations[0].request
    if first.kind != "allreduce" or first.process_set or first.wire or first.op == Adasum or first.device != "cpu":
        return b""
    if sum([operation.request.terms.num_bytes for operation in operations]) > _SMALL_BYTES // max(1, num_ranks - 1):
        return b""
    # All operations must be combined and scaled in the same way, and all tensors have one dtype. Requests of one shape share
    # their terms, so that the comparison is rarely needed.
    for operation in operations[1:]:
        terms = operation.request.terms
        if terms is not first.terms and (terms.kind, terms.reduction) != (first.kind, first.terms.reduction):
            return b""
    tensors = [tensor for operation in operations for tensor in operation.inputs]
    dtype = tensors[0].dtype
    if len(tensors) > 1 and any(tensor.dtype is not dtype for tensor in tensors):
        return b""
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else flatten(tensors)
    if first.prescale != 1.0:
        flat = scale_(flat.clone(), first.prescale)
    return flat.view(torch.uint8).numpy().tobytes()


def add_payloads(request: Request, payloads: list[bytes]) -> bytes:
    """Combines the payloads in the order of ranks, half precision in float32."""
    dtype = DTYPE_BY_NAME[request.dtypes[0]]
    # frombuffer() needs memory that may be written to: the first part becomes the total.
    parts = [torch.frombuffer(bytearray(payload), dtype=dtype) for payload in payloads]
    total = parts[0].float() if dtype in HALF_PRECISION else parts[0]
    for part in parts[1:]:
        COMBINE[request.op](total, part.to(total.dtype), out=total)
    total = finish_(total.to(dtype), request.op, request.postscale, len(payloads))
    return total.view(torch.uint8).numpy().tobytes()


def deliver_payload(operations: list[Operation | None], payload: bytes, buffers: FusionBuffers) -> None:
    """Copies the combined payload into the outputs."""
    outputs = [out for operation in operations if operation is not None for out in operation.outputs]
    # frombuffer() needs memory that may be written to.
    received = torch.frombuffer(bytearray(payload), dtype=outputs[0].dtype)
    if len(outputs) == 1:
        outputs[0].copy_(received.view(outputs[0].shape))
        return
    # Through a buffer whose division into these shapes is known from the previous step.
    flat, places = buffers.for_fusion(outputs, outputs[0].dtype)
    flat.copy_(received)
    torch._foreach_copy_(outputs, places)


# ---- all other tensors ----


class Reductions:
    """Combines tensors of all members of a process set."""

    def __init__(self, timeline: Timeline, groups: Groups, exchanges: Exchanges, buffers: FusionBuffers) -> None:
        self._timeline = timeline
        self._groups = groups
        self._exchanges = exchanges
        self._buffers = buffers
        # Rounding errors of compressed allreduces, by process set, name of the operation and number of the tensor.
        self._remainders: dict[tuple[int, str, int], Tensor] = {}

    def allreduce(self, response: Response, operations: list[Operation | None]) -> None:
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
            with self._timeline.phase(shown, f"{self._groups.transport(first)}_ALLREDUCE"):
                for given, out in zip(inputs, outputs, strict=True):
                    self._adasum(given, out, first)
        elif len(inputs) == 1 and not first.wire:
            with self._timeline.phase(shown, f"{self._groups.transport(first)}_ALLREDUCE"):
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
        # A GPU that several ranks share: reduced in main memory by gloo, then copied back.
        if not self._groups.is_direct(given):
            staged = given.cpu()
            self._reduce(staged, staged, request)
            out.copy_(staged)
            return
        if out is not given:
            out.copy_(given)
        scale_(out, request.prescale)
        if out.numel() and len(self._groups.ranks(request)) > 1:
            # The sum is rounded back to int16 by wrap-around, as an int16 sum would.
            wide = out.int() if out.dtype is torch.int16 else out
            dist.all_reduce(wide, op=_OPS[request.op], group=self._groups.group(request))
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
        with self._timeline.phase(shown, f"{self._groups.transport(request)}_ALLREDUCE"):
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
        divisor = float(len(self._groups.ranks(request))) if request.op == Average else 1.0
        group = self._groups.group(request)
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

    def _finish_(self, tensor: Tensor, request: Request) -> None:
        finish_(tensor, request.op, request.postscale, len(self._groups.ranks(request)))

    def _adasum(self, given: Tensor, out: Tensor, request: Request) -> None:
        if out is not given:
            out.copy_(given)
        scale_(out, request.prescale)
        if out.numel():
            self._groups.staged(out, lambda t: adasum_(t, self._groups.group(request)))
        scale_(out, request.postscale)

    def reducescatter(self, response: Response, operations: list[Operation | None]) -> None:
        request, operation = response.requests[0], operations[0]
        assert operation is not None
        ranks, place = self._groups.ranks(request), self._groups.place(request)
        for given in operation.inputs:
            # Every rank receives all versions of its own rows and adds them up itself: gloo has no reduce-scatter for every
            # dtype, and the sum of half-precision numbers is formed in float32.
            rows = even_sizes(given.shape[0], len(ranks))
            block = given.new_empty((len(ranks), rows[place], *given.shape[1:]))
            scaled = scale_(given.clone(), request.prescale) if request.prescale != 1.0 else given
            self._exchanges.exchange(block, scaled, [rows[place]] * len(ranks), rows, request)
            half = given.dtype in HALF_PRECISION
            out = block.sum(0, dtype=torch.float32 if half else given.dtype)
            out = finish_(out, request.op, request.postscale, len(ranks))
            operation.outputs.append(out.to(given.dtype))
        deliver(operation, request)


def _device_of(operations: list[Operation | None], request: Request) -> torch.device:
    for operation in operations:
        if operation is not None:
            device: torch.device = operation.inputs[0].device
            return device
    return torch.device(request.device)
