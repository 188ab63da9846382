"""Launches the program that makes the backbone's input on a GPU (programs.py), and tells how much of it it can do."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megaclass.data import augment as reference
from megaclass.data.augment import JPEG_CONSTANTS, LOW_RESOLUTION_FACTORS, Augment, augmentation_key
from megaclass.keyed_random import combine64

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("megaclass.data")

_BLOCK = 1024
_NUM_WARPS = 8
_SIGN = 2**63
_NAMES = ("crop", "affine", "warp", "low_resolution", "blur", "colour", "grey", "occlusion", "jpeg", "erase")
# Augmentations of the program, with the function that each of them equals: one that a user has put in its place is not here.
_KNOWN = {name: (number, getattr(reference, name)) for number, name in enumerate(_NAMES, start=1)}
# Four bits per augmentation in one number.
_MAX_AUGMENTATIONS = 15


@lru_cache(maxsize=1)
def has_program() -> bool:
    """Tells whether Triton is there to compile the program; says once in the log that it is not."""
    if _programs() is None:
        _log.warning(
            "Triton is not installed: images are prepared by functions of torch, which take 3 to 17 times as long"
        )
    return _programs() is not None


@lru_cache(maxsize=8)
def split_augment(augment: Augment | None) -> tuple[Augment | None, Augment | None]:
    """Returns the augmentations that the program applies, and those that follow as functions of torch; None: there are none.

    An augmentation of the user's own, and what is named after it, belongs to the second part, which the log says once.
    """
    if augment is None:
        return None, None
    shares = augment.shares
    known = [name in _KNOWN and reference.AUGMENTATIONS[name] is _KNOWN[name][1] for name, _ in shares]
    num_first = min([*known, False].index(False), _MAX_AUGMENTATIONS)
    if num_first == len(shares):
        return augment, None
    # `pick` compares the draws of all augmentations of an image: they cannot be applied in two parts.
    num_first = 0 if augment.num_picked else num_first
    slow = ", ".join(name for name, _ in shares[num_first:])
    unknown = ", ".join(name for (name, _), is_known in zip(shares, known, strict=True) if not is_known)
    _log.warning(
        "data.augment: %s of your own runs as a function of torch, and with it %s, which takes several times as long; "
        "to keep the others fast, name your own last and give shares instead of `pick`",
        unknown or shares[num_first][0],
        slow,
    )
    first, rest = replace(augment, shares=shares[:num_first]), replace(augment, shares=shares[num_first:])
    return (first if num_first else None), rest


def prepare(
    images: Tensor,
    indices: Tensor,
    *,
    mirror_key: int | None,
    epoch: int,
    augment: Augment | None,
    seed: int,
    step: int,
) -> Tensor:
    """Returns float32 (B, 3, H, W) in [-1, 1], channels last. One launch; nothing is copied from the host after the first.

    images: uint8 (B, 3, H, W). indices: int64 (B,), on the same device. mirror_key: key of mirroring; None does not mirror.
    """
    from megaclass.triton_launch import launch

    programs = _programs()
    assert programs is not None
    batch, _, height, width = images.shape
    augment = augment or Augment(())
    keys, shares, sizes, tables = _constants(mirror_key or 0, augment, seed, height, width, images.device)
    out = torch.empty((batch, height, width, 3), dtype=torch.float32, device=images.device)
    padded = -(-height // 8) * 8 * (-(-width // 8) * 8)
    scratch = torch.empty((batch if augment.shares else 0) * 9 * padded, dtype=torch.float32, device=images.device)
    operations = sum(_KNOWN[name][0] << (4 * place) for place, (name, _) in enumerate(augment.shares))
    if batch:
        launch(
            programs.prepare_images,
            batch,
            images,
            out,
            indices,
            keys,
            shares,
            scratch,
            sizes,
            tables,
            step,
            epoch,
            *images.stride(),
            H=height,
            W=width,
            OPERATIONS=operations,
            COUNT=len(augment.shares),
            PICK=augment.num_picked,
            MIRROR=mirror_key is not None,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            num_stages=1,
        )
    return out.permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _constants(
    mirror_key: int, augment: Augment, seed: int, height: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns what the program reads in addition to the images: keys, shares, sizes of low_resolution, tables of the JPEG."""
    keys = [mirror_key, *(int(augmentation_key(seed, name)) for name, _ in augment.shares)]
    # The same 64 bits as a signed number.
    signed = [(key + _SIGN) % 2**64 - _SIGN for key in keys]
    sizes = [[max(1, round(side / factor)) for factor in LOW_RESOLUTION_FACTORS] for side in (height, width)]
    tables = np.concatenate([np.asarray(values, dtype=np.float32).ravel() for values in JPEG_CONSTANTS])
    return (
        torch.tensor(signed, dtype=torch.int64, device=device),
        torch.tensor([share for _, share in augment.shares] or [0.0], dtype=torch.float32, device=device),
        torch.tensor(sizes, dtype=torch.int32, device=device),
        torch.from_numpy(tables).to(device),
    )


@lru_cache(maxsize=8)
def mirroring_key(seed: int, salt: int) -> int:
    """Returns the key of mirroring before epoch and image are mixed in."""
    return int(combine64(seed, salt))


@lru_cache(maxsize=1)
def _programs() -> ModuleType | None:
    try:
        from megaclass.data.augment_gpu import programs
    except ImportError:
        return None
    return programs
