"""A training step of the backbone without values: every operation noted with its FLOPs, bytes and memory.

The operations are those of a GPU, whatever this machine has: layers treat tensors of the meta device as those of a GPU,
and `_AutocastOfGpu` does what autocast does there. Nothing is computed and nothing is allocated. Two small batches are
enough: at every moment of a step the memory, the FLOPs and the bytes are affine in the number of images.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from megaclass.backbones.configured import blocks_of
from megaclass.image_size import has_rows, input_shape

_DEVICE = "meta"
# Batch norm and attention kernels have special cases for tiny batches; these are large enough to avoid them.
_BATCHES = (8, 16)
_ALLOCATION = 512
"""torch's allocator rounds every tensor up to a multiple of this."""
# Functions whose tensors autocast makes narrow, or wide, as torch's list of CUDA operations has it.
_NARROW = {"conv2d", "linear", "matmul", "bmm", "addmm", "mm", "baddbmm", "scaled_dot_product_attention", "prelu"}
_WIDE = {"layer_norm", "group_norm", "softmax", "log_softmax", "norm", "sum", "prod", "cumsum", "exp", "log", "pow"}
_MOVES_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "resize_"}
_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


@dataclass(frozen=True)
class StepTrace:
    """The operations of forward and backward, in order, for one batch size."""

    live: NDArray[np.float64]
    """Bytes of activations and temporary tensors that are alive after each operation."""
    working: NDArray[np.float64]
    """Bytes that are alive while it runs: outputs exist, and inputs still do."""
    flops: NDArray[np.float64]
    traffic: NDArray[np.float64]
    """Bytes read and written."""
    num_forward: int
    """Operations before the head takes over."""

    def kept_for_backward(self) -> float:
        """Returns the bytes alive between forward and backward."""
        return float(self.live[self.num_forward - 1])


@dataclass(frozen=True)
class BackboneTrace:
    """The backbone's step for any batch size, and the sizes of its state."""

    num_trained: int
    """Numbers that are trained."""
    num_parameters: int
    largest_part: int
    """Numbers that train.shard_backbone gathers at once."""
    buffer_bytes: int
    columns: NDArray[np.float64]
    """(2, 4, operations): of each of the two batches, what StepTrace has."""
    num_forward: int

    def at(self, num_images: int) -> StepTrace:
        """Returns the step with this many images on a rank."""
        first, second = self.columns
        share = (num_images - _BATCHES[0]) / (_BATCHES[1] - _BATCHES[0])
        live, working, flops, traffic = np.maximum(first + share * (second - first), 0.0)
        return StepTrace(live, working, flops, traffic, self.num_forward)


def trace_backbone(build: Callable[[], nn.Module], image_size: tuple[int, int], dtype: torch.dtype) -> BackboneTrace:
    """Traces the backbone that `build` makes on torch's default device, in training, under autocast unless dtype is float32."""
    with _NoValues(), torch.device(_DEVICE):  # type: ignore[no-untyped-call]
        backbone = build()
        backbone.train()
        if dtype != torch.float32:
            _narrow_recomputation(backbone, dtype)
        steps = [_trace_step(backbone, batch, image_size, dtype) for batch in _BATCHES]
        parameters = list(backbone.parameters())
        buffer_bytes = sum(buffer.nbytes for buffer in backbone.buffers())
    columns = np.array([operations for operations, _ in steps]).transpose(0, 2, 1)
    num_forward = steps[0][1]
    return BackboneTrace(
        num_trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        largest_part=_largest_part(backbone),
        buffer_bytes=buffer_bytes,
        columns=columns,
        num_forward=num_forward,
    )


def _largest_part(backbone: nn.Module) -> int:
    largest, left = 0, {id(parameter): parameter.numel() for parameter in backbone.parameters()}
    for part in (*blocks_of(backbone), backbone):
        largest = max(largest, sum(left.pop(id(parameter), 0) for parameter in part.parameters()))
    return largest


