"""MobileFaceNet in InsightFace's two sizes; parameter names and shapes are those of its published state dicts."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from megaclass.backbones.layers.prelu import PReLU
from megaclass.backbones.state_sizes import count_blocks
from megaclass.image_size import ImageSize, compact_size, height_and_width

_END_WIDTH = 512


class _Layers(nn.Module):
    """A sequence under the name `layers`, as in the published files."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class _Shortcut(_Layers):
    """A sequence plus its input."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class MobileFaceNet(nn.Module):
    """Four halvings by depth-wise convolutions, then one depth-wise convolution over the whole map and a linear layer.

    blocks: residual blocks between the halvings. scale: widths in units of 64 and 128; InsightFace's sizes are
    (1, 4, 6, 2) at scale 2 (mbf) and (2, 8, 12, 4) at scale 4 (mbf_large).
    """

    def __init__(self, blocks: Sequence[int], scale: int, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__()
        narrow, wide = 64 * scale, 128 * scale
        height, width = height_and_width(image_size)
        # In place of a single block the small network has one grouped convolution.
        first = _conv(narrow, narrow, 3, groups=64) if blocks[0] == 1 else _residual(narrow, blocks[0], inner=128)
        self.layers = nn.ModuleList(
            [
                _conv(3, narrow, 3, stride=2),
                first,
                _bottleneck(narrow, narrow, stride=2, inner=128),
                _residual(narrow, blocks[1], inner=128),
                _bottleneck(narrow, wide, stride=2, inner=256),
                _residual(wide, blocks[2], inner=256),
                _bottleneck(wide, wide, stride=2, inner=512),
                _residual(wide, blocks[3], inner=256),
            ]
        )
        self.conv_sep = _conv(wide, _END_WIDTH, 1)
        self.features = _Layers(
            _Layers(
                nn.Conv2d(_END_WIDTH, _END_WIDTH, (height // 16, width // 16), groups=_END_WIDTH, bias=False),
                nn.BatchNorm2d(_END_WIDTH),
            ),
            nn.Flatten(),
            nn.Linear(_END_WIDTH, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, D)."""
        for layer in self.layers:
            x = layer(x)
        embeddings: Tensor = self.features(self.conv_sep(x))
        return embeddings

    @staticmethod
    def arguments_of(
        state: Mapping[str, Tensor], image_size: ImageSize | None
    ) -> tuple[tuple[int, ...], int, int, ImageSize] | None:
        """See `SizedBackbone`. The last convolution covers the whole map, so the weights tell rectangles, too."""
        if "conv_sep.layers.0.weight" not in state:
            return None
        # The first chain is a single convolution where it stands for one block.
        first = 1 if "layers.1.layers.0.weight" in state else count_blocks(state, "layers.1.layers.")
        blocks = (first, *(count_blocks(state, f"layers.{chain}.layers.") for chain in (3, 5, 7)))
        height, width = state["features.layers.0.layers.0.weight"].shape[2:]
        return (
            blocks,
            state["layers.0.layers.0.weight"].shape[0] // 64,
            state["features.layers.2.weight"].shape[0],
            compact_size((16 * height, 16 * width)),
        )


def _conv(in_width: int, width: int, kernel: int, *, stride: int = 1, groups: int = 1) -> _Layers:
    return _Layers(
        nn.Conv2d(in_width, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(width),
        PReLU(width),
    )


def _bottleneck_parts(in_width: int, width: int, stride: int, inner: int) -> tuple[nn.Module, ...]:
    """1x1 to the inner width, depth-wise 3x3, 1x1 back without an activation."""
    back = _Layers(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
    return _conv(in_width, inner, 1), _conv(inner, inner, 3, stride=stride, groups=inner), back


def _bottleneck(in_width: int, width: int, *, stride: int, inner: int) -> _Layers:
    return _Layers(*_bottleneck_parts(in_width, width, stride, inner))


def _residual(width: int, num_blocks: int, *, inner: int) -> _Layers:
    return _Layers(*(_Shortcut(*_bottleneck_parts(width, width, 1, inner)) for _ in range(num_blocks)))
