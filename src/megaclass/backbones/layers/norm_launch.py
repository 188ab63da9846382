"""Launches of Triton programs with little work on the host.

Triton examines every argument of every call to find the compiled program. In networks of small layers this takes longer than
the GPU's work. After the first call, which compiles, this module looks only at the dtypes of the tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
_MAX_INT32 = 2**31 - 1


def start(
    program: Any,
    num_programs: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: Mapping[str, int],
    options: Mapping[str, int],
) -> None:
    """Launches a program on the current stream; all tensors are on the device of the first.

    The program takes tensors, then numbers (a count that is not specialised, then floats), then constants.
    """
    first = tensors[0]
    assert first is not None
    addresses = 0
    kinds: list[torch.dtype | None] = []
    for tensor in tensors:
        if tensor is None:
            kinds.append(None)
        else:
            addresses |= tensor.data_ptr()
            kinds.append(tensor.dtype)
    # Programs are compiled for tensors at multiples of 16 bytes, as nearly all are, and for a 32-bit count.
    is_usual = addresses % 16 == 0 and numbers[0] <= _MAX_INT32
    key = (program.__name__, first.get_device(), *options.values(), *constants.values(), *kinds)
    compiled = _compiled.get(key) if is_usual else None
    if compiled is not None:
        compiled[(num_programs, 1, 1)](*tensors, *numbers, *constants.values())
        return
    compiled = program[(num_programs,)](*tensors, *numbers, **constants, **options)
    # Triton's interpreter compiles nothing.
    if is_usual and compiled is not None:
        _compiled[key] = compiled


def current_stream(device: torch.device) -> int:
    """Returns the address of the current stream, 0 on a CPU. Unlike torch.cuda.current_stream() it creates no objects."""
    if device.type == "cpu":
        return 0
    stream: int = triton.runtime.driver.active.get_current_stream(device.index)
    return stream
