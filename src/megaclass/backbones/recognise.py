"""A state dict without a word about itself -> which backbone it is, by its names and shapes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megaclass.backbones.vit import PATCH_SIZE
from megaclass.errors import CheckpointError

_IRESNET_BLOCKS: dict[tuple[int, ...], str] = {
    (2, 2, 2, 2): "iresnet18",
    (3, 4, 6, 3): "iresnet34",
    (3, 4, 14, 3): "iresnet50",
    (3, 13, 30, 3): "iresnet100",
    (6, 26, 60, 6): "iresnet200",
}
_VIT_SIZES = {(256, 12): "vit_t", (512, 12): "vit_s", (512, 24): "vit_b", (768, 24): "vit_l"}
_MBF_WIDTHS = {128: "mbf", 256: "mbf_large"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneShape:
    """What `build_backbone` needs to build the network a state dict fits."""

    name: str
    embedding_dim: int
    image_size: int


def recognise(state: Mapping[str, Tensor], where: str) -> BackboneShape:
    """The backbone whose weights these are; `where` names the file in errors."""
    try:
        if "pos_embed" in state:
            return _vit(state)
        if "conv_sep.layers.0.weight" in state:
            return _mobilefacenet(state)
        if "layer1.0.conv1.weight" in state:
            return _iresnet(state)
        if "stem.0.weight" in state:
            return _with_fc(state, "slim", width=128)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{where} looks like a backbone but lacks {error} or has another size of it.") from error
    shown = ", ".join(list(state)[:3]) or "none"
    raise CheckpointError(
        f"{where} holds no backbone known here (first names: {shown}): expected an IResNet, MobileFaceNet or ViT of "
        f"InsightFace, or a slim network."
    )


def _iresnet(state: Mapping[str, Tensor]) -> BackboneShape:
    blocks = tuple(_count(state, f"layer{stage}.") for stage in range(1, 5))
    return _with_fc(state, _IRESNET_BLOCKS[blocks], width=512)


def _with_fc(state: Mapping[str, Tensor], name: str, *, width: int) -> BackboneShape:
    """A last linear layer over the whole map, which is a sixteenth of the image's side."""
    embedding_dim, num_inputs = state["fc.weight"].shape
    return BackboneShape(name=name, embedding_dim=embedding_dim, image_size=16 * math.isqrt(num_inputs // width))


def _mobilefacenet(state: Mapping[str, Tensor]) -> BackboneShape:
    return BackboneShape(
        name=_MBF_WIDTHS[state["layers.0.layers.0.weight"].shape[0]],
        embedding_dim=state["features.layers.2.weight"].shape[0],
        image_size=16 * state["features.layers.0.layers.0.weight"].shape[-1],
    )


def _vit(state: Mapping[str, Tensor]) -> BackboneShape:
    _, num_patches, width = state["pos_embed"].shape
    # Sides are multiples of 16, and at most one of those gives a number of patches of 9 pixels.
    side = PATCH_SIZE * math.isqrt(num_patches)
    return BackboneShape(
        name=_VIT_SIZES[width, _count(state, "blocks.")],
        embedding_dim=state["feature.2.weight"].shape[0],
        image_size=-(-side // 16) * 16,
    )


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})
