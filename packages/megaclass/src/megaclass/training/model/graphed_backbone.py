"""A backbone whose forward and backward are replayed as CUDA graphs while shapes stay the same.

    forward     copy of the images        into the memory that the graph reads
                forward graph             all layers; leaves the activations in the graphs' pool
                copy of the embeddings    fresh memory, which the caller may keep
    backward    copy of the gradient      into the memory that the graph reads
                backward graph            gradients of all trained parameters, in the graphs' pool
                                          from there AccumulateGrad and DDP's hooks continue as after any backward

The graphs contain the launches of an ordinary step, on the same numbers. Weights, running statistics and their counters are
read and written where they are: optimizers, checkpoints, evaluation and the moving average change them in place. Tensors
that have moved (`.to()`) have other addresses, which are part of the shape and end the use of the graphs.

Activations belong to one step at a time: from its forward to its backward, or until nothing refers to its embeddings any
more. Another forward in between runs without graphs.

On several ranks both ways have a price. Launch by launch the host may be the limit. Replayed, all
gradients arrive at the end of backward, and their exchange does not overlap with it. `auto` measures
both at the start (StepTrial) and keeps the faster one.

Memory: the pool keeps the activations until the graphs are dropped, while an ordinary step frees them in backward; next to it
are a copy of the images and the gradients. `auto` bounds it (largest_replayed_bytes).
"""

import logging
import statistics
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from megaclass.backbones.configured import largest_replayed_bytes
from megaclass.backbones.layers.norm import prepare_stream
from megaclass.training.model.keyed_dropout import KeyedDropout

_T = TypeVar("_T")
_HAS_TRITON = find_spec("triton") is not None
_logger = logging.getLogger(__name__)

NUM_ORDINARY_STEPS = 3
"""Steps of one shape before it is captured: they compile the programs, which cannot be done during a capture."""

NUM_TRIAL_STEPS = 10
"""Steps of each kind that a trial compares."""
_LEAST_GAIN = 0.02
"""Graphs keep memory allocated, which a smaller gain is not worth."""


def can_capture(device: torch.device, backbone: nn.Module) -> bool:
    """Returns True if forward and backward are launches on a GPU and nothing else, as far as the layers tell.

    Keyed dropout learns from the host which images come, and a hook of a module runs Python in every forward. What the
    settings exclude: Config.may_replay_backbone().
    """
    if device.type != "cuda":
        return False
    return not any(isinstance(module, KeyedDropout) or _has_hooks(module) for module in backbone.modules())


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """All that the graphs depend on and the device does not read; two steps with the same can share them."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    """None without autocast."""
    addresses: tuple[int, ...]
    """Of all parameters, which move together with the buffers."""


def is_replay_faster(ordinary_ms: Sequence[float], replayed_ms: Sequence[float]) -> bool:
    """Compares medians: a step with an evaluation or a checkpoint behind it takes longer and does not count."""
    return statistics.median(replayed_ms) < (1 - _LEAST_GAIN) * statistics.median(ordinary_ms)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures. There is one, because cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


class Recorder:
    """Captures graphs that run in the order of their capture and share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
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
            if self._device.type == "cuda":
                # A capture that failed may leave the state of the random numbers marked as captured; a copy is not.
                generator = torch.cuda.default_generators[stream.device_index]
                generator.graphsafe_set_state(generator.clone_state())
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


class StepTrial:
    """Times ordinary steps, then replayed ones, and says whether the graphs stay.

    Each rank decides alone: a trial that sends something would hang if ranks met different shapes.
    The ranks' steps take equally long, because each waits for the others' gradients. If both ways
    are so close that ranks decide differently, it makes no difference.

    State, used by the thread that trains: the moments at which steps began, by kind; None is a step
    of another shape. A moment is an event on the GPU, and the host waits once, for the last ones.
    """

    def __init__(self) -> None:
        self._ordinary: list[Any] = []
        self._replayed: list[Any] = []

    def note(self, device: torch.device, *, is_replayed: bool) -> None:
        """Called when a step begins."""
        (self._replayed if is_replayed else self._ordinary).append(_moment(device))

    def note_other(self) -> None:
        """Called when a forward begins that is not part of the trial: the time until the next step means nothing."""
        (self._replayed or self._ordinary).append(None)

    def decision(self) -> bool | None:
        """Returns whether the graphs stay; None before enough steps of both kinds."""
        if sum(moment is not None for moment in self._replayed) < NUM_TRIAL_STEPS + 2:
            return None
        # The first steps of each kind are left out: they compile programs, or run a graph for the first time.
        ordinary_ms = _intervals_ms(self._ordinary)[-NUM_TRIAL_STEPS:]
        replayed_ms = _intervals_ms(self._replayed)[-NUM_TRIAL_STEPS:]
        if not ordinary_ms or not replayed_ms:
            return None
        stays = is_replay_faster(ordinary_ms, replayed_ms)
        ordinary, replayed = statistics.median(ordinary_ms), statistics.median(replayed_ms)
        _logger.info(
            f"A step took {ordinary:.1f} ms launch by launch and {replayed:.1f} ms with the backbone as CUDA graphs: "
            f"it runs {'with' if stays else 'without'} them (train.cuda_graph=auto)."
        )
        return stays


