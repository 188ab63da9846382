"""CUDA graphs: the launches of a function are captured once and started with one call from then on.

training/model/graphed_backbone.py uses them. `Recorder` captures; `ShapeGraphs` decides when, and keeps
what was captured.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Generic, Literal, Protocol, TypeVar

import torch

CudaGraph = Literal["auto", "on", "off"]

NUM_ORDINARY_STEPS = 3
"""Steps of one shape before it is captured: they compile the programs, which cannot be done during a capture."""

_SHARE_FOR_BACKBONE, _MOST_FOR_BACKBONE = 4, 32 << 30

_T = TypeVar("_T")
_ShapeT = TypeVar("_ShapeT")
_CapturedT = TypeVar("_CapturedT", bound="Captured")


class Graph(Protocol):
    """torch.cuda.CUDAGraph, as far as a step needs it."""

    def replay(self) -> None: ...


def largest_backbone_bytes(device_bytes: int) -> int:
    """Returns how much the forward of a backbone may keep for backward if its steps become CUDA graphs by default.

    A quarter of the GPU's memory, because it stays allocated between the steps, and at most 32 GiB. iresnet50 fills that in
    about 130 ms of an H200. The host needs 42 to 58 ms to start the launches of a step and is not the limit of larger ones,
    even if something else takes its time.
    """
    return min(device_bytes // _SHARE_FOR_BACKBONE, _MOST_FOR_BACKBONE)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures. There is one, because cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


class Recorder:
    """Captures graphs that run in the order of their capture and share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], _T]) -> tuple[Graph, _T]:
        """Captures the launches of a function, which are not run, and returns its result. The host waits once."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("another capture is under way")
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self._device)
        try:
            # An error inside torch.cuda.graph may leave its stream the current one; the outer block restores the caller's.
            # thread_local: threads of a data loader may allocate pinned memory meanwhile.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                result = function()
        except Exception:
            self._release_pool(stream.device_index)
            raise
        return graph, result

    def _release_pool(self, device_index: int) -> None:
        """Does after a failed capture what torch does after a good one and when its graph is dropped.

        Otherwise the allocator would take the capture for unfinished: it would keep the pool's memory for good, and all memory
        that several streams have used.
        """
        # The first line raises if torch has done it, which depends on where the capture failed.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device_index, self._pool)
            torch._C._cuda_releasePool(device_index, self._pool)


class Captured(Protocol):
    """Graphs of one shape, whose memory one step at a time can use."""

    @property
    def shape(self) -> object: ...

    @property
    def is_free(self) -> bool:
        """False while the step that used the graphs last may still need what they have left in memory."""


class ShapeGraphs(Generic[_ShapeT, _CapturedT]):
    """Keeps the graphs of the shape that was captured last, if there is one.

    State, used by the thread that trains: `_captured` is the last step captured, `_shape` and `_num_equal` count ordinary
    steps of the same shape in a row. A step of another shape runs without graphs and changes nothing, for example the
    last batch of an epoch; if its shape stays, it replaces what was captured.
    """

    def __init__(
        self,
        *,
        is_on: bool,
        largest_bytes: int | None,
        subject: str,
        setting: str,
        num_ordinary: int = NUM_ORDINARY_STEPS,
    ) -> None:
        """largest_bytes: no larger step is captured. subject, setting: named in the warning if a capture fails.

        num_ordinary: steps of one shape before it is captured.
        """
        self._num_ordinary = num_ordinary
        self._is_on = is_on
        self._largest_bytes = largest_bytes
        self._subject, self._setting = subject, setting
        self._captured: _CapturedT | None = None
        self._shape: _ShapeT | None = None
        self._num_equal = 0

    def allows(self, num_bytes: int) -> bool:
        """Returns True if a step of this size may be captured."""
        return self._is_on and (self._largest_bytes is None or num_bytes <= self._largest_bytes)

    def counts(self, shape: _ShapeT) -> bool:
        """Returns True if steps of this shape are on their way to a capture, or captured."""
        return self._is_on and (shape == self._shape if self._captured is None else shape == self._captured.shape)

    def switch_off(self) -> None:
        """Drops what was captured; all further steps run without graphs."""
        self._is_on, self._captured = False, None

    def find(self, shape: _ShapeT, num_bytes: int, capture: Callable[[_ShapeT], _CapturedT]) -> _CapturedT | None:
        """Returns the graphs for the next forward, or None to run it without graphs. `capture` may raise."""
        if not self.allows(num_bytes):
            return None
        if self._captured is not None and self._captured.shape == shape:
            self._num_equal = 0
            return self._captured if self._captured.is_free else None
        self._num_equal = self._num_equal + 1 if shape == self._shape else 1
        self._shape = shape
        if self._num_equal <= self._num_ordinary:
            return None
        # Before the new one is captured, so both are not held at once.
        self._captured = None
        try:
            self._captured = capture(shape)
        except RuntimeError as error:
            # Nothing has run yet: the step runs without graphs. torch.OutOfMemoryError is also a RuntimeError. The end of a
            # capture that has failed raises an error of its own.
            self._is_on = False
            warnings.warn(
                f"{self._subject} could not be captured as a CUDA graph and runs without one, which only takes time of the "
                f"host. {self._setting} avoids the attempt. The reason: {error.__context__ or error}",
                stacklevel=2,
            )
        return self._captured
