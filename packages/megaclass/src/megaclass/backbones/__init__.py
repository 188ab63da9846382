"""Backbones: networks from images (B, 3, H, W) in [-1, 1], or features (B, W), to embeddings (B, D), not normalised.

A new one is a file and a line in `BACKBONES`; with a static method `arguments_of` its state dicts are also recognised.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from megaclass.backbones.iresnet import IResNet
from megaclass.backbones.mobilefacenet import MobileFaceNet
from megaclass.backbones.rows import FeatureNet
from megaclass.backbones.slim import SlimNet
from megaclass.backbones.state_sizes import SizedBackbone
from megaclass.backbones.timm_network import TIMM_PREFIX, TimmNetwork, check_timm_name, timm_size
from megaclass.backbones.vit import VisionTransformer
from megaclass.config.read import own_class
from megaclass.errors import CheckpointError
from megaclass.image_size import ImageSize, has_rows, height_and_width, shown_size
from megaclass_launch.errors import ConfigError

BACKBONES: dict[str, Callable[[int, ImageSize], nn.Module]] = {
    "slim": SlimNet,
    "iresnet18": partial(IResNet, (2, 2, 2, 2)),
    "iresnet34": partial(IResNet, (3, 4, 6, 3)),
    "iresnet50": partial(IResNet, (3, 4, 14, 3)),
    "iresnet100": partial(IResNet, (3, 13, 30, 3)),
    "iresnet200": partial(IResNet, (6, 26, 60, 6)),
    "iresnet2060": partial(IResNet, (3, 128, 896, 3)),
    "mbf": partial(MobileFaceNet, (1, 4, 6, 2), 2),
    "mbf_large": partial(MobileFaceNet, (2, 8, 12, 4), 4),
    "vit_t": partial(VisionTransformer, 256, 12),
    "vit_s": partial(VisionTransformer, 512, 12),
    "vit_b": partial(VisionTransformer, 512, 24),
    "vit_l": partial(VisionTransformer, 768, 24),
    "vit_h": partial(VisionTransformer, 1024, 48),
    "none": partial(FeatureNet, "none"),
    "linear": partial(FeatureNet, "linear"),
    "mlp": partial(FeatureNet, "mlp"),
}
OF_FEATURES = ("none", "linear", "mlp")
"""Those of the table that take features instead of images."""


def check_backbone(name: str, image_size: ImageSize | None) -> None:
    """Raises a ConfigError, before any process starts, for what `build_backbone` could not build.

    image_size: None if it is not known yet: then only the name is checked.
    """
    if ":" in name:
        _own_backbone(name)
        return
    if name.startswith(TIMM_PREFIX):
        check_timm_name(name)
        return
    if name not in BACKBONES:
        close = difflib.get_close_matches(name, BACKBONES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(BACKBONES)}."
        raise ConfigError(f"backbone.name is {name!r}, which is not known; {hint}")
    if image_size is None:
        return
    if (name in OF_FEATURES) != (height_and_width(image_size)[0] == 1):
        needed = f"features: backbone.name={' or '.join(OF_FEATURES)}" if has_rows(image_size) else "images: iresnet50"
        raise ConfigError(
            f"backbone.name is {name}, but the data has samples of {shown_size(image_size)}. Choose a backbone for {needed}, "
            f"or package.module:Class of your own."
        )
    if name not in OF_FEATURES and any(side % 16 for side in height_and_width(image_size)):
        raise ConfigError(
            f"Backbone {name} takes images whose sides are multiples of 16 pixels, not {shown_size(image_size)}: "
            f"set data.size={proposed_size(image_size)}."
        )


def is_built_in(name: str) -> bool:
    """Tells whether `recognise` knows the backbone by its weights; networks of timm and of users are known by name only."""
    return name in BACKBONES


def may_be_named_by_file(name: str) -> bool:
    """Tells whether a file may choose this backbone: not the code of a user."""
    return name in BACKBONES or (name.startswith(TIMM_PREFIX) and ":" not in name)


def own_size(name: str) -> ImageSize | None:
    """Returns the size that a network of timm was made for; the others take any size."""
    return timm_size(name) if name.startswith(TIMM_PREFIX) and ":" not in name else None


def proposed_size(image_size: ImageSize) -> str:
    """Returns the closest size that every backbone takes, as data.size is written."""
    height, width = (min(4096, max(16, 16 * round(side / 16))) for side in height_and_width(image_size))
    return f"{height}" if height == width else f"[{height},{width}]"


def build_backbone(name: str, *, embedding_dim: int, image_size: ImageSize) -> nn.Module:
    """Builds a backbone for images of this size; its weights come from torch's global generator.

    name: one of BACKBONES, timm/NAME, or `package.module:Class` of your own, called with the same two arguments: the size
    is one number for squares and (height, width) for rectangles.
    """
    check_backbone(name, image_size)
    if name.startswith(TIMM_PREFIX):
        return TimmNetwork(name.removeprefix(TIMM_PREFIX), embedding_dim, image_size)
    if ":" not in name:
        return BACKBONES[name](embedding_dim, image_size)
    backbone = _own_backbone(name)(embedding_dim, image_size)
    if not isinstance(backbone, nn.Module):
        raise ConfigError(f"backbone.name {name!r} returned a {type(backbone).__name__}, not an nn.Module.")
    return backbone


def _own_backbone(name: str) -> Callable[[int, ImageSize], object]:
    return own_class("backbone.name", name, "mynets:Net")


# ---- which backbone a state dict belongs to, by its names and shapes ---------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneShape:
    """Arguments with which `build_backbone` builds the network that a state dict fits."""

    name: str
    embedding_dim: int
    image_size: ImageSize


def recognise(state: Mapping[str, Tensor], where: str, image_size: ImageSize | None = None) -> BackboneShape:
    """Returns the backbone to which the weights belong; `where` names the file in errors.

    Every backbone of the table whose class has `arguments_of` is tried. image_size: as for `SizedBackbone.arguments_of`.
    """
    sizes = ""
    try:
        for name, build in BACKBONES.items():
            network, fixed = (build.func, build.args) if isinstance(build, partial) else (build, ())
            found = network.arguments_of(state, image_size) if isinstance(network, SizedBackbone) else None
            if found is not None:
                *own, embedding_dim, found_size = found
                if tuple(own) == fixed:
                    return BackboneShape(name=name, embedding_dim=embedding_dim, image_size=found_size)
                sizes = f"{own}"
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{where} looks like a backbone but lacks {error} or has another size of it.") from error
    if sizes:
        raise CheckpointError(f"{where} looks like a backbone, but no built-in one has these sizes: {sizes}.")
    shown = ", ".join(list(state)[:3]) or "none"
    raise CheckpointError(
        f"{where} holds no backbone known here (first names: {shown}): expected an IResNet, MobileFaceNet or ViT of "
        f"InsightFace, or a slim network."
    )
