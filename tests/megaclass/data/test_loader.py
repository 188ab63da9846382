"""Batches for a rank: the same images for any number of ranks and workers, and from any step on."""

import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megaclass.data.loader import BatchLoader, mirrored
from megaclass.data.loading import reader as reader_module
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    synthesize(folder, num_identities=10, images_per_identity=7, image_size=24, num_pairs=2, num_processes=1)
    return open_source(folder)


def decode_with_pillow(source, index: int) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(source.read(index))).convert("RGB"))


def test_a_batch_holds_the_images_and_labels_it_names(source):
    batch = next(BatchLoader(source, global_batch=16, mirror=False).batches())
    assert batch.images.shape == (16, 3, 24, 24)
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.dtype == torch.int64
    for row, index in enumerate(batch.indices):
        assert batch.labels[row] == source.labels[index] == index // 7
        pixels = decode_with_pillow(source, int(index)).transpose(2, 0, 1)
        assert np.abs(batch.images[row].numpy().astype(int) - pixels).max() <= 2


def test_an_epoch_has_every_image_once(source):
    loader = BatchLoader(source, global_batch=16, keep_last=True, num_workers=3)
    batches = list(loader.batches(epoch=4))
    assert [(batch.epoch, batch.step) for batch in batches] == [(4, step) for step in range(5)]
    assert sorted(np.concatenate([batch.indices for batch in batches])) == list(range(70))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_see_one_batch_whatever_their_number(source, world_size):
    alone = list(BatchLoader(source, global_batch=17, seed=2).batches(epoch=1))
    ranks = [
        list(
            BatchLoader(source, global_batch=17, seed=2, rank=rank, world_size=world_size, num_workers=2).batches(
                epoch=1
            )
        )
        for rank in range(world_size)
    ]
    for step, whole in enumerate(alone):
        assert torch.equal(torch.cat([batches[step].images for batches in ranks]), whole.images)
        assert torch.equal(torch.cat([batches[step].labels for batches in ranks]), whole.labels)


def test_a_run_goes_on_from_any_step_across_epochs(source):
    loader = BatchLoader(source, global_batch=16, num_workers=2)
    assert loader.steps_per_epoch == 4
    whole = list(loader.batches(num_steps=11))
    assert [(batch.epoch, batch.step) for batch in whole[3:6]] == [(0, 3), (1, 0), (1, 1)]
    resumed = list(loader.batches(epoch=1, step=2, num_steps=5))
    for batch, expected in zip(resumed, whole[6:], strict=True):
        assert torch.equal(batch.images, expected.images) and torch.equal(batch.labels, expected.labels)


def test_half_of_the_images_are_mirrored_and_another_half_the_next_epoch(source):
    indices = np.arange(20_000)
    first, second = mirrored(0, 0, indices), mirrored(0, 1, indices)
    assert abs(first.mean() - 0.5) < 0.02 and abs((first == second).mean() - 0.5) < 0.02
    plain, both = (BatchLoader(source, global_batch=32, mirror=mirror) for mirror in (False, True))
    batch = next(both.batches())
    unmirrored = next(plain.batches()).prepared(CPU)
    is_mirrored = torch.from_numpy(mirrored(0, 0, batch.indices))
    assert 0 < is_mirrored.sum() < 32
    prepared = batch.prepared(CPU)
    assert torch.equal(prepared, torch.where(is_mirrored[:, None, None, None], unmirrored.flip(-1), unmirrored))
    assert torch.equal(torch.cat([batch.prepared(CPU, slice(0, 7)), batch.prepared(CPU, slice(7, 32))]), prepared)


def test_a_prepared_batch_is_what_every_insightface_model_expects(source):
    batch = next(BatchLoader(source, global_batch=8, mirror=False).batches())
    prepared = batch.prepared(CPU)
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(prepared, (batch.images.float() / 255 - 0.5) / 0.5, atol=1e-6)


def write_faces(folder: Path, sizes: list[int]) -> Path:
    for number, size in enumerate(sizes):
        path = folder / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2 * size, size), (200, 200, 200)).save(path)
    return folder


