"""Packing: any source into .rec or tar, in any order, whole or not at all, going on where it stopped."""

import io

import numpy as np
import pytest
from PIL import Image

from megaclass.data.decode import decode_image
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.record_index import open_index
from megaclass.data.sources.recordio import RecordReader
from megaclass.data.tools import pack as pack_module
from megaclass.data.tools.pack import PackOptions, pack
from megaclass.data.tools.unpack import unpack
from megaclass.errors import DataError


def jpeg(grey: int, size: int = 16) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (grey, grey, grey)).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def faces(tmp_path):
    for identity, greys in {"a": [10, 20, 30], "b": [], "c": [40], "d": [50, 60, 70, 80]}.items():
        (tmp_path / "faces" / identity).mkdir(parents=True)
        for grey in greys:
            (tmp_path / "faces" / identity / f"{grey}.jpg").write_bytes(jpeg(grey))
    return open_source(tmp_path / "faces")


def content(source) -> list[tuple[int, bytes]]:
    return sorted((int(source.labels[index]), source.read(index)) for index in range(source.num_images))


@pytest.mark.parametrize(
    "options",
    [
        PackOptions(),
        PackOptions(shuffle_seed=None),
        PackOptions(labels="id2"),
        PackOptions(layout="tar", images_per_shard=3),
        PackOptions(layout="tar", shuffle_seed=7),
    ],
    ids=["rec", "rec in order", "rec with 64-bit labels", "three shards", "one shard"],
)
def test_what_was_packed_is_read_back(faces, tmp_path, options):
    assert pack(faces, tmp_path / "out", options).num_images == 8
    packed = open_source(tmp_path / "out")
    assert content(packed) == content(faces)
    assert packed.num_classes == 4


def test_a_packed_rec_has_insightfaces_layout_in_shuffled_bytes(faces, tmp_path):
    pack(faces, tmp_path / "out")
    assert (tmp_path / "out" / "property").read_text() == "4,16,16\n"
    index, reader = open_index(tmp_path / "out" / "train.idx"), RecordReader(tmp_path / "out" / "train.rec")
    records = [reader.read(int(offset)) for offset in index.offsets]
    assert index.keys.tolist() == list(range(13))
    assert records[0].labels == (9.0, 13.0) and not records[0].payload
    assert [record.labels[0] for record in records[1:9]] == [0, 0, 0, 2, 3, 3, 3, 3]
    assert [record.labels for record in records[9:]] == [(1.0, 4.0), (4.0, 4.0), (4.0, 5.0), (5.0, 9.0)]
    assert np.any(np.diff(index.offsets[1:9]) < 0)
    assert "InsightFace RecordIO" in open_source(tmp_path / "out").describe()


def test_classes_beyond_float32_are_packed_as_64_bit_labels(tmp_path):
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "a.jpg").write_bytes(jpeg(1))
    (tmp_path / "list" / "label.txt").write_text(f"a.jpg\t{2**24}\na.jpg\t{2**24 + 1}\n")
    source = open_source(tmp_path / "list")
    assert pack(source, tmp_path / "out").labels_in_id2
    assert (tmp_path / "out" / "property").read_text() == f"{2**24 + 2},16,16\nlabels=id2\n"
    assert sorted(open_source(tmp_path / "out").labels) == [2**24, 2**24 + 1]
    with pytest.raises(DataError, match=r"exact only below 16,777,216.*--labels id2"):
        pack(source, tmp_path / "float", PackOptions(labels="float"))


@pytest.mark.parametrize("layout", ["rec", "tar"])
@pytest.mark.parametrize("stops_at", [1, 3, 7])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bytes(faces, tmp_path, monkeypatch, stops_at, layout):
    monkeypatch.setattr(pack_module, "_BLOCK_IMAGES", 1)
    options = PackOptions(layout=layout, images_per_shard=2)
    pack(faces, tmp_path / "whole", options)
    wholes = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}

    def stop(done, total):
        if done == stops_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(faces, tmp_path / "out", options, on_progress=stop)
    assert not (tmp_path / "out").exists()
    half = tmp_path / ".out.partial" / "train.rec"
    if half.exists():
        # As a kill leaves it: in the middle of a record.
        half.write_bytes(half.read_bytes() + wholes["train.rec"][:21])
    resumed = pack(faces, tmp_path / "out", options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == wholes
    assert resumed.num_resumed > 0 or stops_at < 3
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("layout", ["rec", "tar"])
def test_what_a_failed_run_left_does_not_block_one_with_other_data_or_options(faces, tmp_path, caplog, layout):
    caplog.set_level("INFO", "megaclass.data")

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(faces, tmp_path / "out", PackOptions(layout=layout), on_progress=stop)
    pack(faces, tmp_path / "fresh", PackOptions(shuffle_seed=1))
    assert pack(faces, tmp_path / "out", PackOptions(shuffle_seed=1)).num_resumed == 0
    assert "removed what an earlier run with other data or options left" in caplog.text
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "fresh").iterdir()}


