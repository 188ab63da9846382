"""Finds out which backbone a state dict belongs to, by its names and shapes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megaclass.backbones.vit import PATCH_SIZE
from megaclass.errors import CheckpointError
from megaclass.image_size import ImageSize, compact_size

_IRESNET_BLOCKS: dict[tuple[int, ...], str] = {
    (2, 2, 2, 2): "iresnet18",
    (3, 4, 6, 3): "iresnet34",
    (3, 4, 14, 3): "iresnet50",
    (3, 13, 30, 3): "iresnet100",
    (6, 26, 60, 6): "iresnet200",
    (3, 128, 896, 3): "iresnet2060",
}
_VIT_SIZES = {(256, 12): "vit_t", (512, 12): "vit_s", (512, 24): "vit_b", (768, 24): "vit_l", (1024, 48): "vit_h"}
_MBF_WIDTHS = {128: "mbf", 256: "mbf_large"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneShape:
    """Arguments with which `build_backbone` builds the network that a state dict fits."""

    name: str
    embedding_dim: int
    image_size: ImageSize


def recognise(state: Mapping[str, Tensor], where: str, image_size: ImageSize | None = None) -> BackboneShape:
    """The backbone whose weights these are; `where` names the file in errors.

    image_size: where it is known. Weights alone tell squares; of rectangles most have only the area.
    """
    try:
        if "pos_embed" in state:
            return _vit(state, image_size)
        if "conv_sep.layers.0.weight" in state:
            return _mobilefacenet(state)
        if "layer1.0.conv1.weight" in state:
            return _iresnet(state, image_size)
        if "stem.0.weight" in state:
            return _with_fc(state, "slim", image_size, width=128)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{where} looks like a backbone but lacks {error} or has another size of it.") from error
    shown = ", ".join(list(state)[:3]) or "none"
    raise CheckpointError(
        f"{where} holds no backbone known here (first names: {shown}): expected an IResNet, MobileFaceNet or ViT of "
        f"InsightFace, or a slim network."
    )


def _iresnet(state: Mapping[str, Tensor], image_size: ImageSize | None) -> BackboneShape:
    blocks = tuple(_count(state, f"layer{stage}.") for stage in range(1, 5))
    return _with_fc(state, _IRESNET_BLOCKS[blocks], image_size, width=512)


def _with_fc(state: Mapping[str, Tensor], name: str, image_size: ImageSize | None, *, width: int) -> BackboneShape:
    """A last linear layer over the whole map, which is a sixteenth of the image's side."""
    embedding_dim, num_inputs = state["fc.weight"].shape
    image_size = image_size or 16 * _side(num_inputs // width)
    return BackboneShape(name=name, embedding_dim=embedding_dim, image_size=image_size)


def _mobilefacenet(state: Mapping[str, Tensor]) -> BackboneShape:
    height, width = state["features.layers.0.layers.0.weight"].shape[2:]
    return BackboneShape(
        name=_MBF_WIDTHS[state["layers.0.layers.0.weight"].shape[0]],
        embedding_dim=state["features.layers.2.weight"].shape[0],
        image_size=compact_size((16 * height, 16 * width)),
    )


def _vit(state: Mapping[str, Tensor], image_size: ImageSize | None) -> BackboneShape:
    _, num_patches, width = state["pos_embed"].shape
    # Sides are multiples of 16, and at most one of those gives a number of patches of 9 pixels.
    image_size = image_size or -(-PATCH_SIZE * _side(num_patches) // 16) * 16
    return BackboneShape(
        name=_VIT_SIZES[width, _count(state, "blocks.")],
        embedding_dim=state["feature.2.weight"].shape[0],
        image_size=image_size,
    )


def _side(area: int) -> int:
    side = math.isqrt(area)
    if side**2 != area:
        raise CheckpointError(
            f"The weights are of a backbone whose last map has {area} places, no square: the size of its images cannot be "
            f"told from them. Open the run folder or its model.safetensors, which say it."
        )
    return side


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})
