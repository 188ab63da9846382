"""The paper synthetic faces are drawn on: soft shapes, stacked front to back, nothing looped over pixels or images.

A shape is a map of signed distances (negative inside, in units of half a head), turned into coverage with an edge one
pixel wide. Each layer takes its share of what the layers before it let through; the shares times the layers' colours
give the image. All maps are float32 of shape (B, H, W), or (B, 1, 1) for one value an image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass
class Layers:
    """Front to back: every layer takes its part of the light the former ones let through."""

    pixels_per_unit: Map
    left: Map
    shares: list[Map] = field(default_factory=list)
    colours: list[Colour] = field(default_factory=list)

    def coverage(self, distance: Map, softness: float = 1.0) -> Map:
        distance *= self.pixels_per_unit * np.float32(-1.0 / softness)
        distance += 0.5
        np.clip(distance, 0, 1, out=distance)
        return distance

    def put(self, cover: Map, colour: Colour) -> None:
        cover *= self.left
        self.left -= cover
        self.shares.append(cover)
        self.colours.append(colour)

    def flatten(self) -> Map:
        """(B, 3, H, W)"""
        num_images, height, width = self.left.shape
        image_B3HW = np.zeros((num_images, 3, height, width), dtype=np.float32)
        # Sums in a fixed order, not a matrix product: BLAS may round differently for another number of threads.
        part = np.empty_like(self.left)
        for share, colour in zip(self.shares, self.colours, strict=True):
            for channel in range(3):
                np.multiply(share, colour[channel], out=part)
                image_B3HW[:, channel] += part
        return image_B3HW


def fixed(colour: tuple[float, float, float], like: Map) -> Colour:
    red, green, blue = (np.full_like(like, value) for value in colour)
    return red, green, blue


def tone(tones: Map, value: Map) -> Colour:
    chosen = np.minimum((value * np.float32(len(tones))).astype(np.int64), len(tones) - 1)
    return tones[chosen, 0], tones[chosen, 1], tones[chosen, 2]


def steps(value: Map, num_steps: int) -> Map:
    """The value rounded down to one of `num_steps` levels in [0, 1]: many identities share one."""
    return np.asarray(
        np.minimum(np.floor(value * np.float32(num_steps)), np.float32(num_steps - 1)) / np.float32(num_steps - 1)
    )


def mix(first: Colour, second: Colour, share: Map | float) -> Colour:
    """`share` of the second colour in the first."""
    red, green, blue = (a + (b - a) * np.asarray(share, dtype=np.float32) for a, b in zip(first, second, strict=True))
    return red, green, blue
