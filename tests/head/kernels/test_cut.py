"""Chunks, tiles and programs of the exponentials, as numbers."""

import pytest
import torch

from megaclass.head.kernels.cut import HOPPER_TILES, TILES, Cut, Tiles, cut_classes, tiles_for

GENERAL_TILES = TILES[1][1]
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


def test_hopper_has_a_program_of_its_own_for_plain_narrow_products_of_up_to_512_columns():
    def tiles(capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16, **changes: int) -> Tiles:
        options = {"num_subcentres": 1, "width": 512, "is_plain": True, **changes}
        return tiles_for(capability, dtype, **options)  # type: ignore[arg-type]

    assert tiles() == tiles(dtype=torch.float16) == tiles(width=64) == HOPPER_TILES
    others = [
        tiles((8, 0)),
        tiles((10, 0)),
        tiles(dtype=torch.float32),
        tiles(width=576),
        tiles(num_subcentres=2),
        tiles(is_plain=False),
        tiles(has_hopper_program=False),
    ]
    assert not any(other.by_hopper_program for other in others)


# The shapes of benchmarks/head-h200.md: one round of programs on nearly all multiprocessors.
@pytest.mark.parametrize(
    ("num_images", "num_classes", "splits"),
    [(1024, 1 << 20, 16), (4096, 1 << 20, 4), (1024, 213_000, 16), (4096, 423_526, 4), (8192, 156_378, 2)],
)
def test_one_round_of_programs_where_it_fills_the_gpu(num_images: int, num_classes: int, splits: int):
    assert cut(HOPPER_TILES, num_images, num_classes).splits == splits
    assert cut(GENERAL_TILES, num_images, num_classes).splits == splits * 2 + (num_images == 1024)


@pytest.mark.parametrize("num_images", [1500, 3000, 6144, 10_000, 12_288, 17_408, 33_000])
@pytest.mark.parametrize("tiles", [HOPPER_TILES, GENERAL_TILES], ids=["hopper", "general"])
def test_few_multiprocessors_are_idle_whatever_the_batch(tiles: Tiles, num_images: int):
    found = cut(tiles, num_images, 400_000)
    places, class_tiles = NUM_SMS * tiles.programs_per_sm, found.plane // tiles.classes
    image_tiles = -(-num_images // tiles.images)
    rounds = -(-image_tiles * found.splits // places)
    busy = image_tiles * class_tiles / (places * rounds * -(-class_tiles // found.splits))
    assert busy > 0.85


def test_no_program_is_without_classes():
    assert cut(HOPPER_TILES, 5, 40) == Cut(splits=1, plane=128, num_chunks=1)
    assert cut(HOPPER_TILES, 64, 20_000).splits <= 20_000 // 128 + 1
