"""Chunks, tiles and programs of the exponentials, as numbers."""

import pytest

from megaclass.head.gpu.tiling import TILES, Cut, Tiles, cut_classes

HOPPER_TILES = TILES[1][1]
NUM_SMS = 132


def cut(tiles: Tiles, num_images: int, num_classes: int) -> Cut:
    return cut_classes(
        tiles,
        num_images=num_images,
        num_classes=num_classes,
        bytes_per_class=2 * num_images,
        stored_bytes=18 << 30,
        num_sms=NUM_SMS,
    )


# The shapes of benchmarks/head-h200.md: one round of programs on nearly all multiprocessors.
@pytest.mark.parametrize(
    ("num_images", "num_classes", "splits"),
    [(1024, 1 << 20, 33), (4096, 1 << 20, 8), (1024, 213_000, 33), (4096, 423_526, 8), (8192, 156_378, 4)],
)
def test_one_round_of_programs_where_it_fills_the_gpu(num_images: int, num_classes: int, splits: int):
    assert cut(HOPPER_TILES, num_images, num_classes).splits == splits


@pytest.mark.parametrize("num_images", [1500, 3000, 6144, 10_000, 12_288, 17_408, 33_000])
def test_few_multiprocessors_are_idle_whatever_the_batch(num_images: int):
    tiles = HOPPER_TILES
    found = cut(tiles, num_images, 400_000)
    places, class_tiles = NUM_SMS * tiles.programs_per_sm, found.plane // tiles.classes
    image_tiles = -(-num_images // tiles.images)
    rounds = -(-image_tiles * found.splits // places)
    busy = image_tiles * class_tiles / (places * rounds * -(-class_tiles // found.splits))
    assert busy > 0.85


def test_no_program_is_without_classes():
    assert cut(HOPPER_TILES, 5, 40) == Cut(splits=1, plane=128, num_chunks=1)
    assert cut(HOPPER_TILES, 64, 20_000).splits <= 20_000 // 128 + 1
