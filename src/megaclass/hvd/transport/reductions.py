"""Operations with arithmetic: allreduce and reducescatter.

Tensors in main memory are reduced over a ring of direct connections or by gloo (HOROVOD_CPU_OPERATIONS), tensors on GPUs by
NCCL. gloo and NCCL do not support int16, which therefore travels as int32.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.wire_formats import WIRE_FORMATS, compressed_all_reduce_
from megaclass.even_parts import even_sizes
from megaclass.hvd.collectives.ops import Adasum, Average, Max, Min, Product, Sum
from megaclass.hvd.engine.messages import Request, Response
from megaclass.hvd.engine.operation import Operation
from megaclass.hvd.engine.timeline import Timeline
from megaclass.hvd.transport.adasum import adasum_
from megaclass.hvd.transport.arithmetic import COMBINE, DTYPE_BY_NAME, HALF_PRECISION, finish_, scale_
from megaclass.hvd.transport.fusion_buffers import FusionBuffers
from megaclass.hvd.transport.groups import Groups
from megaclass.hvd.transport.moves import Moves, deliver

_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class Reductions:
    """Combines tensors of all members of a process set."""

    def __init__(self, timeline: Timeline, groups: Groups, moves: Moves, buffers: FusionBuffers) -> None:
        self._timeline = timeline
        self._groups = groups
        self._moves = moves
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
            with self._timeline.phase(shown, f"{self._groups.transport(first, inputs[0].nbytes)}_ALLREDUCE"):
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
        # A GPU that several ranks share: reduced in main memory by gloo or the ring, then copied back.
        if not self._groups.is_direct(given):
            staged = given.cpu()
            self._reduce(staged, staged, request)
            out.copy_(staged)
            return
        ring = self._groups.ring(request, given.nbytes)
        # The ring reads and writes different tensors without a copy; all other ways reduce in place.
        if out is not given and (ring is None or request.prescale != 1.0):
            out.copy_(given)
            given = out
        scale_(given, request.prescale)
        if ring is not None:
            ring.reduce(given.view(-1), out.view(-1), COMBINE[request.op], partial(self._finish_, request=request))
            return
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
        with self._timeline.phase(
            shown, f"{self._groups.transport(request, 0 if is_compressed else buffer.nbytes)}_ALLREDUCE"
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
            self._moves.exchange(block, scaled, [rows[place]] * len(ranks), rows, request)
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
