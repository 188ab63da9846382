"""How tensors are combined and scaled, with Horovod's roundings."""

from collections.abc import Callable

import torch
from torch import Tensor

from megaclass.hvd.collectives.ops import Average, Max, Min, Product, Sum

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
