"""Pairs of images -> embeddings, every rank working on its part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.decode import decode_image
from megaclass.data.pairs import PairSet
from megaclass.distributed.collectives import gather_blocks, group_rank, group_size
from megaclass.errors import DataError


def embed_pairs(
    model: nn.Module,
    pair_set: PairSet,
    *,
    image_size: int,
    device: torch.device,
    batch_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[NDArray[np.float32], float]:
    """Normalised embeddings of all 2N images, pairs in consecutive rows, and XNorm: the same on every rank.

    An embedding is f(x) + f(mirrored x), normalised. XNorm is the mean norm of f over both flips. Every rank holds the
    encoded set and embeds a contiguous part of it, decoding batch by batch; the model comes back in the mode it was in.

    Traffic: one all-gather of 1 integer a rank (did all images decode?), one of ceil(2N / W) x (D + 1) floats a rank.
    """
    num_images = len(pair_set.images)
    part_size = -(-num_images // group_size(group))
    # Parts have one size, as the collective wants: ranks past the end embed the last image again. So every rank learns
    # D, and none sits out a step in which others embed.
    part = [min(group_rank(group) * part_size + place, num_images - 1) for place in range(part_size)]
    rows: list[Tensor] = []
    # Ranks that raised alone would leave the others waiting in the gather; so all learn who failed, and raise together.
    first_failed = num_images
    with evaluating(model), torch.no_grad():
        for start in range(0, part_size, batch_size):
            batch = part[start : start + batch_size]
            try:
                pixels = decode_batch(pair_set.images, batch, image_size=image_size)
            except DataError:
                first_failed = next(index for index in batch if not _is_decodable(pair_set.images, index, image_size))
                break
            rows.append(_embed_batch(model, pixels, device))
    failed_W = gather_blocks(torch.tensor([first_failed], device=device), group)
    first_failed = int(failed_W.min())
    if first_failed < num_images:
        decode_batch(pair_set.images, [first_failed], image_size=image_size)
    gathered = gather_blocks(torch.cat(rows), group).flatten(0, 1)[:num_images].cpu().numpy()
    return np.ascontiguousarray(gathered[:, :-1]), float(gathered[:, -1].mean(dtype=np.float64))
