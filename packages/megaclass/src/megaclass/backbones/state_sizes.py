"""Helpers with which a backbone reads its own sizes out of a state dict; see `SizedBackbone`."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from megaclass.errors import CheckpointError
from megaclass.image_size import ImageSize


@runtime_checkable
class SizedBackbone(Protocol):
    """A backbone whose state dicts can be recognised without knowing its name."""

    @staticmethod
    def arguments_of(state: Mapping[str, Tensor], image_size: ImageSize | None) -> tuple[Any, ...] | None:
        """Returns the constructor's arguments for the network that `state` fits; None: it is another network's.

        image_size: where it is known. Weights alone tell squares; most networks keep only the area of rectangles.
        """
        ...


def side_of(area: int) -> int:
    """Returns the side of a square feature map."""
    side = math.isqrt(area)
    if side**2 != area:
        raise CheckpointError(
            f"The weights belong to a backbone whose last feature map has {area} places, which is no square, so they do not "
            f"tell the size of its images. Open the run folder or its model.safetensors, which state it."
        )
    return side


def count_blocks(state: Mapping[str, Tensor], prefix: str) -> int:
    """Returns how many different names follow a prefix such as `layer1.`."""
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})