def test_an_image_that_was_removed_after_a_failed_run_does_not_block_the_next_one(faces, tmp_path):
    bad = tmp_path / "faces" / "c" / "40.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"c/40\.jpg"):
        pack(faces, tmp_path / "out", PackOptions(image_size=16))
    bad.unlink()
    assert pack(open_source(tmp_path / "faces"), tmp_path / "out", PackOptions(image_size=16)).num_images == 7


def test_files_of_a_user_in_the_way_are_not_removed(faces, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"holds thesis\.tex, which pack did not write"):
        pack(faces, tmp_path / "out")
    assert (tmp_path / ".out.partial" / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_holds_something_is_left_alone(faces, tmp_path):
    pack(faces, tmp_path / "out")
    with pytest.raises(DataError, match="it exists already"):
        pack(faces, tmp_path / "out")


def test_images_are_resized_on_request(faces, tmp_path):
    pack(faces, tmp_path / "out", PackOptions(image_size=24), num_threads=2)
    packed = open_source(tmp_path / "out")
    assert packed.image_size == (24, 24)
    assert Image.open(io.BytesIO(packed.read(0))).size == (24, 24)


def test_images_are_fitted_to_a_rectangle_and_counted(faces, tmp_path):
    (tmp_path / "faces" / "c" / "41.jpg").write_bytes(jpeg(200, 48))
    mixed = open_source(tmp_path / "faces")
    assert pack(mixed, tmp_path / "as-is").num_other_size == 1
    packed = pack(mixed, tmp_path / "padded", PackOptions(image_size=(16, 32), fit="pad"))
    assert packed.num_other_size == 9
    source = open_source(tmp_path / "padded")
    assert source.image_size == (16, 32)
    pixels = decode_image(source.read(4), "c/41.jpg")
    assert pixels.shape == (16, 32, 3)
    assert pixels[:, :6].max() < 10 and pixels[:, 10:22].min() > 190 and pixels[:, 26:].max() < 10


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "GIF", "BMP", "WEBP"])
def test_shards_hold_images_of_every_format(tmp_path, kind):
    (tmp_path / "faces" / "a").mkdir(parents=True)
    Image.new("RGB", (16, 16), (9, 9, 9)).save(tmp_path / "faces" / "a" / "x.png", kind)
    pack(open_source(tmp_path / "faces"), tmp_path / "out", PackOptions(layout="tar"))
    assert decode_image(open_source(tmp_path / "out").read(0), "x").shape == (16, 16, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "PPM", "GIF", "BMP", "WEBP"])
def test_an_image_of_every_format_is_unpacked_under_the_suffix_of_its_content(tmp_path, kind):
    suffix = {"JPEG": ".jpg", "TIFF": ".tif"}.get(kind, f".{kind.lower()}")
    (tmp_path / "faces" / "a").mkdir(parents=True)
    Image.new("RGB", (16, 16), (9, 9, 9)).save(tmp_path / "faces" / "a" / "x.png", kind)
    unpack(open_source(tmp_path / "faces"), tmp_path / "out", class_names=[b"a"])
    assert [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")] == [
        f"a/00000000{suffix}"
    ]


def test_what_is_no_image_is_not_unpacked_but_named(faces, tmp_path):
    (tmp_path / "faces" / "c" / "40.jpg").write_bytes(b"no image at all")
    with pytest.raises(DataError, match=r"c/40\.jpg.*megaclass data verify DATA --repair OUT"):
        unpack(open_source(tmp_path / "faces"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_image_is_named(faces, tmp_path):
    (tmp_path / "faces" / "c" / "40.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"Cannot pack .*c/40\.jpg: it is empty"):
        pack(faces, tmp_path / "out")