def test_images_of_another_size_are_fitted_as_asked_and_counted(tmp_path):
    source = open_source(write_faces(tmp_path, [8, 8, 8, 24, 40, 16]))
    for fit, top in (("pad", 0), ("crop", 200), ("squash", 200)):
        loader = BatchLoader(source, global_batch=6, image_size=(16, 16), fit=fit)
        batch = loader.load(0, 0)
        assert int(batch.images[:, :, 0].max()) == top, fit
        assert loader.num_resized == 6
        assert "6 of 6 images had another size and were fitted to 16 × 16" in loader.describe_resized()
    exact = BatchLoader(source, global_batch=6, image_size=(8, 16))
    exact.load(0, 0)
    assert exact.num_resized == 3


def test_an_image_on_which_a_decoder_fails_in_any_way_costs_one_image(tmp_path, monkeypatch):
    source = open_source(write_faces(tmp_path, [8, 8, 8, 8]))
    Image.new("RGB", (16, 8), (7, 7, 7)).save(source.path_of(2))
    odd, as_ever = source.read(2), Image.open

    def fail_on_it(stream, **options):
        if stream.getvalue() == odd:
            raise RuntimeError("odd")
        return as_ever(stream, **options)

    monkeypatch.setattr(Image, "open", fail_on_it)
    loader = BatchLoader(source, global_batch=4, max_bad_fraction=0.25)
    assert 2 not in loader.load(0, 0).indices
    assert loader.bad_images.indices == {2}


def test_images_are_resized_to_the_models_size(source):
    assert next(BatchLoader(source, global_batch=4, image_size=(32, 16)).batches()).images.shape == (4, 3, 32, 16)


class BrokenSource:
    """One image in ten is damaged."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read(self, index):
        return b"damaged" if index % 10 == 3 else self._source.read(index)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_bad_image_is_replaced_by_the_same_one_on_any_number_of_ranks(source, world_size, caplog):
    broken = BrokenSource(source)
    alone = BatchLoader(broken, global_batch=30, max_bad_fraction=1)
    ranks = [
        BatchLoader(broken, global_batch=30, max_bad_fraction=1, rank=rank, world_size=world_size, num_workers=2)
        for rank in range(world_size)
    ]
    whole = next(alone.batches(epoch=1))
    parts = [next(loader.batches(epoch=1)) for loader in ranks]
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    assert np.array_equal(whole.labels.numpy(), source.labels[whole.indices])
    assert not np.any(whole.indices % 10 == 3)
    assert alone.bad_images.num_bad >= len(alone.bad_images.indices) > 0
    for index in alone.bad_images.indices:
        assert f"key {index + 1}: 7 bytes that are not an image" in caplog.text


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_an_image_that_a_disk_refuses_for_a_moment_is_read_again_and_not_replaced(source, code, monkeypatch):
    """Every image, and each of two attempts by another kind of error: as the system raises it, and as a source wraps it."""
    expected = next(BatchLoader(source, global_batch=16).batches())
    attempts: dict[int, int] = {}

    class Refusing:
        def __getattr__(self, name):
            return getattr(source, name)

        def read(self, index):
            attempts[index] = attempts.get(index, 0) + 1
            if attempts[index] == 1:
                raise OSError(code, os.strerror(code))
            if attempts[index] == 2:
                raise DataError("Cannot read it.") from OSError(code, os.strerror(code))
            return source.read(index)

    monkeypatch.setattr(reader_module, "_READ_AGAIN_S", (0.001, 0.001, 0.001))
    loader = BatchLoader(Refusing(), global_batch=16)
    batch = next(loader.batches())
    assert np.array_equal(batch.indices, expected.indices) and torch.equal(batch.images, expected.images)
    assert loader.bad_images.num_bad == 0


def test_too_many_bad_images_stop_the_run_and_name_the_last(source):
    message = r"more than data\.max_bad_fraction = 0\.05 allows.*train\.rec, key \d*4: 7 bytes that are not an image"
    with pytest.raises(DataError, match=message):
        list(BatchLoader(BrokenSource(source), global_batch=32, num_workers=2, max_bad_fraction=0.05).batches())


def test_an_image_that_fails_in_every_epoch_counts_once(source):
    class OneBroken(BrokenSource):
        def read(self, index):
            return b"damaged" if index == 3 else self._source.read(index)

    loader = BatchLoader(OneBroken(source), global_batch=32, max_bad_fraction=1.5 / source.num_images)
    for epoch in range(6):
        list(loader.batches(epoch=epoch))
    assert loader.bad_images.num_bad > 2 and loader.bad_images.indices == {3}


def test_a_source_that_became_unreadable_ends_with_an_error(source):
    class Gone(BrokenSource):
        def read(self, index):
            raise DataError("the disk is gone")

    with pytest.raises(DataError, match=r"No image .* could be read in 100 attempts"):
        next(BatchLoader(Gone(source), global_batch=32, max_bad_fraction=1e9).batches())


@pytest.mark.parametrize("takes_borrowed", [False, True], ids=["as this Python counts", "as Python 3.14 counts"])
def test_the_memory_of_a_batch_is_used_again_only_when_nobody_holds_any_part_of_it(source, takes_borrowed, monkeypatch):
    if takes_borrowed:
        # There a call borrows a local variable and counts one reference less; the lambda itself adds one.
        count = sys.getrefcount
        monkeypatch.setattr(sys, "getrefcount", lambda thing: count(thing) - 2)
    loader = BatchLoader(source, global_batch=16)
    whole, part, row = loader.load(0, 0), loader.load(0, 1).images[3:5, 0], loader.load(0, 2).images.numpy()[1]
    held = {tensor.untyped_storage().data_ptr() for tensor in (whole.images, part, torch.from_numpy(row))}
    images = whole.images.clone(), part.clone(), row.copy()
    later = [loader.load(0, 3) for _ in range(20)]
    assert torch.equal(whole.images, images[0]) and torch.equal(part, images[1]) and np.array_equal(row, images[2])
    last = later[-1].images.data_ptr()
    assert last not in held
    del later[-1]
    assert loader.load(0, 0).images.data_ptr() == last


@pytest.mark.parametrize("order", ["images", "classes"])
def test_orders_reach_the_batches(source, order):
    loader = BatchLoader(source, global_batch=12, order=order, images_per_class=4)
    counts = np.unique(next(loader.batches()).labels.numpy(), return_counts=True)[1]
    assert (set(counts) == {4}) == (order == "classes")


def test_leaving_early_ends_the_threads(source):
    batches = BatchLoader(source, global_batch=2, num_workers=4).batches(num_steps=10_000)
    next(batches)
    assert any(thread.name.startswith("megaclass-data") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("megaclass-data") for thread in threading.enumerate())


LOAD_FOREVER = """
import sys
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import open_source
for batch in BatchLoader(open_source(sys.argv[1]), global_batch=8, num_workers=3).batches(num_steps=10**9):
    print(batch.step, flush=True)
