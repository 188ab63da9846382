"""Folders as InsightFace and im2rec leave them, whole and damaged."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.recordio import Record, RecordWriter, image_record
from megaclass.errors import DataError
from megaclass_launch.errors import is_transient

MAGIC = bytes.fromhex("0a23d7ce")


def jpeg(grey: int, size: tuple[int, int] = (20, 24)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (grey, grey, grey)).save(stream, "JPEG")
    return stream.getvalue()


def write_folder(folder: Path, records: dict[int, Record], properties: str | None = "3,24,20") -> Path:
    folder.mkdir(exist_ok=True)
    with RecordWriter(folder / "train.rec") as writer:
        for key, record in records.items():
            writer.write(key, record)
    if properties is not None:
        (folder / "property").write_text(properties)
    return folder


def insightface_records() -> dict[int, Record]:
    images = {key: Record((float((key - 1) // 2),), jpeg(key)) for key in range(1, 7)}
    identities = {7 + label: Record((1.0 + 2 * label, 3.0 + 2 * label), b"") for label in range(3)}
    return {0: Record((7.0, 10.0), b""), **images, **identities}


def test_a_header_record_says_which_keys_are_images(tmp_path):
    source = open_source(write_folder(tmp_path, insightface_records()))
    assert (source.num_images, source.num_classes, source.image_size) == (6, 3, (24, 20))
    assert source.labels.tolist() == [0, 0, 1, 1, 2, 2] and source.labels.dtype == np.int64
    assert [source.read(index) for index in range(6)] == [jpeg(key) for key in range(1, 7)]
    assert source.describe() == f"InsightFace RecordIO at {tmp_path}: 6 images of 3 classes, 20 × 24"


def test_without_a_header_record_every_key_is_an_image(tmp_path):
    records = {5: Record((2.0,), jpeg(5)), 0: Record((0.0,), jpeg(0)), 9: Record((1.0,), jpeg(9))}
    source = open_source(write_folder(tmp_path, records))
    assert source.labels.tolist() == [0, 2, 1]
    assert source.read(1) == jpeg(5)
    assert "im2rec" in source.describe()


def test_the_first_of_several_labels_is_the_class(tmp_path):
    records = {0: Record((1.0, 0.5), jpeg(0)), 1: Record((2.0, 0.25, 7.0), jpeg(1))}
    assert open_source(write_folder(tmp_path, records)).labels.tolist() == [1, 2]


def test_records_split_anywhere_keep_their_label_and_image(tmp_path):
    mark = int.from_bytes(MAGIC, "little")
    records = {
        0: Record((1.0,), jpeg(0), id=mark),
        1: Record((2.0,), b"\xff\xd8\xff\xe0" + MAGIC + b"rest"),
        2: Record((0.0, 3.0), b"last", id2=mark << 32),
    }
    source = open_source(write_folder(tmp_path, records))
    assert source.labels.tolist() == [1, 2, 0]
    assert [source.read(index) for index in range(3)] == [record.payload for record in records.values()]


def test_without_property_classes_come_from_labels_and_size_from_the_first_image(tmp_path):
    source = open_source(write_folder(tmp_path, insightface_records(), properties=None))
    assert source.num_classes == 3
    assert source.image_size == (24, 20)


def test_beyond_the_range_of_float32_empty_payloads_tell_identities_from_images(tmp_path):
    records = insightface_records()
    records[0] = Record((17_091_658.0, 17_451_890.0), b"")
    assert open_source(write_folder(tmp_path, records)).num_images == 6


def test_classes_beyond_float32_are_read_from_id2_where_property_says_so(tmp_path):
    labels = [2**24, 2**24 + 1, 2**40]
    records = {key: image_record(label, jpeg(key), key, is_label_in_id2=True) for key, label in enumerate(labels)}
    source = open_source(write_folder(tmp_path, records, properties=f"{2**40 + 1},24,20\nlabels=id2\n"))
    assert source.labels.tolist() == labels and source.num_classes == 2**40 + 1
    # Without the word of the writer, or where a record contradicts it, nobody guesses.
    (tmp_path / "property").write_text(f"{2**40 + 1},24,20\n")
    with pytest.raises(DataError, match=r"key 0 .* label -1\.0"):
        open_source(tmp_path)
    records[1] = Record((3.0,), jpeg(1), id2=3)
    with pytest.raises(DataError, match=r"key 1 .* label 3\.0 and id2 3, but .* says labels=id2"):
        open_source(write_folder(tmp_path, records, properties=f"{2**40 + 1},24,20\nlabels=id2\n"))


def test_a_label_that_float32_cannot_hold_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(DataError, match=r"pack with 64-bit labels \(megaclass data pack --labels id2"):
        image_record(2**24, b"image", 1, is_label_in_id2=False)
    records = {0: Record((2.0**24 + 2,), jpeg(0))}
    with pytest.raises(DataError, match=r"in which float32.* is exact.* megaclass data pack --labels id2"):
        open_source(write_folder(tmp_path, records, properties=None))


def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_a_crash(tmp_path):
    source = open_source(write_folder(tmp_path, insightface_records()))
    whole = (tmp_path / "train.rec").read_bytes()
    with (tmp_path / "train.rec").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(DataError, match=r"train\.rec became shorter than the \d+ bytes that it had when it was opened"):
        source.read(3)
    (tmp_path / "train.rec").write_bytes(whole)
    assert source.read(3) == jpeg(4)


def test_a_disk_that_fails_for_a_moment_costs_no_image(tmp_path, monkeypatch):
    """The kernel itself answers EIO: pread of /proc/self/mem does, where no memory is mapped."""
    source = open_source(write_folder(tmp_path, insightface_records()))
    expected = BatchLoader(source, global_batch=2).load(0, 0)
    handle = source.reader._file.fileno()
    healthy, failing = os.dup(handle), os.open("/proc/self/mem", os.O_RDONLY)
    num_pauses = 0

    def pause(_seconds):
        nonlocal num_pauses
        num_pauses += 1
        if num_pauses == 2:
            os.dup2(healthy, handle)

    try:
        os.dup2(failing, handle)
        with pytest.raises(DataError, match=r"train\.rec, byte \d+: Input/output error") as caught:
            source.read(0)
        assert is_transient(caught.value)
        monkeypatch.setattr("megaclass.data.loading.reader.time.sleep", pause)
        loader = BatchLoader(source, global_batch=2)
        batch = loader.load(0, 0)
    finally:
        os.close(healthy)
        os.close(failing)
    assert num_pauses == 2 and loader.bad_images.num_bad == 0
    assert np.array_equal(batch.indices, expected.indices) and torch.equal(batch.images, expected.images)


def test_any_rec_file_is_opened_with_the_index_beside_it(tmp_path):
    write_folder(tmp_path, {0: Record((1.0,), jpeg(5))}, properties=None)
    for name in ("rec", "idx"):
        (tmp_path / f"train.{name}").rename(tmp_path / f"val.{name}")
    assert open_source(tmp_path).num_images == open_source(tmp_path / "val.rec").num_images == 1


def test_the_first_sound_image_gives_the_size_where_property_is_absent(tmp_path):
    records = {0: Record((0.0,), b"damaged"), 1: Record((0.0,), jpeg(1))}
    assert open_source(write_folder(tmp_path, records, properties=None)).image_size == (24, 20)


def test_a_source_travels_to_another_process_without_the_images(tmp_path):
    source = open_source(write_folder(tmp_path, {**insightface_records(), 1: Record((0.0,), b"x" * 100_000)}))
    pickled = pickle.dumps(source)
    assert len(pickled) < 5000
    assert pickle.loads(pickled).read(3) == source.read(3)


def test_a_folder_without_records_says_what_was_looked_for_and_found(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        open_source(tmp_path / "absent")
    with pytest.raises(DataError, match=r"looked for train\.rec and train\.idx, .* missing; the folder is empty"):
        open_source(tmp_path)
    for name in "gfedcba":
        (tmp_path / f"{name}.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"found a\.jpg, b\.jpg, c\.jpg, d\.jpg, e\.jpg and 2 more"):
        open_source(tmp_path)


BAD_RECORDS = {
    "a label beyond num_classes": ({4: Record((3.0,), jpeg(4))}, r"key 4 .* label 3, .*num_classes = 3.* \[0, 3\)"),
    "a negative label": ({4: Record((-1.0,), jpeg(4))}, r"key 4 .* label -1\.0"),
    "half a label": ({5: Record((0.5,), jpeg(4))}, r"key 5 .* label 0\.5"),
    "no number": ({5: Record((float("nan"),), jpeg(4))}, "key 5 .* label nan"),
    "a label that float32 cannot tell from the next": ({5: Record((2.0**24,), jpeg(4))}, "key 5 .* 16777216.*float32"),
    "no image": ({6: Record((2.0,), b"")}, "key 6 .* holds no image"),
    "a header with half a range": ({0: Record((6.5, 10.0), b"")}, "images end before key 6.5"),
    "a header that announces more": ({0: Record((12.0, 15.0), b"")}, "holds no image|announces 11 images"),
}


@pytest.mark.parametrize(("changed", "message"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_bad_record_is_named_by_its_key(tmp_path, changed, message):
    with pytest.raises(DataError, match=message):
        open_source(write_folder(tmp_path, {**insightface_records(), **changed}))


def test_a_missing_key_is_named(tmp_path):
    records = insightface_records()
    del records[3]
    with pytest.raises(
        DataError, match=r"announces 6 images, keys 1 to 6, but the index has 5 .*; the first missing key is 3"
    ):
        open_source(write_folder(tmp_path, records))


@pytest.mark.parametrize("text", ["", "3", "3,24", "3,24,20,1", "three,24,20", "-3,24,20", "0,24,20", "3;24;20"])
def test_a_bad_property_file_is_quoted(tmp_path, text):
    with pytest.raises(DataError, match=r"property: .*expected num_classes,height,width"):
        open_source(write_folder(tmp_path, insightface_records(), properties=text))


def test_an_index_that_belongs_to_another_file_is_noticed(tmp_path):
    write_folder(tmp_path, insightface_records())
    lines = (tmp_path / "train.idx").read_text().splitlines()
    for wrong, message in (
        ("4\t1000000", "key 4 starts at byte 1000000"),
        ("4\t44", "key 4 .* no record starts there"),
    ):
        (tmp_path / "train.idx").write_text("\n".join([*lines[:4], wrong, *lines[5:]]) + "\n")
        with pytest.raises(DataError, match=message):
            open_source(tmp_path)


def test_a_truncated_file_is_noticed_when_it_is_opened(tmp_path):
    write_folder(tmp_path, {key: Record((0.0,), jpeg(key)) for key in range(4)})
    whole = (tmp_path / "train.rec").read_bytes()
    (tmp_path / "train.rec").write_bytes(whole[:-40])
    with pytest.raises(DataError, match=r"train\.rec, byte .* the file ends after"):
        open_source(tmp_path)


def test_a_property_that_says_giant_images_is_refused_before_any_is_reserved(tmp_path):
    place = write_folder(tmp_path, {1: image_record(0, b"x", 1, is_label_in_id2=False)}, properties="1,99999,99999\n")
    with pytest.raises(DataError, match=r"property says that images have 99999 × 99999 pixels: at most 33,554,432"):
        open_source(place)
