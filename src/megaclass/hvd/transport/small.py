"""Allreduces of small tensors, which travel with the negotiation.

Every rank sends its tensors with its announcement; rank 0 combines them and sends the result with the response. That saves
the round trips of a separate allreduce. Rank 0 receives at most _SMALL_BYTES per cycle from all ranks together.
"""

import torch

from megaclass.hvd.collectives.ops import Adasum
from megaclass.hvd.engine.messages import Request
from megaclass.hvd.engine.operation import Operation
from megaclass.hvd.transport.arithmetic import (
    COMBINE,
    DTYPE_BY_NAME,
    HALF_PRECISION,
    finish_,
    flatten,
    scale_,
)
from megaclass.hvd.transport.fusion_buffers import FusionBuffers

_SMALL_BYTES = 256 * 1024


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