def _trace_step(
    backbone: nn.Module, batch: int, image_size: tuple[int, int], dtype: torch.dtype
) -> tuple[list[list[float]], int]:
    """Returns the operations of forward and backward, and the number of those of forward."""
    for parameter in backbone.parameters():
        if parameter.requires_grad:
            # As with DDP, whose buckets hold the gradients all the time: they are not temporary memory.
            parameter.grad = torch.zeros_like(parameter)
    recorder = _Recorder()
    with recorder:
        # Images arrive as bytes, become floats, and stay until the first layer has its gradient.
        dtype_given = torch.float32 if has_rows(image_size) else torch.uint8
        pixels = torch.empty((batch, *input_shape(image_size)), dtype=dtype_given, device=_DEVICE)
        images = pixels.to(torch.float32)
        images = images if has_rows(image_size) else images.to(memory_format=torch.channels_last)
        with nullcontext() if dtype == torch.float32 else _AutocastOfGpu(dtype):
            embeddings = backbone(images)
        del pixels
        num_forward = len(recorder.operations)
        if embeddings.requires_grad:
            embeddings.backward(torch.empty_like(embeddings))
        del images, embeddings
    return recorder.operations, num_forward


def _narrow_recomputation(backbone: nn.Module, dtype: torch.dtype) -> None:
    """Lets blocks with checkpointed activations enter autocast themselves: modes of Python are off in backward."""
    for block in backbone.modules():
        outer = block.__dict__.get("forward")
        if isinstance(outer, partial):
            _, forward = outer.args
            block.forward = partial(outer.func, block, partial(_forward_under_autocast, forward, dtype))


def _forward_under_autocast(forward: Callable[[Tensor], Tensor], dtype: torch.dtype, x: Tensor) -> Tensor:
    with _AutocastOfGpu(dtype):
        return forward(x)


class _AutocastOfGpu(TorchFunctionMode):
    """Autocast of a GPU for tensors of the meta device, for which torch has none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._weights: dict[Tensor, Tensor] = {}
        """Narrow copies of weights, made once per forward."""

    def __enter__(self) -> Any:
        # Layers ask for these, and tensors of the meta device do not react to them.
        self._before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", self._dtype)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_autocast_enabled("cuda", self._before[0])
        torch.set_autocast_dtype("cuda", self._before[1])
        self._weights.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _NARROW:
            args, kwargs = tree_map_only(Tensor, self._narrow, (args, kwargs))
        elif name in _WIDE:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.float(), (args, kwargs))
        if name == "scaled_dot_product_attention":
            # The meta device would choose the plain formula, which keeps all attention weights.
            return torch.ops.aten._scaled_dot_product_flash_attention(*args)[0]
        return func(*args, **kwargs)

    def _narrow(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(self._dtype)
        if tensor not in self._weights:
            self._weights[tensor] = tensor.to(self._dtype)
        return self._weights[tensor]


class _Recorder(TorchDispatchMode):
    """Notes every operation, and follows each storage until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[list[float]] = []
        """Of each operation: live, working, flops and traffic, as in StepTrace."""
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.operations:
            # What was freed since the operation before this one.
            self.operations[-1][0] = self._bytes
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **kwargs)
        if func in _CONVOLUTIONS:
            # The meta device forgets the layout, which a GPU keeps.
            result = tree_map_only(Tensor, _channels_last, result)
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        is_view = bool(made) and all(tensor.untyped_storage()._cdata in known for tensor in made)
        for tensor in made:
            self._follow(tensor)
        counter = flop_registry.get(func._overloadpacket)
        flops = 0.0 if counter is None else counter(*args, **kwargs, out_val=result)
        moves = not (is_view and not func._schema.is_mutable) and func._overloadpacket.__name__ not in _MOVES_NOTHING
        traffic = sum(tensor.nbytes for tensor in given + made if tensor.device.type == _DEVICE) if moves else 0
        self.operations.append([self._bytes, self._bytes, flops, traffic])
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != _DEVICE or key in self._sizes:
            return
        size = -(-storage.nbytes() // _ALLOCATION) * _ALLOCATION
        self._sizes[key] = size
        self._bytes += size
        self._references[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        self._bytes -= self._sizes.pop(key)
        del self._references[key]


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


class _NoValues(TorchDispatchMode):
    """Answers questions about values with 0: initial weights are drawn in loops that end when no value is out of range."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))
