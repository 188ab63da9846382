"""Augmentations: reproducible from (seed, step, image), each doing what its name says."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from megaclass.data.augment import AUGMENTATIONS, Augment, augment_, parse_augment
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import open_source
from megaclass.data.synthetic.faces import draw_faces
from megaclass_launch.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def faces() -> torch.Tensor:
    """(B, 3, H, W) in [-1, 1]."""
    drawn = draw_faces(0, np.arange(24), np.zeros(24, dtype=np.int64), 56)
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1


def changed(images, *names, share=1.0, seed=0, step=0, indices=None):
    images = images.clone()
    indices = np.arange(len(images)) if indices is None else indices
    augment_(images, Augment(tuple((name, share) for name in names)), seed, step, indices)
    return images


def mean_change(images, after):
    return (images - after).abs().mean().item()


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_augmentation_changes_images_and_keeps_their_range(faces, name):
    after = changed(faces, name)
    assert after.shape == faces.shape and after.dtype == torch.float32
    assert after.min() >= -1 and after.max() <= 1
    assert 0.005 < mean_change(faces, after) < 0.5


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_what_happens_to_an_image_depends_on_seed_step_and_index_alone(faces, name):
    whole = changed(faces, name, share=0.5, step=7)
    indices = np.arange(24)
    for rows in (slice(0, 5), slice(5, 24), [3], [20, 1, 4]):
        part = changed(faces[rows], name, share=0.5, step=7, indices=indices[rows])
        assert torch.allclose(part, whole[rows], atol=1e-5)
    assert not torch.equal(changed(faces, name, share=0.5, step=8), whole)
    assert not torch.equal(changed(faces, name, share=0.5, step=7, seed=1), whole)
    assert torch.equal(changed(faces, name, share=0.5, step=7), whole)


def test_the_share_is_the_share_of_images_that_change(faces):
    many = faces[:1].expand(2000, -1, -1, -1).clone()
    after = changed(many, "grey", share=0.2)
    is_changed = (after != many).flatten(1).any(1)
    assert abs(is_changed.float().mean().item() - 0.2) < 0.03


def test_grey_has_no_colour(faces):
    after = changed(faces, "grey")
    assert torch.equal(after[:, 0], after[:, 1]) and torch.equal(after[:, 1], after[:, 2])


def test_low_resolution_and_blur_remove_detail(faces):
    def detail(images):
        return (images[..., 1:] - images[..., :-1]).abs().mean()

    for name in ("low_resolution", "blur"):
        assert detail(changed(faces, name)) < 0.9 * detail(faces)


def test_a_plain_image_survives_what_only_moves_or_smooths():
    plain = torch.full((8, 3, 40, 40), 0.25)
    for name in ("crop", "low_resolution", "blur"):
        assert torch.allclose(changed(plain, name), plain, atol=1e-5)


def test_affine_keeps_shapes_round_and_moves_them_a_little():
    """A disc stays in one piece of about its size, also in an image that is not square."""
    v, u = torch.meshgrid(torch.arange(48) - 23.5, torch.arange(96) - 47.5, indexing="ij")
    disc = torch.where(u**2 + v**2 < 12**2, 1.0, -1.0).expand(200, 3, 48, 96).contiguous()
    after = (changed(disc, "affine")[:, 0] + 1) / 2
    area = after.sum((1, 2))
    middle_u, middle_v = (after * u).sum((1, 2)) / area, (after * v).sum((1, 2)) / area
    assert (area / (math.pi * 12**2)).log().abs().max() < 2 * math.log(1.25) + 0.1
    assert middle_u.abs().max() < 96 / 10 * 1.8 and middle_v.abs().max() < 48 / 10 * 1.8
    spread_u = ((after * u**2).sum((1, 2)) / area - middle_u**2).sqrt()
    spread_v = ((after * v**2).sum((1, 2)) / area - middle_v**2).sqrt()
    assert (spread_u / spread_v).min() > 0.6 and (spread_u / spread_v).max() < 1.6


def test_warp_moves_no_pixel_by_more_than_its_limit():
    """A column of light moves by at most 2 x 5 % of half the width, and not all of it by the same amount."""
    images = torch.full((50, 3, 64, 64), -1.0)
    images[:, :, :, 32] = 1
    light = (changed(images, "warp")[:, 0] + 1).clamp(min=1e-6)
    columns = (light * torch.arange(64)).sum(2) / light.sum(2)
    assert (columns - 32).abs().max() <= 2 * 0.05 * 32 + 1
    assert columns.std(1).max() > 0.3


def test_occlusion_hides_a_rectangle_of_one_colour(faces):
    after = changed(faces, "occlusion")
    for before_CHW, after_CHW in zip(faces, after, strict=True):
        rows, columns = torch.nonzero((before_CHW != after_CHW).any(0), as_tuple=True)
        hidden = after_CHW[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert hidden.flatten(1).std(1).max() < 1e-6
        assert hidden[0].numel() <= 0.3 * 56 * 56


def test_jpeg_is_as_wrong_as_a_real_one(faces):
    """Against Pillow at the middle of the range: the same kind and size of error, image by image on average."""
    pixels = ((faces + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    real = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=55, subsampling=0)
        real.append(np.asarray(Image.open(stream)))
    real_change = np.abs(np.stack(real).astype(float) - pixels).mean()
    ours = mean_change(faces, changed(faces, "jpeg")) * 127.5
    assert 0.6 < ours / real_change < 1.7


def test_sizes_that_are_no_multiple_of_eight_are_fine():
    images = torch.rand(4, 3, 37, 50) * 2 - 1
    assert changed(images, *AUGMENTATIONS).shape == images.shape


def test_settings_name_augmentations_and_shares():
    assert parse_augment("") is None
    assert parse_augment("crop:0.3, blur") == Augment((("crop", 0.3), ("blur", 0.2)))


@pytest.mark.parametrize("text", ["crap", "crop:2", "crop:0", "crop:x", "crop:", "crop,crop:0.1"])
def test_a_setting_that_cannot_be_read_is_quoted(text):
    with pytest.raises(ConfigError, match=r"data\.augment is"):
        parse_augment(text)


def test_batches_are_augmented_the_same_on_any_number_of_ranks():
    source, augment = open_source("debug"), parse_augment("crop,colour,occlusion")
    whole = next(BatchLoader(source, global_batch=12, augment=augment).batches(step=2)).prepared(CPU)
    parts = [
        next(BatchLoader(source, global_batch=12, augment=augment, rank=rank, world_size=3).batches(step=2))
        for rank in range(3)
    ]
    assert torch.allclose(torch.cat([part.prepared(CPU) for part in parts]), whole, atol=1e-5)
    plain = next(BatchLoader(source, global_batch=12).batches(step=2)).prepared(CPU)
    assert not torch.allclose(plain, whole)


def test_an_augmentation_is_one_function_and_one_line_and_changes_no_other(faces):
    """Its random numbers belong to its name: neither the table's order nor that of the settings matters."""
    before = {name: changed(faces, name) for name in AUGMENTATIONS}
    table = dict(AUGMENTATIONS)
    AUGMENTATIONS.clear()
    AUGMENTATIONS.update({"negative": lambda images, draws: -images, **dict(reversed(table.items()))})
    try:
        assert parse_augment("negative:1") == Augment((("negative", 1.0),))
        assert torch.equal(changed(faces, "negative"), -faces)
        for name, expected in before.items():
            assert torch.equal(changed(faces, name), expected)
    finally:
        AUGMENTATIONS.clear()
        AUGMENTATIONS.update(table)
