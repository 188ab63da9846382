"""Backbones for features, which are embeddings of another network: nothing, a linear layer, or a perceptron."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from megaclass.image_size import ImageSize, height_and_width
from megaclass_launch.errors import ConfigError

Kind = Literal["none", "linear", "mlp"]


class FeatureNet(nn.Module):
    """(B, W) -> (B, D). The perceptron normalises the features first and has twice the larger of both widths inside."""

    def __init__(self, kind: Kind, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__()
        width = height_and_width(image_size)[1]
        # Recognises the weights, and is all that `none` has to save.
        self.register_buffer("num_features", torch.tensor(width))
        self.dropout = nn.Dropout(0.0)
        layers: list[nn.Module] = []
        if kind == "mlp":
            hidden = 2 * max(width, embedding_dim)
            layers = [nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), self.dropout]
            width = hidden
        if kind != "none":
            layers.append(nn.Linear(width, embedding_dim))
        elif embedding_dim != width:
            raise ConfigError(
                f"backbone.name is none, which leaves the {width:,} features as they are, but backbone.embedding_dim is "
                f"{embedding_dim}: set backbone.embedding_dim={width}, or backbone.name=linear."
            )
        self.layers = nn.Sequential(*layers)

    def forward(self, features_BW: Tensor) -> Tensor:
        """(B, W) -> (B, D)."""
        embeddings: Tensor = self.layers(features_BW)
        return embeddings

    @staticmethod
    def arguments_of(state: Mapping[str, Tensor], image_size: ImageSize | None) -> tuple[Kind, int, ImageSize] | None:
        """See `SizedBackbone`."""
        if "num_features" not in state:
            return None
        width, last = int(state["num_features"]), [name for name in state if name.endswith(".weight")]
        kinds: dict[int, Kind] = {0: "none", 1: "linear", 3: "mlp"}
        return kinds[len(last)], len(state[last[-1]]) if last else width, (1, width)
