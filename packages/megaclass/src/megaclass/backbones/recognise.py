"""Finds out which backbone a state dict belongs to, by its names and shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megaclass.backbones import BACKBONES
from megaclass.backbones.state_sizes import SizedBackbone
from megaclass.errors import CheckpointError
from megaclass.image_size import ImageSize


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
