"""Launches of Triton programs with little work on the host, and their compilation in several threads.

Triton examines every argument of every call to find the compiled program. In networks of small layers, and in a head that
samples few classes, this takes longer than the GPU's work. After the first call, which compiles, this module looks only at
what the compiled program depends on.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[tuple[Any, ...], tuple[Any, int]] = {}
"""Program by what it depends on, and its number of constants."""
_MIN_INT32, _MAX_INT32 = -(2**31), 2**31 - 1


def launch(program: Any, num_programs: int, *arguments: Any, **settings: Any) -> None:
    """Launches a program on the current stream of the tensors' device, which all tensors share.

    Triton takes the device that is current in this thread, so another one is made current for the launch.
    arguments: tensors, descriptors of tensors, numbers, None.
    settings: the constants of the program, in the order of its signature, then options of Triton such as num_warps.
    """
    device = -1
    kinds: list[Any] = [id(program)]
    add = kinds.append
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            # Triton compiles 1 and multiples of 16 specially, and distinguishes 32 from 64 bits.
            is_long = not _MIN_INT32 <= argument <= _MAX_INT32
            add((argument == 1) + 2 * (argument & 15 == 0) + 4 * is_long)
        elif argument is None or kind is float:
            add(kind)
        elif isinstance(argument, Tensor):
            # Tensors at multiples of 16 bytes are also compiled specially.
            add(argument.dtype if argument.data_ptr() & 15 == 0 else (argument.dtype, "unaligned"))
            device = argument.get_device()
        else:
            # A descriptor of a tensor.
            kinds += (argument.base.dtype, *argument.block_shape)
    key = (device, *kinds, *settings.values())
    if _ahead is not None:
        _ahead.compile(key, device, program, arguments, settings)
        return
    if device < 0 or device == _current_device():
        _launch(key, program, num_programs, arguments, settings)
    else:
        with torch.cuda.device(device):
            _launch(key, program, num_programs, arguments, settings)


# The part of torch.cuda.current_device() that remains once CUDA is initialised, as it is if there is a tensor on a GPU.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


def _launch(
    key: tuple[Any, ...], program: Any, num_programs: int, arguments: tuple[Any, ...], settings: dict[str, Any]
) -> None:
    known = _compiled.get(key)
    if known is not None:
        compiled, num_constants = known
        compiled[(num_programs, 1, 1)](*arguments, *tuple(settings.values())[:num_constants])
        return
    compiled = program[(num_programs,)](*arguments, **settings)
    # Triton's interpreter compiles nothing.
    if compiled is not None:
        constants = [parameter.name for parameter in program.params if parameter.is_constexpr]
        assert [*settings][: len(constants)] == constants, (
            f"constants of {program.__name__} in their order: {constants}"
        )
        _compiled[key] = compiled, len(constants)


def current_stream(device: torch.device) -> int:
    """Returns the address of the current stream, 0 on a CPU. Unlike torch.cuda.current_stream() it creates no objects."""
    if device.type == "cpu":
        return 0
    stream: int = triton.runtime.driver.active.get_current_stream(device.index)
    return stream


class _AheadCompiler:
    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
        self._jobs: dict[tuple[Any, ...], Future[None]] = {}

    def compile(
        self, key: tuple[Any, ...], device: int, program: Any, arguments: tuple[Any, ...], settings: dict[str, Any]
    ) -> None:
        if key not in self._jobs:
            # Types only: the tensors of the step must not be kept until a thread is free.
            types = [_type_of(argument) for argument in arguments]
            self._jobs[key] = self._threads.submit(self._compile, device, program, types, settings)

    @staticmethod
    def _compile(device: int, program: Any, types: list[Any], settings: dict[str, Any]) -> None:
        with torch.cuda.device(device):
            # Asking for `run` loads it on the device and compiles the C function that launches it.
            program.warmup(*types, grid=(1,), **settings).run  # noqa: B018

    def finish(self) -> None:
        self._threads.shutdown()
        for job in self._jobs.values():
            job.result()


@dataclass(frozen=True)
class _TensorType:
    """Stands for a tensor while Triton compiles: it asks for the dtype, and for the address because of its alignment."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _type_of(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return _TensorType(argument.dtype, argument.data_ptr())
    if isinstance(argument, TensorDescriptor):
        return replace(argument, base=_type_of(argument.base))
    return argument


# Of the process, not of a thread: autograd launches the programs of backward in threads of its own.
_ahead: _AheadCompiler | None = None


def is_compiling_only() -> bool:
    """Returns True within compiling_only()."""
    return _ahead is not None


@contextmanager
def compiling_only(num_threads: int) -> Iterator[None]:
    """Within it programs are compiled, several at a time, and not run: their results hold whatever was in memory."""
    global _ahead
    assert _ahead is None
    _ahead = compiler = _AheadCompiler(num_threads)
    try:
        yield
    finally:
        _ahead = None
        compiler.finish()
