"""Augmentations of whole batches on the training device. They depend on (seed, step, image) alone, never on the batch or rank.

The functions here are the reference and run on CPUs. On a GPU augment_gpu/programs.py does the same in one launch with the same
random numbers, up to the first augmentation that it does not know; that one and those after it run here. Here the random
numbers, a few per image, are hashed on the host. Images are floats in [-1, 1]. Each augmentation gathers the images that it
changes, changes them together and puts them back. A new one is a function and a line in `AUGMENTATIONS`; named last in
data.augment it leaves all others fast.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from megaclass.keyed_random import combine64, mix64, name_key
from megaclass_launch.errors import ConfigError

_SALT = 0x6175676D656E74
_DEFAULT_SHARE = 0.2
PICK = "pick"
"""First word of a setting that gives every image a fixed number of augmentations."""
LOW_RESOLUTION_FACTORS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
# Random numbers per image and augmentation; the first decides whether the image is changed.
_NUM_DRAWS = 8


@dataclass(frozen=True)
class Augment:
    """Names of augmentations in the order of their application, each with the share of images that it changes."""

    shares: tuple[tuple[str, float], ...]
    num_picked: int = 0
    """If not 0, every image gets so many of the augmentations, chosen at random, and the shares do not matter."""


def parse_augment(text: str) -> Augment | None:
    """Parses a setting such as `crop:0.2,blur,jpeg:0.1`; the default share is 0.2. Returns None for an empty text.

    `pick:2,crop,blur,jpeg` gives every image two of those that are named, as RandAugment does.
    """
    shares = []
    num_picked = 0
    for number, part in enumerate(filter(None, (piece.strip() for piece in text.split(",")))):
        name, colon, given = part.partition(":")
        if name == PICK and number == 0 and given.isdigit() and int(given) > 0:
            num_picked = int(given)
            continue
        if num_picked and colon:
            raise ConfigError(
                f"data.augment is {text!r}: after {PICK}:{num_picked} names have no share, but one is {part!r}."
            )
        share = _number(given) if colon else _DEFAULT_SHARE
        if name not in AUGMENTATIONS or share is None or not 0 < share <= 1:
            raise ConfigError(
                f"data.augment is {text!r}: cannot read {part!r}; expected names with an optional share in (0, 1], such as "
                f"crop:0.2,blur,jpeg:0.1, or {PICK}:2,crop,blur,jpeg for two of them per image. Known: "
                f"{', '.join(AUGMENTATIONS)}."
            )
        shares.append((name, share))
    if len({name for name, _ in shares}) != len(shares):
        raise ConfigError(f"data.augment is {text!r}: each augmentation may be named once.")
    if num_picked > len(shares):
        raise ConfigError(
            f"data.augment is {text!r}: {PICK}:{num_picked} must be followed by at least {num_picked} augmentations."
        )
    return Augment(tuple(shares), num_picked) if shares else None


def augment_(images: Tensor, augment: Augment, seed: int, step: int, indices: NDArray[np.int64]) -> None:
    """Changes images (B, 3, H, W), floats in [-1, 1], in place."""
    draws_ABP = np.stack([_draws(seed, step, indices, name) for name, _ in augment.shares])
    for (name, _), draws_BP, is_changed_B in zip(augment.shares, draws_ABP, _chosen(augment, draws_ABP), strict=True):
        rows = np.flatnonzero(is_changed_B)
        if len(rows):
            rows_R = torch.from_numpy(rows).to(images.device)
            changed = AUGMENTATIONS[name](images[rows_R].contiguous(), torch.from_numpy(draws_BP[rows, 1:]))
            images[rows_R] = changed.clamp_(-1, 1)


def _chosen(augment: Augment, draws_ABP: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tells which augmentation (A) changes which image (B): by its share, or as one of those with the lowest first draws."""
    first_AB = draws_ABP[:, :, 0]
    if not augment.num_picked:
        return np.asarray(first_AB < np.array([share for _, share in augment.shares], dtype=np.float32)[:, None])
    rank_AB = np.argsort(np.argsort(first_AB, axis=0, kind="stable"), axis=0, kind="stable")
    return np.asarray(rank_AB < augment.num_picked)


