"""How the GPU kernel cuts its classes into chunks; without Triton, so `megaclass plan` knows it on any machine."""

from dataclasses import dataclass
from functools import lru_cache

import torch

_CHUNK_BYTES = 1 << 30
"""Most exponentials of one chunk: large enough to fill the GPU, small compared with the centres."""
_LEAST_CHUNK_BYTES = 128 << 20
_START_TILES = 8
"""Time in which a program starts, as a number of tiles: it loads its images and waits for its first centres."""
GRADIENT_BYTES = 128 << 20
"""Gradient of the centres that waits for its update. Smaller ones that stay in the L2 cache gain less than launches cost."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the exponentials are cut into programs."""

    images: int
    classes: int
    width: int
    warps: int
    stages: int
    programs_per_sm: int = 1
    flatten: bool = False
    parts: int = 1
    """Number of parts in which a tile is stored; 1 with sub-centres. Halves take less shared memory, and on some GPUs fewer
    registers."""


# By compute capability: the first row that the device reaches. Shared memory a block may use: 227, 99, 163 KiB.
TILES: list[tuple[tuple[int, int], Tiles]] = [
    ((12, 0), Tiles(128, 128, 64, warps=8, stages=2)),
    ((9, 0), Tiles(128, 128, 64, warps=8, stages=3, programs_per_sm=2, flatten=True, parts=2)),
    ((8, 9), Tiles(128, 128, 64, warps=8, stages=2, parts=2)),
    ((8, 7), Tiles(128, 128, 64, warps=8, stages=3)),
    ((8, 6), Tiles(128, 128, 64, warps=8, stages=2, parts=2)),
    ((8, 0), Tiles(128, 128, 64, warps=8, stages=3)),
]
# Weights, a filter or a curriculum need more registers a thread; sub-centres keep the best cosine so far and the new
# one; float32 operands take twice the room.
LADEN_TILES = Tiles(128, 128, 64, warps=4, stages=3, programs_per_sm=2, flatten=True, parts=2)
SUBCENTRE_TILES = Tiles(128, 128, 64, warps=8, stages=2)
SMALL_TILES = Tiles(64, 64, 64, warps=8, stages=2)
FLOAT32_TILES = Tiles(64, 64, 32, warps=8, stages=2)


def tiles_for(capability: tuple[int, int], dtype: torch.dtype, num_subcentres: int, *, is_plain: bool) -> Tiles:
    """is_plain: without class weights, filter and curriculum."""
    if dtype == torch.float32:
        return FLOAT32_TILES
    if num_subcentres > 1:
        return SUBCENTRE_TILES if (9, 0) <= capability < (12, 0) else SMALL_TILES
    if not is_plain:
        return LADEN_TILES if (9, 0) <= capability < (10, 0) else SMALL_TILES
    return next(tiles for least, tiles in TILES if capability >= least)


@dataclass(frozen=True, slots=True)
class Cut:
    """Chunks of classes."""

    splits: int
    """Programs that share a tile of images."""
    plane: int
    """Classes of a chunk, but for the last one."""
    num_chunks: int


@lru_cache(maxsize=64)
def cut_classes(
    tiles: Tiles, *, num_images: int, num_classes: int, bytes_per_class: int, stored_bytes: int, num_sms: int
) -> Cut:
    """bytes_per_class: of the exponentials of one class, over all images and sub-centres."""
    # A chunk that is not kept takes room in addition to those that are: if little is kept, chunks are smaller.
    chunk_bytes = min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, stored_bytes // 4))
    num_chunks = max(1, -(-num_classes // max(tiles.classes, chunk_bytes // bytes_per_class)))
    # Without images and with the sample rate 0 there are no classes.
    per_chunk = max(1, -(-num_classes // num_chunks))
    splits = _choose_splits(
        -(-num_images // tiles.images), -(-per_chunk // tiles.classes), num_sms * tiles.programs_per_sm
    )
    # Every program gets as many tiles as the others, unless that would be much more than there is.
    even = tiles.classes * splits
    plane = round_up(per_chunk, even if per_chunk >= 16 * even else tiles.classes)
    return Cut(splits, plane, -(-num_classes // plane))


def _choose_splits(num_image_tiles: int, num_class_tiles: int, num_places: int) -> int:
    """Returns how many programs share a tile of images. num_places: for programs that run at the same time.

    One round of programs if they nearly fill the places; otherwise several, so few places are idle in the last one.
    """

    def duration(splits: int) -> int:
        num_rounds = -(-max(1, num_image_tiles) * splits // num_places)
        return num_rounds * (-(-num_class_tiles // splits) + _START_TILES)

    return min(range(1, num_places + 1), key=duration)


def next_power_of_2(number: int) -> int:
    """Returns the same as Triton's function of this name, which takes five microseconds."""
    return 1 << (number - 1).bit_length()


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
