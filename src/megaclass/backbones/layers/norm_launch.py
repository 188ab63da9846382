"""Starts of Triton programs that cost the host little.

Triton looks at every argument of every call to find the compiled program that fits; on a network of small layers this takes
longer than the GPU needs for them. Here the kinds of the tensors alone are looked at, after a first call that compiled.
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
    """On the current stream. The program takes tensors, then numbers (a count that is not specialised, floats), then constants.

    All tensors lie on the device of the first.
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
    # A program is compiled for tensors that begin at multiples of 16 bytes, as nearly all do, and for a count of 32 bits.
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
    """Its address; 0 on a CPU. As torch.cuda.current_stream() gives it, without making objects."""
    if device.type == "cpu":
        return 0
    stream: int = triton.runtime.driver.active.get_current_stream(device.index)
    return stream