def to_tensor(images_BHW3: NDArray[np.uint8]) -> torch.Tensor:
    """Returns (B, 3, H, W), contiguous and still uint8, which is a quarter of the traffic to the device."""
    return torch.from_numpy(images_BHW3).permute(0, 3, 1, 2).contiguous()


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Converts uint8 in [0, 255] to float32 in [-1, 1], as every InsightFace model expects."""
    return images.to(torch.float32).div_(255).sub_(0.5).div_(0.5)


def mirror_(images: Tensor, is_mirrored: NDArray[np.bool_]) -> None:
    """Mirrors the chosen images horizontally, in place."""
    rows_R = torch.from_numpy(np.flatnonzero(is_mirrored)).to(images.device)
    images[rows_R] = images[rows_R].flip(-1)


def crop(images: Tensor, draws: Tensor) -> Tensor:
    """Enlarges a part of 40 to 100 % of the area, of nearly the same shape, to the whole image."""
    draws = draws.to(images.device, non_blocking=True)
    area, shape = _between(draws[:, 0], 0.4, 1.0), _between(draws[:, 1], -0.2, 0.2).exp()
    width, height = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)
    zero = torch.zeros_like(width)
    left, top = (1 - width) * _between(draws[:, 2], -1, 1), (1 - height) * _between(draws[:, 3], -1, 1)
    theta = torch.stack([torch.stack([width, zero, left], 1), torch.stack([zero, height, top], 1)], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def affine(images: Tensor, draws: Tensor) -> Tensor:
    """Rotates by up to 15 degrees, scales by 0.8 to 1.25, shears by up to 0.2 and moves by up to a tenth of the size."""
    draws = draws.to(images.device, non_blocking=True)
    angle = _between(draws[:, 0], -math.pi / 12, math.pi / 12)
    scale, shape = (_between(draws[:, number], -0.22, 0.22).exp() for number in (1, 2))
    shear = _between(draws[:, 3], -0.2, 0.2)
    shift_u, shift_v = (_between(draws[:, number], -0.2, 0.2) for number in (4, 5))
    # The grid says where each new pixel comes from, so these are the inverses of what happens to the image. Rows are scaled
    # by the ratio of the sides, so a rotated rectangle is not sheared.
    ratio = images.shape[-2] / images.shape[-1]
    width, height = scale * shape.sqrt(), scale / shape.sqrt()
    row_u = torch.stack([width * angle.cos(), (shear * width - angle.sin()) * ratio, shift_u], 1)
    row_v = torch.stack([angle.sin() * height / ratio, height * angle.cos(), shift_v], 1)
    grid = F.affine_grid(torch.stack([row_u, row_v], 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def warp(images: Tensor, draws: Tensor) -> Tensor:
    """Bends the image by smooth waves of up to 5 % of its size, as no two hands write the same line."""
    draws = draws.to(images.device, non_blocking=True)
    height, width = images.shape[-2:]
    v = torch.linspace(-1, 1, height, device=images.device)[None, :, None]
    u = torch.linspace(-1, 1, width, device=images.device)[None, None, :]
    turn = 2 * math.pi
    phases = (draws * turn)[:, :, None, None]
    strength = _between(draws[:, 6], 0.0, 0.05)[:, None, None]
    # Two waves per direction: one over the whole image and one of half its length.
    moved_u = u + strength * ((v * turn / 4 + phases[:, 0]).sin() + (v * turn / 2 + u * turn / 4 + phases[:, 1]).sin())
    moved_v = v + strength * ((u * turn / 4 + phases[:, 2]).sin() + (u * turn / 2 + v * turn / 4 + phases[:, 3]).sin())
    grid = torch.stack([moved_u, moved_v], -1)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=True)


def low_resolution(images: Tensor, draws: Tensor) -> Tensor:
    """Shrinks by a factor from 1.5 to 6 and enlarges again, like a face far from the camera."""
    # A few sizes instead of one per image, so images of equal size are resized together. The choice is made on the host,
    # which otherwise would wait for the device.
    factors = LOW_RESOLUTION_FACTORS
    choice = (draws[:, 0] * len(factors)).long().clamp(max=len(factors) - 1)
    height, width = images.shape[-2:]
    for number, factor in enumerate(factors):
        rows = torch.nonzero(choice == number)[:, 0].to(images.device)
        if len(rows):
            small = (max(1, round(height / factor)), max(1, round(width / factor)))
            shrunk = F.interpolate(images[rows], small, mode="bilinear", antialias=True)
            images[rows] = F.interpolate(shrunk, (height, width), mode="bilinear")
    return images


def blur(images: Tensor, draws: Tensor) -> Tensor:
    """Blurs by a Gaussian with a standard deviation of 0.3 to 2 pixels at a width of 112."""
    draws = draws.to(images.device, non_blocking=True)
    radius = 4
    sigma = _between(draws[:, 0], 0.3, 2.0) * (images.shape[-1] / 112)
    taps = torch.arange(-radius, radius + 1, device=images.device)
    weights = (-(taps**2) / (2 * sigma[:, None] ** 2).clamp(min=1e-4)).exp()
    weights = (weights / weights.sum(1, keepdim=True))[:, :, None, None, None]
    for axis, padding in ((-1, (radius, radius, 0, 0)), (-2, (0, 0, radius, radius))):
        size = images.shape[axis]
        padded = F.pad(images, padding, mode="replicate")
        images = sum(
            (weights[:, tap] * padded.narrow(axis, tap, size) for tap in range(len(taps))), torch.zeros_like(images)
        )
    return images


def colour(images: Tensor, draws: Tensor) -> Tensor:
    """Changes brightness, contrast, saturation and hue slightly."""
    draws = draws.to(images.device, non_blocking=True)
    brightness, contrast, saturation = (
        _between(draws[:, number], low, high)[:, None, None, None]
        for number, (low, high) in enumerate([(-0.25, 0.25), (0.7, 1.3), (0.5, 1.5)])
    )
    images = images * contrast + brightness
    luma = _luma(images)
    images = luma + (images - luma) * saturation
    # Changing the hue rotates colours about the grey axis.
    angle = _between(draws[:, 3], -0.15, 0.15)
    cos, sin = angle.cos()[:, None, None], (angle.sin() / math.sqrt(3))[:, None, None]
    third = torch.full((3, 3), 1 / 3, device=images.device)
    cross = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], device=images.device)
    turn = cos * torch.eye(3, device=images.device) + (1 - cos) * third + sin * cross
    return torch.einsum("rij,rjhw->rihw", turn, images)


def grey(images: Tensor, draws: Tensor) -> Tensor:
    """Removes the colour."""
    return _luma(images).expand_as(images).clone()


def occlusion(images: Tensor, draws: Tensor) -> Tensor:
    """Covers 2 to 25 % of the image with a rectangle of one colour."""
    draws = draws.to(images.device, non_blocking=True)
    is_hidden = _rectangle(images, draws, area=(0.02, 0.25), shape=0.7)
    fill = _between(draws[:, 4:7], -1, 1)[:, :, None, None]
    return torch.where(is_hidden[:, None], fill, images)


def erase(images: Tensor, draws: Tensor) -> Tensor:
    """Covers 2 to 33 % of the image with a rectangle of noise (random erasing)."""
    height, width = images.shape[-2:]
    # The noise is a hash of the pixel's place and of two draws, so a GPU can compute the same.
    whole = (draws[:, 4:6].double().cpu().numpy() * 2**24).astype(np.uint64)
    keys_R = whole[:, 0] + (whole[:, 1] << np.uint64(24))
    bits_RN = mix64(keys_R[:, None] ^ mix64(np.arange(height * width, dtype=np.uint64))[None])
    noise_R3N = np.stack([(bits_RN >> np.uint64(shift)) & np.uint64(0xFF) for shift in (0, 8, 16)], axis=1)
    fill = torch.from_numpy(noise_R3N.astype(np.float32)).to(images.device).view(-1, 3, height, width) * (2 / 255) - 1
    draws = draws.to(images.device, non_blocking=True)
    is_hidden = _rectangle(images, draws, area=(0.02, 0.33), shape=1.2)
    return torch.where(is_hidden[:, None], fill, images)


def _rectangle(images: Tensor, draws: Tensor, area: tuple[float, float], shape: float) -> Tensor:
    """Returns which pixels (R, H, W) lie in a rectangle of a random area, shape and place."""
    areas, shapes = _between(draws[:, 0], *area), _between(draws[:, 1], -shape, shape).exp()
    height, width = images.shape[-2:]
    half_u, half_v = (areas * shapes).sqrt() / 2, (areas / shapes).sqrt() / 2
    v = ((torch.arange(height, device=images.device) + 0.5) / height)[None, :, None]
    u = ((torch.arange(width, device=images.device) + 0.5) / width)[None, None, :]
    centre_u, centre_v = draws[:, 2, None, None], draws[:, 3, None, None]
    return ((u - centre_u).abs() < half_u[:, None, None]) & ((v - centre_v).abs() < half_v[:, None, None])


def jpeg(images: Tensor, draws: Tensor) -> Tensor:
    """Adds the loss of a JPEG of quality 20 to 90: 8 x 8 cosine transforms, rounded by the standard's tables."""
    draws = draws.to(images.device, non_blocking=True)
    quality = 20 + (draws[:, 0] * 70).floor()
    scale = torch.where(quality < 50, 5000 / quality, 200 - 2 * quality) / 100
    basis, tables, to_ycc, to_rgb = (torch.from_numpy(values).to(images.device) for values in JPEG_CONSTANTS)
    steps = (tables[None] * scale[:, None, None, None]).round().clamp(1, 255)[:, :, None, None]
    height, width = images.shape[-2:]
    padded = F.pad(images, (0, -width % 8, 0, -height % 8), mode="replicate")
    ycc = torch.einsum("cd,rdhw->rchw", to_ycc, padded * 127.5)
    num_v, num_u = ycc.shape[-2] // 8, ycc.shape[-1] // 8
    blocks = ycc.reshape(-1, 3, num_v, 8, num_u, 8).transpose(3, 4)
    rounded = (basis @ blocks @ basis.T / steps).round() * steps
    ycc = (basis.T @ rounded @ basis).transpose(3, 4).reshape(ycc.shape)
    rgb = torch.einsum("cd,rdhw->rchw", to_rgb, ycc) / 127.5
    return rgb[..., :height, :width].contiguous()


AUGMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "crop": crop,
    "affine": affine,
    "warp": warp,
    "low_resolution": low_resolution,
    "blur": blur,
    "colour": colour,
    "grey": grey,
    "occlusion": occlusion,
    "erase": erase,
    "jpeg": jpeg,
}


def augmentation_key(seed: int, name: str) -> np.uint64:
    """Returns the key of an augmentation before step and image are mixed in."""
    return np.uint64(combine64(seed, _SALT, name_key(name)))


def _draws(seed: int, step: int, indices: NDArray[np.int64], name: str) -> NDArray[np.float32]:
    """Returns numbers uniform in [0, 1), (B, draws), that belong to one augmentation, by its name.

    The place of an augmentation in the table or in data.augment does not matter, so a new one changes no other.
    """
    key_B = combine64(seed, _SALT, name_key(name), step, indices.astype(np.uint64))
    bits_BP = combine64(key_B[:, None], np.arange(_NUM_DRAWS, dtype=np.uint64)[None])
    uniform_BP: NDArray[np.float32] = (bits_BP >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return uniform_BP


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + uniform * (high - low)


def _luma(images: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114], device=images.device)[None, :, None, None]
    return (images * weights).sum(1, keepdim=True)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _cosines() -> NDArray[np.float32]:
    """Returns the orthonormal cosine basis: row k is the k-th cosine over eight samples."""
    k, n = np.arange(8)[:, None], np.arange(8)[None]
    basis = np.cos((2 * n + 1) * k * np.pi / 16) * np.where(k == 0, np.sqrt(1 / 8), np.sqrt(2 / 8))
    return np.asarray(basis, dtype=np.float32)


# Annex K of the JPEG standard: quantisation steps for brightness and for colour.
_LUMA_STEPS = """
16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"""
_CHROMA_STEPS = """
17 18 24 47 99 99 99 99 18 21 26 66 99 99 99 99 24 26 56 99 99 99 99 99 47 66 99 99 99 99 99 99
99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99"""
_TO_YCC = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]], dtype=np.float32)
JPEG_CONSTANTS = (
    _cosines(),
    np.array([_LUMA_STEPS.split(), _CHROMA_STEPS.split(), _CHROMA_STEPS.split()], dtype=np.float32).reshape(3, 8, 8),
    _TO_YCC,
    np.linalg.inv(_TO_YCC),
)
