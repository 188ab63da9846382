"""Packing: any source into .rec or tar, in any order, whole or not at all; unpacking; and bad files in all tools."""

import io

import numpy as np
import pytest
from PIL import Image

from megaclass.data.decode import decode_image
from megaclass.data.fingerprint import source_hash
from megaclass.data.loading import reader
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.record_index import open_index
from megaclass.data.sources.recordio import RecordReader
from megaclass.data.tools.inspect import inspect_source
from megaclass.data.tools.make_pairs import make_pairs
from megaclass.data.tools.pack import PackOptions, pack, unpack
from megaclass.data.tools.split import Split, split_data
from megaclass.data.tools.synthesize import synthesize
from megaclass.data.tools.verify import SubsetSource, verify
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
def test_a_run_that_was_cut_off_leaves_nothing(faces, tmp_path, layout):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(faces, tmp_path / "out", PackOptions(layout=layout), on_progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["faces"]


def damage_one_of_nine(folder) -> None:
    """A file that is cut off, next to eight sound ones."""
    (folder / "d" / "55.jpg").write_bytes(jpeg(55)[:300])


@pytest.mark.parametrize("options", [PackOptions(), PackOptions(image_size=24), PackOptions(layout="tar")], ids=str)
def test_images_that_do_not_decode_are_named_counted_and_left_out(faces, tmp_path, options, caplog):
    pack(faces, tmp_path / "sound", options)
    damage_one_of_nine(tmp_path / "faces")
    packed = pack(open_source(tmp_path / "faces"), tmp_path / "out", options, num_threads=2)
    assert (packed.num_images, packed.num_bad) == (8, 1)
    assert "skipped a bad image" in caplog.text and "d/55.jpg" in caplog.text
    # Keys and header have no gap: the files are those of the folder without the image.
    for file in (tmp_path / "sound").iterdir():
        if not file.name.endswith(".cache"):
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("damage", ["empty", "no image", "dangling"])
def test_one_rule_holds_for_bad_files_in_all_tools(faces, tmp_path, damage, caplog):
    bad = tmp_path / "faces" / "d" / "55.jpg"
    if damage == "dangling":
        bad.symlink_to(tmp_path / "nowhere.jpg")
    else:
        bad.write_bytes(b"" if damage == "empty" else b"no image at all")
    source = open_source(tmp_path / "faces")
    assert pack(source, tmp_path / "packed").num_bad == 1
    assert unpack(source, tmp_path / "unpacked") == 1
    assert len(list((tmp_path / "unpacked").rglob("*.jpg"))) == 8
    assert split_data(source, Split(by="images", share=0.5), tmp_path / "split").num_bad == 1
    assert make_pairs(source, 4).num_pairs == 4
    assert inspect_source(source)["num_unreadable"] == 1
    assert len(verify(tmp_path / "faces")[0].bad) == 1
    assert caplog.text.count("d/55.jpg") >= 3
    for name in ("10", "20", "30"):
        (tmp_path / "faces" / "a" / f"{name}.jpg").write_bytes(b"")
    source = open_source(tmp_path / "faces")
    for tool in (
        lambda: pack(source, tmp_path / "p2"),
        lambda: unpack(source, tmp_path / "u2"),
        lambda: split_data(source, Split(by="images", share=0.5), tmp_path / "s2"),
        lambda: make_pairs(source, 6),
    ):
        with pytest.raises(DataError, match=r"could not be read, more than the limit .* 0\.2 allows.*--repair"):
            tool()
    assert not (tmp_path / "p2").exists() and not (tmp_path / "u2").exists()


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
    pack(open_source(tmp_path / "faces"), tmp_path / "packed")
    unpack(open_source(tmp_path / "packed"), tmp_path / "out", class_names=[b"a"])
    assert [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")] == [
        f"a/00000000{suffix}"
    ]


def test_unpacked_images_keep_the_names_of_their_files(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder / "a").mkdir(parents=True)
        (tmp_path / folder / "a" / "my photo.JPEG").write_bytes(jpeg(30))
    unpack(open_source(tmp_path / "one"), tmp_path / "out", class_names=[b"a"])
    assert [path.name for path in (tmp_path / "out" / "a").iterdir()] == ["my photo.JPEG"]
    # A list may give one class to equal names in different folders.
    lines = "one/a/my photo.JPEG\t0\ntwo/a/my photo.JPEG\t0\n"
    (tmp_path / "label.txt").write_text(lines)
    unpack(open_source(tmp_path / "label.txt"), tmp_path / "out2")
    assert sorted(path.name for path in (tmp_path / "out2" / "0").iterdir()) == ["00000001.jpg", "my photo.JPEG"]


def test_identities_stay_apart_whose_names_would_be_one_folder(tmp_path):
    for label in range(4):
        (tmp_path / "own" / f"{label}").mkdir(parents=True)
        Image.new("RGB", (16, 16), (label, 0, 0)).save(tmp_path / "own" / f"{label}" / "0.png")
    source = open_source(tmp_path / "own")
    unpack(source, tmp_path / "out", class_names=[b"a/b", b"a_b", b"a_b (2)", b"c"])
    assert sorted(folder.name for folder in (tmp_path / "out").iterdir()) == ["a_b", "a_b (2)", "a_b (3)", "c"]
    with pytest.raises(DataError, match=r"Cannot write .*too long"):
        unpack(source, tmp_path / "long", class_names=[b"x" * 300] * 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "own"]


class Flaky(SubsetSource):
    """Some images fail at some of their reads."""

    def __init__(self, inner, faults):
        super().__init__(inner, np.arange(inner.num_images))
        self.faults = faults

    def read(self, index):
        fault = self.faults[index].pop(0) if self.faults.get(index) else None
        if fault == "passes":
            raise DataError("Cannot read it.") from OSError(5, "Input/output error")
        return b"no image" if fault == "bad" else super().read(index)


@pytest.fixture
def many(tmp_path):
    synthesize(tmp_path / "many", num_identities=5, images_per_identity=8, image_size=16, num_pairs=2, num_processes=1)
    return open_source(tmp_path / "many")


def test_an_image_that_turns_bad_while_the_files_are_written_again_is_left_out_as_well(many, tmp_path):
    source = Flaky(many, {3: ["bad"] * 9, 5: [None, "bad", "bad"]})
    assert pack(source, tmp_path / "packed").num_bad == 2
    assert open_source(tmp_path / "packed").num_images == 38


def test_an_error_that_passes_costs_no_image(many, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_READ_AGAIN_S", (0.001, 0.001))
    assert pack(Flaky(many, {3: ["passes"] * 2}), tmp_path / "packed").num_bad == 0
    assert unpack(Flaky(many, {3: ["passes"] * 2}), tmp_path / "unpacked") == 0
    assert source_hash(Flaky(many, {0: ["passes"]})) == source_hash(many)
