"""Data packed as pixels: the same batches as from the encoded images, without decoding any."""

import json

import numpy as np
import pytest
import torch

from megaclass.data.decode import decode_image
from megaclass.data.loader import BatchLoader
from megaclass.data.loading import reader
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools import pack_pixels
from megaclass.data.tools.pack import PackOptions, pack
from megaclass.data.tools.synthesize import synthesize
from megaclass.data.tools.verify import verify
from megaclass.errors import DataError

PIXELS = PackOptions(layout="pixels")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    synthesize(folder, num_identities=10, images_per_identity=7, image_size=24, num_pairs=2, num_processes=1)
    return open_source(folder)


class OneBroken:
    """A source of which the image 31 is damaged."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read(self, index):
        return b"damaged" if index == 31 else self._source.read(index)


def test_batches_of_pixels_are_those_of_the_encoded_images_and_nothing_is_decoded(drawn, tmp_path, monkeypatch):
    broken = OneBroken(drawn)
    assert pack(broken, tmp_path / "out", PIXELS, class_names=b"name\n" * 10, num_threads=2).num_images == 70
    packed = open_source(tmp_path / "out")
    assert (packed.num_classes, packed.image_size, packed.num_images) == (10, (24, 24), 70)
    assert (
        packed.unreadable.tolist() == [31]
        and "70 images of 10 classes, 24 × 24, uncompressed, 1 of them" in packed.describe()
    )
    assert len((tmp_path / "out" / "classes.txt").read_bytes().split()) == 10
    options = {"global_batch": 16, "max_bad_fraction": 1, "seed": 4}
    truth = list(BatchLoader(broken, **options).batches(num_steps=9))
    loader = BatchLoader(packed, **options)
    is_decoded = []
    decode = reader.decode_into
    monkeypatch.setattr(reader, "decode_into", lambda *given: is_decoded.append(1) or decode(*given))
    for batch, expected in zip(loader.batches(num_steps=9), truth, strict=True):
        assert torch.equal(batch.images, expected.images) and np.array_equal(batch.indices, expected.indices)
        assert torch.equal(batch.labels, expected.labels)
    # Only the batches of the unreadable row go image by image.
    assert loader.bad_images.indices == {31} and len(is_decoded) == 16 * loader.bad_images.num_bad
    # Any other size goes through the decoder and is fitted.
    small = BatchLoader(packed, image_size=(12, 16), **options).load(0, 0)
    assert torch.equal(small.images, BatchLoader(broken, image_size=(12, 16), **options).load(0, 0).images)
    # Tools that want encoded images get them, without loss.
    assert np.array_equal(decode_image(packed.read(5), "it"), decode_image(drawn.read(5), "it"))
    findings, _ = verify(str(tmp_path / "out"), num_threads=1)
    assert [name.endswith("image 31") for name, _ in findings.bad] == [True]


def test_packing_resumes_after_the_last_whole_image_and_remembers_unreadable_ones(drawn, tmp_path, monkeypatch):
    broken = OneBroken(drawn)
    pack(broken, tmp_path / "whole", PIXELS)
    monkeypatch.setattr(pack_pixels, "_BLOCK_IMAGES", 8)

    class Interrupted(OneBroken):
        def read(self, index):
            if index == 50:
                raise KeyboardInterrupt
            return super().read(index)

    with pytest.raises(KeyboardInterrupt):
        pack(Interrupted(drawn), tmp_path / "out", PIXELS)
    partial = tmp_path / ".out.partial"
    with (partial / "pixels.bin").open("r+b") as file:
        file.truncate(40 * 24 * 24 * 3 - 100)
    assert pack(broken, tmp_path / "out", PIXELS).num_resumed == 39
    for name in ("pixels.bin", "labels.bin", "pixels.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts | {"num_images": 71}, "has 560 bytes; pixels.json beside it tells of 568"),
        (lambda facts: facts | {"height": 25}, "has 120960 bytes; pixels.json beside it tells of 126000"),
        (lambda facts: facts | {"num_classes": 9}, "it has the class 9, but pixels.json tells of 9 classes"),
        (lambda facts: facts | {"height": 10**9}, "at most 33,554,432 pixels"),
        (lambda facts: facts | {"width": -1}, "width is -1; expected a positive number"),
        (lambda facts: facts | {"unreadable": [70]}, "in `unreadable` a list of rows"),
        (lambda facts: facts | {"version": 2}, "expected a JSON object with version 1"),
        (lambda facts: [1], "expected a JSON object"),
    ],
)
def test_files_that_do_not_agree_are_refused(drawn, tmp_path, change, message):
    pack(drawn, tmp_path / "out", PIXELS)
    path = tmp_path / "out" / "pixels.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "out")


def test_a_file_that_is_missing_or_becomes_shorter_is_an_error_and_no_crash(drawn, tmp_path):
    pack(drawn, tmp_path / "out", PIXELS)
    packed = open_source(tmp_path / "out")
    with (tmp_path / "out" / "pixels.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match="has become shorter"):
        BatchLoader(packed, global_batch=16, max_bad_fraction=1).load(0, 0)
    (tmp_path / "out" / "pixels.bin").unlink()
    with pytest.raises(DataError, match=r"pixels\.bin missing; found"):
        open_source(tmp_path / "out")