"""


@pytest.mark.ranks
def test_workers_die_with_their_parent_because_they_live_in_it(source):
    command = [sys.executable, "-c", LOAD_FOREVER, str(source.reader.path.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        num_threads = len(list(Path(f"/proc/{process.pid}/task").iterdir()))
        process.kill()
    # Itself and its workers; libraries may have threads of their own.
    assert children == "" and num_threads >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch": 71}, "71 images is more than the 70 there are: InsightFace RecordIO"),
        ({"global_batch": 3, "world_size": 4}, "leaves some of the 4 ranks without any"),
        ({"global_batch": 7, "world_size": 4}, "leaves one of the 4 ranks with a single image"),
        ({"global_batch": 48, "world_size": 20, "keep_last": True}, "leaves one of the 20 ranks with a single image"),
        (
            {"global_batch": 11, "world_size": 2, "num_parts": 3},
            r"batch, of 11 images, gives one of the 2 ranks 5: too few for train\.accumulate = 3 parts of at least 2",
        ),
        (
            {"global_batch": 34, "keep_last": True, "num_parts": 13},
            r"batch, of 18 images, gives one of the 1 ranks 18: too few for train\.accumulate = 13 parts of at least 2",
        ),
        ({"global_batch": 11, "world_size": 2, "num_parts": 6, "fewest_in_part": 1}, "6 parts of at least 1"),
    ],
)
def test_a_batch_that_cannot_be_filled_is_refused(source, arguments, message):
    with pytest.raises(DataError, match=message):
        BatchLoader(source, **arguments)


def test_a_batch_that_can_just_be_cut_is_taken(source):
    assert BatchLoader(source, global_batch=11, world_size=2, num_parts=2).steps_per_epoch == 6
    assert BatchLoader(source, global_batch=11, world_size=2, num_parts=5, fewest_in_part=1).steps_per_epoch == 6
