"""Images -> embeddings. A backbone takes (B, 3, H, W) in [-1, 1] and gives (B, D), not normalised."""

import difflib
from collections.abc import Callable
from functools import partial

from torch import nn

from megaclass.backbones.iresnet import IResNet
from megaclass.backbones.slim import SlimNet
from megaclass.errors import ConfigError

BACKBONES: dict[str, Callable[[int, int], nn.Module]] = {
    "slim": SlimNet,
    "iresnet18": partial(IResNet, (2, 2, 2, 2)),
    "iresnet34": partial(IResNet, (3, 4, 6, 3)),
    "iresnet50": partial(IResNet, (3, 4, 14, 3)),
    "iresnet100": partial(IResNet, (3, 13, 30, 3)),
    "iresnet200": partial(IResNet, (6, 26, 60, 6)),
}


def check_backbone(name: str, image_size: int) -> None:
    """Refuses what `build_backbone` could not build, before any process starts."""
    if name not in BACKBONES:
        close = difflib.get_close_matches(name, BACKBONES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(BACKBONES)}."
        raise ConfigError(f"backbone.name is {name!r}, which is not known; {hint}")
    if image_size % 16:
        raise ConfigError(f"Backbone {name} takes images whose side is a multiple of 16 pixels, not {image_size}.")


def build_backbone(name: str, *, embedding_dim: int, image_size: int) -> nn.Module:
    """A new backbone for square images of this size; its weights come from torch's global generator."""
    check_backbone(name, image_size)
    return BACKBONES[name](embedding_dim, image_size)
