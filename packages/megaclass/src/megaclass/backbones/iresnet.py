"""IResNet, the network of ArcFace: parameter names and shapes are those of InsightFace's published state dicts.

Two of its convolutions have equivalents here, because cuDNN is slow on them with 16-bit channels-
last images. On an H200 with batch 512, the forward pass of a 1 x 1 convolution of 64 channels with
stride 2 on 112 x 112 takes 1.9 ms, because cuDNN converts to NCHW and does not use tensor cores.
The first convolution, of 3 channels, takes 1.8 ms, and 0.9 ms with channels of zeros added.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from megaclass.backbones.layers.norm import norm_act, norm_and_input
from megaclass.backbones.state_sizes import count_blocks, side_of
from megaclass.image_size import ImageSize, height_and_width

_WIDTHS = (64, 128, 256, 512)
_BN_EPS = 1e-5


class IBasicBlock(nn.Module):
    """BN, conv 3x3, BN, PReLU, conv 3x3 (stride), BN, plus the shortcut."""

    is_recomputable = True
    """backbone.checkpoint_activations computes this block again in backward."""

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_width, eps=_BN_EPS)
        self.conv1 = nn.Conv2d(in_width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, eps=_BN_EPS)
        self.prelu = nn.PReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width, eps=_BN_EPS)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_width != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_width, width, 1, stride, bias=False), nn.BatchNorm2d(width, eps=_BN_EPS)
            )

    def forward(self, x: Tensor) -> Tensor:
        y, x = norm_and_input(self.bn1, x)
        y = norm_act(self.bn2, self.conv1(y), slope=self.prelu.weight)
        return norm_act(self.bn3, self.conv2(y), skip=self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if isinstance(self.downsample, nn.Sequential):
            conv, norm = self.downsample
            assert isinstance(conv, nn.Conv2d)
            return norm_act(norm, strided_pointwise(conv, x))
        return x


class IResNet(nn.Module):
    """Four stages of blocks at strides 2, 4, 8, 16, then BN, a linear layer and BN."""

    def __init__(self, blocks: Sequence[int], embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0], eps=_BN_EPS)
        self.prelu = nn.PReLU(_WIDTHS[0])
        in_width = _WIDTHS[0]
        for stage, (width, num_blocks) in enumerate(zip(_WIDTHS, blocks, strict=True), start=1):
            layers = [IBasicBlock(in_width if i == 0 else width, width, 2 if i == 0 else 1) for i in range(num_blocks)]
            self.add_module(f"layer{stage}", nn.Sequential(*layers))
            in_width = width
        self.bn2 = nn.BatchNorm2d(in_width, eps=_BN_EPS)
        self.dropout = nn.Dropout(0.0)
        height, width = height_and_width(image_size)
        self.fc = nn.Linear(in_width * (height // 16) * (width // 16), embedding_dim)
        self.features = nn.BatchNorm1d(embedding_dim, eps=_BN_EPS)
        # The head normalises embeddings, which would undo a learned scale; InsightFace also fixes it.
        nn.init.constant_(self.features.weight, 1.0)
        self.features.weight.requires_grad = False
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, D)."""
        x = norm_act(self.bn1, few_channels(self.conv1, x), slope=self.prelu.weight)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        x = self.fc(torch.flatten(self.dropout(norm_act(self.bn2, x)), 1))
        embeddings: Tensor = self.features(x)
        return embeddings

    @staticmethod
    def arguments_of(
        state: Mapping[str, Tensor], image_size: ImageSize | None
    ) -> tuple[tuple[int, ...], int, ImageSize] | None:
        """See `SizedBackbone`."""
        if "layer1.0.conv1.weight" not in state:
            return None
        blocks = tuple(count_blocks(state, f"layer{stage}.") for stage in range(1, 5))
        embedding_dim, num_inputs = state["fc.weight"].shape
        return blocks, embedding_dim, image_size or 16 * side_of(num_inputs // _WIDTHS[-1])

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0, 0.1)


_CHANNELS_OF_TENSOR_CORES = 8


def strided_pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Returns conv(x) for a strided 1 x 1 convolution without bias; forward selects the pixels that it needs first."""
    is_narrow = x.dtype.itemsize == 2 and _is_channels_last_on_gpu(x)
    if not is_narrow or conv.kernel_size != (1, 1) or conv.stride[0] == 1 or torch.compiler.is_compiling():
        plain: Tensor = conv(x)
        return plain
    result: Tensor = StridedPointwise.apply(x, conv.weight.to(x.dtype), conv.stride[0])  # type: ignore[no-untyped-call]
    return result


def few_channels(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Returns conv(x), without bias, for images of three channels; under autocast with channels of zeros added."""
    dtype = torch.get_autocast_dtype("cuda")
    missing = _CHANNELS_OF_TENSOR_CORES - conv.in_channels
    is_narrow = torch.is_autocast_enabled("cuda") and dtype.itemsize == 2 and _is_channels_last_on_gpu(x)
    if not is_narrow or missing <= 0 or torch.compiler.is_compiling():
        plain: Tensor = conv(x)
        return plain
    wide_x, wide_weight = with_zeros(x.to(dtype), missing), with_zeros(conv.weight.to(dtype), missing)
    assert not isinstance(conv.padding, str)
    return F.conv2d(wide_x, wide_weight, None, conv.stride, conv.padding)


def with_zeros(tensor: Tensor, missing: int) -> Tensor:
    """Appends channels of zeros: (N, C, H, W) -> (N, C + missing, H, W)."""
    return F.pad(tensor, (0, 0, 0, 0, 0, missing))


class StridedPointwise(torch.autograd.Function):
    """x (B, C, H, W), weight (D, C, 1, 1) of the same dtype; gradients as of any convolution with this stride."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return F.conv2d(x[:, :, ::stride, ::stride].contiguous(memory_format=torch.channels_last), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        strides = [ctx.stride, ctx.stride]
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad_y, x, weight, None, strides, [0, 0], [1, 1], False, [0, 0], 1, wanted
        )
        return grad_x, grad_weight, None


def _is_channels_last_on_gpu(x: Tensor) -> bool:
    # Tensors of the meta device stand for those of a GPU when `megaclass plan` counts bytes.
    return (x.is_cuda or x.is_meta) and x.is_contiguous(memory_format=torch.channels_last)