class GraphedBackbone(nn.Module):
    """Stands for the backbone in DDP. Ordinary calls and replayed ones give the same bits.

    State, used by the thread that trains: `_captured` is the last step captured, `_shape` and `_num_equal` count ordinary
    steps of the same shape in a row. A step of another shape runs without graphs and changes nothing, for example the
    last batch of an epoch; if its shape stays, it replaces what was captured.
    """

    def __init__(self, backbone: nn.Module, setting: Literal["auto", "on", "off"], num_ranks: int) -> None:
        super().__init__()
        self.backbone = backbone
        self._all_parameters = list(backbone.parameters())
        # None after its decision.
        self._trial = StepTrial() if setting == "auto" and num_ranks > 1 else None
        self._num_ordinary = NUM_ORDINARY_STEPS + (NUM_TRIAL_STEPS if self._trial is not None else 0)
        self._is_on, self._is_measured = setting != "off", setting == "auto"
        self._largest_bytes = largest_replayed_bytes(_device_bytes(next(backbone.parameters()).device))
        self._num_bytes: dict[torch.Size, int] = {}
        """Bytes that forward kept for backward, by the size of the images; measured in ordinary steps."""
        self._captured: CapturedBackbone | None = None
        self._shape: ReplayShape | None = None
        self._num_equal = 0

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, D)."""
        shape = self._shape_of(images) if self._is_trained_on(images) else None
        captured = self._find(shape, images) if shape is not None else None
        if self._trial is not None:
            captured = self._tried(self._trial, captured, shape, images.device)
        embeddings: Tensor
        if captured is not None:
            embeddings = _Replay.apply(captured, images, *captured.trained)  # type: ignore[no-untyped-call]
        elif shape is not None and self._is_measured and self._may_capture(images):
            before = _allocated_bytes(images.device)
            embeddings = self.backbone(images)
            self._num_bytes[images.shape] = _allocated_bytes(images.device) - before
        else:
            embeddings = self.backbone(images)
        return embeddings

    def _may_capture(self, images: Tensor) -> bool:
        """Returns True if a step of this size may be captured; `auto` bounds the memory."""
        is_small = self._num_bytes.get(images.shape, 0) <= self._largest_bytes
        return self._is_on and (is_small or not self._is_measured)

    def _find(self, shape: ReplayShape, images: Tensor) -> "CapturedBackbone | None":
        """Returns the graphs for this forward, or None to run it without graphs."""
        if not self._may_capture(images):
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
            self._captured = self._capture(shape, images)
        except RuntimeError as error:
            # Nothing has run yet: the step runs without graphs. torch.OutOfMemoryError is also a RuntimeError. The end of a
            # capture that has failed raises an error of its own.
            self._is_on = False
            warnings.warn(
                "The backbone's step could not be captured as a CUDA graph and runs without one, which only takes time of the "
                f"host. train.cuda_graph=off avoids the attempt. The reason: {error.__context__ or error}",
                stacklevel=2,
            )
        return self._captured

    def _tried(
        self, trial: StepTrial, captured: "CapturedBackbone | None", shape: ReplayShape | None, device: torch.device
    ) -> "CapturedBackbone | None":
        """Notes that a step begins, and ends the trial after enough of them. Returns the graphs that this step uses.

        shape: None for a forward that is not part of the training.
        """
        known = self._shape if self._captured is None else self._captured.shape
        if captured is None and not (self._is_on and shape is not None and shape == known):
            trial.note_other()
            return None
        trial.note(device, is_replayed=captured is not None)
        stays = trial.decision()
        if stays is None:
            return captured
        self._trial = None
        if not stays:
            # All further steps run without graphs.
            self._is_on, self._captured = False, None
            return None
        return captured

    def _is_trained_on(self, images: Tensor) -> bool:
        # Programs that are only compiled and not run would not be part of a graph either.
        is_training = self.backbone.training and torch.is_grad_enabled() and not _is_compiling_only()
        return is_training and images.numel() > 0 and not images.requires_grad

    def _shape_of(self, images: Tensor) -> ReplayShape:
        device = images.device.type
        return ReplayShape(
            images.shape,
            images.stride(),
            images.dtype,
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            tuple([parameter.data_ptr() for parameter in self._all_parameters]),
        )

    def _capture(self, shape: ReplayShape, images: Tensor) -> "CapturedBackbone":
        """Captures forward and backward; runs nothing."""
        device = images.device
        if device.type == "cuda":
            # Scratch memory of the fused norm lasts longer than a graph's pool, and its counters must be zero at first.
            with torch.cuda.stream(capture_stream(device)):
                prepare_stream(device)
        # A failed capture may have drawn numbers.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return CapturedBackbone(shape, self.backbone, images, Recorder(device))


class CapturedBackbone:
    """The graphs of one ReplayShape, and the tensors through which they are used."""

    def __init__(self, shape: ReplayShape, backbone: nn.Module, images: Tensor, recorder: Recorder) -> None:
        self.shape = shape
        self.trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        # The same memory under other names. DDP keeps autograd's node of each parameter (AccumulateGrad), which belongs to the
        # stream on which DDP was built; its part in a backward on the capture's stream would make a capture fail.
        aliases = {
            name: parameter.detach().requires_grad_()
            for name, parameter in backbone.named_parameters()
            if parameter.requires_grad
        }
        device, dtype = images.device.type, shape.autocast_dtype
        self._images = torch.empty_like(images)

        def forward() -> Tensor:
            # Without a cache: narrow weights are cast in every replay.
            with torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
                embeddings = functional_call(backbone, aliases, (self._images,))
            if not isinstance(embeddings, Tensor):
                raise RuntimeError(f"the backbone returns a {type(embeddings).__name__}, not a tensor")
            return embeddings

        self._forward_graph, embeddings = recorder.record(forward)
        self._grad_embeddings = torch.empty_like(embeddings)

        def backward() -> tuple[Tensor, ...]:
            # A training step calls backward outside autocast.
            with torch.autocast(device, dtype, enabled=False):
                return torch.autograd.grad(embeddings, list(aliases.values()), self._grad_embeddings)

        # Activations are freed while this is captured, so later ones take their memory, as in an ordinary backward.
        self._backward_graph, self._gradients = recorder.record(backward)
        self._embeddings = embeddings.detach()
        self._last: weakref.ref[_OpenForward] | None = None

    @property
    def is_free(self) -> bool:
        """False while a backward may come that needs what the last forward has left."""
        last = None if self._last is None else self._last()
        return last is None or last.is_closed

    def forward(self, images: Tensor) -> tuple[Tensor, "_OpenForward"]:
        """Returns embeddings in memory of their own, and what `backward` asks for."""
        assert self.is_free
        self._leave_gradients()
        self._images.copy_(images)
        self._forward_graph.replay()
        opened = _OpenForward(self)
        self._last = weakref.ref(opened)
        return self._embeddings.clone(), opened

    def _leave_gradients(self) -> None:
        """Copies gradients that parameters still have in the graphs' memory, part of which holds activations in forward.

        AccumulateGrad may keep a gradient as it came. DDP copies it into its bucket, but not under no_sync().
        """
        for parameter, gradient in zip(self.trained, self._gradients, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr():
                parameter.grad = parameter.grad.clone()

    def backward(self, grad_embeddings: Tensor) -> list[Tensor]:
        """Returns the gradients of `trained`, in memory that the next forward overwrites."""
        self._grad_embeddings.copy_(grad_embeddings)
        self._backward_graph.replay()
        # Other tensor objects on the same memory: AccumulateGrad copies those that something else refers to.
        return [gradient.detach() for gradient in self._gradients]


class _OpenForward:
    """One replayed forward. Autograd's graph refers to it as long as a backward may come."""

    def __init__(self, captured: CapturedBackbone) -> None:
        self.captured = captured
        self.is_closed = False

    def backward(self, grad_embeddings: Tensor) -> list[Tensor]:
        if self.is_closed:
            raise RuntimeError(
                "A second backward through the same forward of the backbone, which was replayed as a CUDA graph and no "
                "longer has its activations; train.cuda_graph=off runs it without graphs."
            )
        self.is_closed = True
        return self.captured.backward(grad_embeddings)


class _Replay(torch.autograd.Function):
    """Takes the parameters as arguments, because autograd needs them to pass on their gradients."""

    @staticmethod
    def forward(ctx: Any, captured: CapturedBackbone, images: Tensor, *parameters: Tensor) -> Tensor:
        embeddings, ctx.opened = captured.forward(images)
        # Backward reads them where they are. Autograd raises an error if they have changed until then.
        ctx.save_for_backward(*parameters)
        return embeddings

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_embeddings: Tensor) -> tuple[Tensor | None, ...]:
        assert len(ctx.saved_tensors) == len(ctx.opened.captured.trained)
        return None, None, *ctx.opened.backward(grad_embeddings)


def _moment(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _intervals_ms(moments: Sequence[torch.cuda.Event | None]) -> list[float]:
    """Returns the times between successive moments. The host waits for the last one."""
    if moments and moments[-1] is not None:
        moments[-1].synchronize()
    return [begun.elapsed_time(ended) for begun, ended in pairwise(moments) if begun is not None and ended is not None]


def _device_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def _is_compiling_only() -> bool:
    if not _HAS_TRITON:
        return False
    from megaclass.triton_launch import is_compiling_only

    return is_compiling_only()
