"""Soft shapes, stacked front to back, of which synthetic faces are drawn without loops over pixels or images.

A shape is a map of signed distances (negative inside, in units of half a head), turned into coverage with an edge one
pixel wide. Each layer takes its share of what the layers before it let through; the shares times the layers' colours
give the image. All maps are float32 of shape (B, H, W), or (B, 1, 1) for one value per image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Map = NDArray[np.floating[Any]]
Values = dict[str, Map]
Colour = tuple[Map, Map, Map]


@dataclass(frozen=True)
class Canvas:
    """The pixel grid: x to the right and y down, both in [-1, 1]."""

    size: int
    x_1HW: Map
    y_1HW: Map

    @staticmethod
    def of(size: int) -> Canvas:
        centres = ((np.arange(size, dtype=np.float32) + 0.5) * (2.0 / size) - 1.0).astype(np.float32)
        x_HW, y_HW = np.meshgrid(centres, centres)
        return Canvas(size, x_HW[None], y_HW[None])


class Layers:
    """Layers from front to back; each takes its share of the light that the layers before it let through."""

    def __init__(self, num_images: int, size: int, pixels_per_unit: Map) -> None:
        self.image_B3HW: Map = np.zeros((num_images, 3, size, size), dtype=np.float32)
        self._left_BHW: Map = np.ones((num_images, size, size), dtype=np.float32)
        self._scratch_BHW: Map = np.empty_like(self._left_BHW)
        self._pixels_per_unit = pixels_per_unit

    def coverage(self, distance: Map, softness: float = 1.0) -> Map:
        """Returns 1 inside and 0 outside, with an edge `softness` pixels wide. Overwrites `distance`."""
        distance *= self._pixels_per_unit * np.float32(-1.0 / softness)
        distance += 0.5
        np.clip(distance, 0, 1, out=distance)
        return distance

    def put(self, cover: Map, colour: Colour) -> None:
        """Puts a layer behind all layers so far. Overwrites `cover`."""
        cover *= self._left_BHW
        self._left_BHW -= cover
        # Sums in a fixed order instead of one matrix product: BLAS may round differently with another number of threads.
        for channel in range(3):
            np.multiply(cover, colour[channel], out=self._scratch_BHW)
            self.image_B3HW[:, channel] += self._scratch_BHW


def fixed(colour: tuple[float, float, float], like: Map) -> Colour:
    """Returns one colour per image of the batch to which `like` belongs."""
    red, green, blue = (np.full_like(like, value) for value in colour)
    return red, green, blue


def tone(tones: Map, value: Map) -> Colour:
    """Returns one of a few tones, chosen by a value in [0, 1]."""
    chosen = np.minimum((value * np.float32(len(tones))).astype(np.int64), len(tones) - 1)
    return tones[chosen, 0], tones[chosen, 1], tones[chosen, 2]


def steps(value: Map, num_steps: int) -> Map:
    """Rounds a value down to one of `num_steps` levels in [0, 1], so that many identities share one."""
    return np.asarray(
        np.minimum(np.floor(value * np.float32(num_steps)), np.float32(num_steps - 1)) / np.float32(num_steps - 1)
    )


def mix(first: Colour, second: Colour, share: Map | float) -> Colour:
    """Returns the first colour with a share of the second mixed in."""
    red, green, blue = (a + (b - a) * np.asarray(share, dtype=np.float32) for a, b in zip(first, second, strict=True))
    return red, green, blue
