"""A small residual network that two CPU cores train in a minute or two."""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megaclass.backbones.layers.prelu import PReLU
from megaclass.backbones.state_sizes import side_of
from megaclass.image_size import ImageSize, height_and_width

_WIDTHS = (16, 32, 64, 128)


class _Block(nn.Module):
    """Halves the side: two 3x3 convolutions, plus a 1x1 shortcut."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(in_width, width, 3, 2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            PReLU(width),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(in_width, width, 1, 2, bias=False), nn.BatchNorm2d(width))
        self.activation = PReLU(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.residual(x) + self.shortcut(x))
        return result


class SlimNet(nn.Module):
    """Four halvings, then a linear layer over the whole map, because the place of a feature matters."""

    def __init__(self, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, _WIDTHS[0], 3, 2, padding=1, bias=False), nn.BatchNorm2d(_WIDTHS[0]), PReLU(_WIDTHS[0])
        )
        self.blocks = nn.Sequential(*(_Block(a, b) for a, b in itertools.pairwise(_WIDTHS)))
        self.dropout = nn.Dropout(0.0)
        height, width = height_and_width(image_size)
        self.fc = nn.Linear(_WIDTHS[-1] * (height // 16) * (width // 16), embedding_dim, bias=False)
        self.features = nn.BatchNorm1d(embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, D)."""
        x = self.fc(torch.flatten(self.dropout(self.blocks(self.stem(x))), 1))
        embeddings: Tensor = self.features(x)
        return embeddings

    @staticmethod
    def arguments_of(state: Mapping[str, Tensor], image_size: ImageSize | None) -> tuple[int, ImageSize] | None:
        """See `SizedBackbone`."""
        if "stem.0.weight" not in state:
            return None
        embedding_dim, num_inputs = state["fc.weight"].shape
        return embedding_dim, image_size or 16 * side_of(num_inputs // _WIDTHS[-1])
