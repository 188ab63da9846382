"""Soft shapes, stacked front to back, of which synthetic faces are drawn without loops over pixels or images.

A shape is a map of signed distances (negative inside, in units of half a head), turned into coverage with an edge one
pixel wide. Each layer takes its share of what the layers before it let through; the shares times the layers' colours
give the image, which a camera then photographs. All maps are float32 of shape (B, H, W), or (B, 1, 1) for one value per image.
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
    """Rounds a value down to one of `num_steps` levels in [0, 1], so many identities share one."""
    return np.asarray(
        np.minimum(np.floor(value * np.float32(num_steps)), np.float32(num_steps - 1)) / np.float32(num_steps - 1)
    )


def mix(first: Colour, second: Colour, share: Map | float) -> Colour:
    """Returns the first colour with a share of the second mixed in."""
    red, green, blue = (a + (b - a) * np.asarray(share, dtype=np.float32) for a, b in zip(first, second, strict=True))
    return red, green, blue


# ---- the camera: light, colour cast, blur and noise, in that order ----


def photograph(
    image_B3HW: Map, position: tuple[Map, Map, Map], scene: Values, noise_seed: NDArray[np.uint32]
) -> NDArray[np.uint8]:
    """Returns (B, H, W, 3). `position` is the place of each pixel on the head: across, down and towards the viewer."""
    across, down, height = position
    light = across * scene["light_u"]
    light += down * scene["light_v"]
    light += 0.22 * height
    light += 0.85
    light = np.clip(light, 0.35, 1.45, out=light)
    light *= scene["exposure"]
    grey = image_B3HW[:, 0] * 0.3
    grey += image_B3HW[:, 1] * 0.55
    grey += image_B3HW[:, 2] * 0.15
    image_B3HW -= grey[:, None]
    image_B3HW *= scene["saturation"][:, None]
    image_B3HW += grey[:, None]
    image_B3HW *= light[:, None]
    cast_B311 = np.stack([scene["cast_red"], scene["cast_green"], scene["cast_blue"]], axis=1)
    image_B3HW *= cast_B311 * (1 - scene["haze"][:, None])
    image_B3HW += scene["haze"][:, None] * 0.7
    _blur(image_B3HW, scene["blur"][:, None])
    _add_noise(image_B3HW, scene["noise"], noise_seed)
    image_B3HW *= 255
    np.clip(image_B3HW, 0, 255, out=image_B3HW)
    return np.ascontiguousarray(image_B3HW.astype(np.uint8).transpose(0, 2, 3, 1))


def _blur(image_B3HW: Map, weight: Map) -> None:
    """Adds `weight` of both neighbours to each pixel, vertically, then horizontally; pixels at the edge stay."""
    for near, middle, far in (
        (np.s_[:, :, :-2], np.s_[:, :, 1:-1], np.s_[:, :, 2:]),
        (np.s_[..., :-2], np.s_[..., 1:-1], np.s_[..., 2:]),
    ):
        neighbours = image_B3HW[near] + image_B3HW[far]
        neighbours *= weight
        centre = image_B3HW[middle]
        centre *= 1 - 2 * weight
        centre += neighbours


def _add_noise(image_B3HW: Map, strength: Map, noise_seed: NDArray[np.uint32]) -> None:
    """Adds triangular noise, hashed from pixel and seed; each channel uses other bits of one hash."""
    num_images, _, height, width = image_B3HW.shape
    with np.errstate(over="ignore"):
        bits = np.arange(height * width, dtype=np.uint32)[None] * np.uint32(0x9E3779B1) + noise_seed[:, None]
        bits ^= bits >> np.uint32(16)
        bits *= np.uint32(0x85EBCA6B)
        bits ^= bits >> np.uint32(13)
        bits *= np.uint32(0xC2B2AE35)
        bits ^= bits >> np.uint32(16)
    for channel, shifts in enumerate(((0, 15), (10, 3), (20, 13))):
        first, second = ((bits >> np.uint32(shift)) & np.uint32(0x3FF) for shift in shifts)
        triangle = (first + second).astype(np.float32)
        triangle -= 1023
        triangle *= strength[:, 0] * (1 / 1023)
        image_B3HW[:, channel] += triangle.reshape(num_images, height, width)
