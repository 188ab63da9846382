"""Pairs of images -> embeddings, every rank working on its part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.decode import decode_batch, normalise, to_tensor
from megaclass.data.pairs import PairSet
from megaclass.distributed.collectives import gather_blocks, group_rank, group_size
from megaclass.errors import DataError

_ALL_DECODED = -1


def embed_pairs(
    model: nn.Module,
    pair_set: PairSet,
    *,
    image_size: int,
    device: torch.device,
    batch_size: int = 64,
    group: dist.ProcessGroup | None = None,
    name: str = "the pairs",
) -> tuple[NDArray[np.float32], float]:
    """Normalised embeddings of all 2N images, pairs in consecutive rows, and XNorm: the same on every rank.

    An embedding is f(x) + f(mirrored x), normalised. XNorm is the mean norm of f over both flips. Every rank holds the
    encoded set and embeds a contiguous part of it, decoding batch by batch; the model comes back in the mode it was in.
    An image that does not decode is the same DataError on every rank; `name` is what it calls the set.

    Traffic: one all-gather of 1 integer a rank (did all images decode?), one of ceil(2N / W) x (D + 1) floats a rank.
    """
    num_images = len(pair_set.images)
    if num_images == 0:
        raise DataError(f"Nothing to embed: {name} hold no images.")
    part = part_of_rank(num_images, group_rank(group), group_size(group))
    rows, failed = _embed_part(model, pair_set.images, part, image_size, device, batch_size, name)
    # A rank that raised alone would leave the others waiting in the gather: all learn of it, and raise together.
    failed_W = gather_blocks(torch.tensor(failed, device=device), group)
    if failed_W.max() != _ALL_DECODED:
        _decode(pair_set.images, [int(failed_W[failed_W != _ALL_DECODED].min())], image_size, name)
    gathered = gather_blocks(torch.cat(rows), group).flatten(0, 1)[:num_images].cpu().numpy()
    return np.ascontiguousarray(gathered[:, :-1]), float(gathered[:, -1].mean(dtype=np.float64))


def part_of_rank(num_images: int, rank: int, num_ranks: int) -> list[int]:
    """Images this rank embeds: contiguous, and as many on every rank, as the collective wants.

    Places past the end hold the last image again. So every rank does the same work and learns D, even where there are
    fewer images than ranks.
    """
    part_size = -(-num_images // num_ranks)
    return [min(rank * part_size + place, num_images - 1) for place in range(part_size)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside the block; afterwards every module is in the mode it was in."""
    # Not model.train(): parts may have been frozen in eval mode on purpose.
    was_training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, is_training in was_training:
            module.training = is_training


def _embed_part(
    model: nn.Module,
    images: Sequence[bytes],
    part: Sequence[int],
    image_size: int,
    device: torch.device,
    batch_size: int,
    name: str,
) -> tuple[list[Tensor], int]:
    """Blocks of rows (see `_embed_batch`) and _ALL_DECODED, or those up to the first image that does not decode."""
    rows: list[Tensor] = []
    with evaluating(model):
        for start in range(0, len(part), batch_size):
            batch = part[start : start + batch_size]
            try:
                pixels = _decode(images, batch, image_size, name)
            except DataError:
                return rows, _first_undecodable(images, batch, image_size, name)
            rows.append(_embed_batch(model, pixels.to(device)))
    return rows, _ALL_DECODED


def _embed_batch(model: nn.Module, pixels_B: Tensor) -> Tensor:
    """(B, D + 1): the normalised embedding, and in the last column the mean norm of the two flips."""
    images_B = normalise(pixels_B)
    straight_BD, mirrored_BD = model(images_B).float(), model(images_B.flip(3)).float()
    norms_B1 = (straight_BD.norm(dim=1, keepdim=True) + mirrored_BD.norm(dim=1, keepdim=True)) / 2
    return torch.cat([nn.functional.normalize(straight_BD + mirrored_BD), norms_B1], dim=1)


def _decode(images: Sequence[bytes], indices: Sequence[int], image_size: int, name: str) -> Tensor:
    names = [f"image {index} of {name} (pair {index // 2})" for index in indices]
    return to_tensor(decode_batch([images[index] for index in indices], (image_size, image_size), names))


def _first_undecodable(images: Sequence[bytes], indices: Sequence[int], image_size: int, name: str) -> int:
    for index in indices:
        try:
            _decode(images, [index], image_size, name)
        except DataError:
            return index
    raise AssertionError("a batch failed to decode, yet each of its images decodes")
