"""IResNet, the network of ArcFace: parameter names and shapes are those of InsightFace's published state dicts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megaclass.backbones.layers.convolutions import few_channels, strided_pointwise
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
        # The head normalises embeddings, which would undo a learned scale; InsightFace fixes it, too.
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
