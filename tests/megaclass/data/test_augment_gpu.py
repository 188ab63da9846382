"""The program that prepares batches on a GPU, run by Triton's interpreter, against the functions of augment.py.

tests/megaclass/test_triton_interpreter.py starts the interpreter's tests.
"""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.triton_interpreter import interpreted, outside

from megaclass.data import augment as reference
from megaclass.data import augment_gpu
from megaclass.data.augment import AUGMENTATIONS, Augment, augment_, mirror_, normalise, parse_augment
from megaclass.data.augment_gpu import prepare as prepare_module
from megaclass.data.augment_gpu import programs
from megaclass.data.augment_gpu.prepare import has_program, mirroring_key, prepare, split_augment
from megaclass.data.loader import _MIRROR_SALT, mirrored

INDICES = np.array([3, 2**40 + 1, 17, 0])


def pictures(height: int, width: int) -> torch.Tensor:
    """Smooth colours with some noise, in the channels-last layout of decoders."""
    generator = np.random.default_rng(0)
    coarse = torch.from_numpy(generator.uniform(0, 255, (len(INDICES), 3, 4, 4)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    noisy = smooth + torch.from_numpy(generator.normal(0, 8, smooth.shape).astype(np.float32))
    return noisy.clamp(0, 255).byte().contiguous(memory_format=torch.channels_last)


def by_reference(pixels, augment: Augment | None, seed: int, step: int, epoch: int, is_mirroring: bool) -> torch.Tensor:
    images = normalise(pixels)
    if is_mirroring:
        mirror_(images, mirrored(seed, epoch, INDICES))
    if augment is not None:
        augment_(images, augment, seed, step, INDICES)
    return images


def by_program(pixels, augment: Augment | None, seed: int, step: int, epoch: int, is_mirroring: bool) -> torch.Tensor:
    key = mirroring_key(seed, _MIRROR_SALT) if is_mirroring else None
    indices = torch.from_numpy(INDICES)
    return prepare(pixels, indices, mirror_key=key, epoch=epoch, augment=augment, seed=seed, step=step)


@interpreted
@pytest.mark.parametrize("is_mirroring", [False, True])
def test_without_augmentation_every_bit_is_that_of_the_reference(is_mirroring):
    pixels = pictures(19, 26)
    for epoch in (0, 3):
        prepared = by_program(pixels, None, 7, 5, epoch, is_mirroring)
        assert torch.equal(prepared, by_reference(pixels, None, 7, 5, epoch, is_mirroring))
        assert prepared.is_contiguous(memory_format=torch.channels_last)
    part = by_program(pixels[:, :, 2:-2], None, 7, 5, 3, is_mirroring)
    assert torch.equal(part, by_reference(pixels[:, :, 2:-2], None, 7, 5, 3, is_mirroring))


@interpreted
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_augmentation_is_that_of_the_reference(name):
    # Neither side is a multiple of 8.
    pixels = pictures(20, 29)
    augment = Augment(((name, 1.0),))
    expected = by_reference(pixels, augment, 3, 11, 0, False)
    difference = (by_program(pixels, augment, 3, 11, 0, False) - expected).abs()
    assert (expected - normalise(pixels)).abs().mean() > 0.001, "nothing was changed"
    # A coefficient that lies between two steps of the JPEG may be rounded either way, which changes its block.
    assert (difference > 2e-5).float().mean() <= (0.05 if name == "jpeg" else 0.001), difference.max()


@interpreted
def test_several_augmentations_change_the_same_images_in_the_same_order():
    pixels = pictures(24, 24)
    texts = ("grey:0.4,crop:0.5,occlusion:0.5,erase:0.3,colour:0.5,warp:0.4", "pick:2,crop,grey,colour,erase")
    for step, text in enumerate(texts):
        augment = parse_augment(text)
        expected = by_reference(pixels, augment, 9, step, 1, True)
        difference = (by_program(pixels, augment, 9, step, 1, True) - expected).abs()
        assert (difference > 1e-4).float().mean() < 0.001, difference.max()


@outside
def test_only_an_augmentation_of_the_users_own_and_those_after_it_leave_the_program_and_the_log_says_so(
    monkeypatch, caplog
):
    monkeypatch.setitem(AUGMENTATIONS, "crop", lambda images, draws: images)
    monkeypatch.setitem(AUGMENTATIONS, "own", lambda images, draws: images)
    split_augment.cache_clear()
    assert split_augment(None) == (None, None)
    known = parse_augment("blur,jpeg,erase")
    assert split_augment(known) == (known, None) and not caplog.text
    first, rest = split_augment(parse_augment("blur,jpeg:0.1,own,grey"))
    assert (first, rest) == (parse_augment("blur,jpeg:0.1"), parse_augment("own,grey"))
    assert "own of your own runs as a function of torch, and with it own, grey" in caplog.text
    # An augmentation of the package that the user has replaced is theirs, too.
    assert split_augment(parse_augment("crop,blur")) == (None, parse_augment("crop,blur"))
    picked = parse_augment("pick:2,blur,jpeg,own")
    assert split_augment(picked) == (None, picked)
    split_augment.cache_clear()


@outside
def test_without_triton_the_log_says_that_images_are_prepared_slowly(monkeypatch, caplog):
    monkeypatch.delattr(augment_gpu, "programs")
    monkeypatch.setitem(sys.modules, programs.__name__, None)
    prepare_module._programs.cache_clear()
    assert not has_program() and not has_program()
    prepare_module._programs.cache_clear()
    assert caplog.text.count("Triton is not installed") == 1


@interpreted
def test_augmentations_in_two_parts_change_what_all_of_them_together_change(monkeypatch):
    pixels, whole = pictures(24, 24), parse_augment("grey:0.4,crop:0.5,occlusion:0.5,colour:0.5")
    monkeypatch.setitem(AUGMENTATIONS, "occlusion", lambda images, draws: reference.occlusion(images, draws))
    split_augment.cache_clear()
    first, rest = split_augment(whole)
    split_augment.cache_clear()
    assert first is not None and rest is not None and len(first.shares) == len(rest.shares) == 2
    images = by_program(pixels, first, 9, 1, 1, True)
    augment_(images, rest, 9, 1, INDICES)
    difference = (images - by_reference(pixels, whole, 9, 1, 1, True)).abs()
    assert (difference > 1e-4).float().mean() < 0.001 and images.is_contiguous(memory_format=torch.channels_last)


@outside
def test_every_augmentation_of_the_table_is_known_to_the_program():
    for name, (number, function) in prepare_module._KNOWN.items():
        assert AUGMENTATIONS[name] is function and getattr(programs, name.upper()).value == number
    assert set(prepare_module._KNOWN) == set(AUGMENTATIONS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@outside
@pytest.mark.parametrize("name", [*AUGMENTATIONS, ""])
def test_a_gpu_gives_the_images_of_a_cpu(name):
    pixels = pictures(112, 112)
    augment = Augment(((name, 1.0),)) if name else None
    expected = by_reference(pixels, augment, 3, 4, 2, True)
    indices = torch.from_numpy(INDICES).cuda()
    key = mirroring_key(3, _MIRROR_SALT)
    prepared = prepare(pixels.cuda(), indices, mirror_key=key, epoch=2, augment=augment, seed=3, step=4).cpu()
    difference = (prepared - expected).abs()
    limit = {"jpeg": 0.05, "": 0.0}.get(name, 0.001)
    assert (difference > (2e-5 if name else 0.0)).float().mean() <= limit, difference.max()


@outside
def test_pick_gives_every_image_as_many_of_the_augmentations_as_asked():
    augment = parse_augment("pick:2,crop,blur,grey,colour,jpeg")
    assert augment == replace(
        Augment(tuple((name, 0.2) for name in ("crop", "blur", "grey", "colour", "jpeg"))), num_picked=2
    )
    indices = np.arange(4000)
    draws_ABP = np.stack([reference._draws(1, 2, indices, name) for name, _ in augment.shares])
    chosen_AB = reference._chosen(augment, draws_ABP)
    assert (chosen_AB.sum(0) == 2).all() and np.abs(chosen_AB.mean(1) - 0.4).max() < 0.03
