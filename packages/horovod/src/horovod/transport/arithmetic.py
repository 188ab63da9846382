"""The arithmetic of reductions, with Horovod's roundings, and allreduces of small tensors, which travel with the negotiation.

Every rank sends its small tensors with its announcement; rank 0 combines them and sends the result with the response. Nothing
here communicates.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from horovod.engine.kinds import Adasum, Average, Max, Min, Product, Sum
from horovod.engine.messages import ITEM_BYTES, Request
from horovod.engine.operation import Operation
from megaclass_launch.ranks.reused_memory import ReusedMemory

_SMALL_BYTES = 256 * 1024
"""Rank 0 receives at most this much per cycle from all ranks together."""
_LARGE_BYTES = 4 * 1024 * 1024
_KEPT_BYTES = 256 * 1024 * 1024

DTYPE_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPES = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}
HALF_PRECISION = (torch.float16, torch.bfloat16)

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
    if op != Average:
        return tensor
    # Horovod averages integers by a factor in float64, and truncates.
    return tensor.div_(num_members, rounding_mode=None if tensor.is_floating_point() else "trunc")


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


# ---- small tensors, which travel with the negotiation ----


def small_payload(operations: list[Operation], num_ranks: int) -> bytes:
    """Returns the tensors of a cycle that is one plain allreduce of a few kilobytes; else nothing."""
    first = operations[0].request
    is_plain = first.kind == "allreduce" and not first.process_set and not first.wire and first.op != Adasum
    if num_ranks == 1 or not is_plain or first.device != "cpu":
        return b""
    if sum([operation.request.terms.num_bytes for operation in operations]) > _SMALL_BYTES // (num_ranks - 1):
        return b""
    # All operations must be combined and scaled in the same way, and all tensors have one dtype. Requests of one shape share
    # their terms, so the comparison is rarely needed.
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


def deliver_payload(operations: list[Operation | None], payload: bytes) -> None:
    """Copies the combined payload into the outputs."""
    outputs = [out for operation in operations if operation is not None for out in operation.outputs]
    # frombuffer() needs memory that may be written to.
    received = torch.frombuffer(bytearray(payload), dtype=outputs[0].dtype)
    torch._foreach_copy_(outputs, views_like(received, outputs))
