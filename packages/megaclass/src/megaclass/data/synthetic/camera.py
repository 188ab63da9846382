"""Adds the effects of a camera to a synthetic face: light, colour cast, blur and noise, in that order."""

import numpy as np
from numpy.typing import NDArray

from megaclass.data.synthetic.layers import Map, Values


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
