"""RecordIO as MXNet's tools write it: hand-made bytes first, then round trips and damage."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megaclass.data.sources.record_index import RecordIndex, open_index, write_index
from megaclass.data.sources.recordio import Record, RecordReader, RecordWriter
from megaclass.errors import DataError

MAGIC = bytes.fromhex("0a23d7ce")


def part(kind: int, content: bytes) -> bytes:
    padding = b"\0" * (-len(content) % 4)
    return MAGIC + struct.pack("<I", kind << 29 | len(content)) + content + padding


def header(flag: int = 0, label: float = 0.0, id_: int = 0, id2: int = 0) -> bytes:
    return struct.pack("<IfQQ", flag, label, id_, id2)


def reader_of(tmp_path: Path, content: bytes) -> RecordReader:
    path = tmp_path / "a.rec"
    path.write_bytes(content)
    return RecordReader(path)


def test_a_whole_record_is_header_and_payload(tmp_path):
    reader = reader_of(tmp_path, part(0, header(label=7.0, id_=11, id2=13) + b"image"))
    assert reader.read(0) == Record((7.0,), b"image", id=11, id2=13)


def test_several_labels_replace_the_scalar(tmp_path):
    reader = reader_of(tmp_path, part(0, header(flag=3, label=99.0) + struct.pack("<3f", 4, 5, 6) + b"image"))
    assert reader.read(0) == Record((4.0, 5.0, 6.0), b"image")


def test_parts_are_joined_by_the_mark_the_writer_dropped(tmp_path):
    first, middle, last = header() + b"abcd", b"efgh", b"ijk"
    reader = reader_of(tmp_path, part(1, first) + part(2, middle) + part(3, last) + part(0, header() + b"next"))
    assert reader.read(0).payload == b"abcd" + MAGIC + b"efgh" + MAGIC + b"ijk"
    assert reader.read(reader.next_record(0)).payload == b"next"


PAYLOADS = {
    "empty": b"",
    "padded by one": b"abc",
    "mark at the start": MAGIC + b"tail",
    "mark at the end": b"head" + MAGIC,
    "two marks in a row": b"head" + MAGIC + MAGIC + b"t",
    "mark off the 4-byte grid": b"ab" + MAGIC + b"cd",
    "only the mark": MAGIC,
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
@pytest.mark.parametrize("labels", [(3.0,), (1.0, 2.0)], ids=["one label", "two labels"])
def test_what_was_written_is_read_back(tmp_path, payload, labels):
    record = Record(labels, payload, id=5, id2=2**63)
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(9, record)
        writer.write(4, Record((0.0,), b"other"))
    index = open_index(tmp_path / "a.idx")
    assert index.keys.tolist() == [4, 9]
    reader = RecordReader(tmp_path / "a.rec")
    assert reader.read(int(index.offsets[1])) == record
    assert sorted(index.offsets) == [0, reader.next_record(0)]


def test_written_parts_never_hold_an_aligned_mark(tmp_path):
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(0, Record((0.0,), b"head" + MAGIC + b"tail"))
    assert (tmp_path / "a.rec").read_bytes() == part(1, header() + b"head") + part(3, b"tail")


def test_a_reader_travels_to_another_process_as_its_path(tmp_path):
    reader = reader_of(tmp_path, part(0, header() + b"x" * 100_000))
    pickled = pickle.dumps(reader)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).read(0) == reader.read(0)


BROKEN = {
    "no mark": (b"\0" * 64, 0, "expected the record mark 0xCED7230A, found 0x00000000"),
    "cut inside": (part(0, header() + b"x" * 100)[:-20], 0, "needs 124 bytes, but the file ends after 104"),
    "shorter than a header": (part(0, b"tiny"), 0, "4 bytes, expected at least the 24"),
    "labels that are not there": (part(0, header(flag=2**31)), 0, "announces 2147483648 labels"),
    "a later part": (part(2, header()), 0, "a later part of a split record"),
    "split and never finished": (part(1, header()) + part(0, header()), 0, "expected a further part of the record"),
    "past the end": (part(0, header()), 4000, "byte 4000: expected a record, but the file has 32 bytes"),
    "unknown kind": (part(5, header()), 0, "unknown kind of part 5"),
}


@pytest.mark.parametrize(("content", "offset", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_record_is_named_by_file_and_byte(tmp_path, content, offset, message):
    with pytest.raises(DataError, match=r"a\.rec, byte ") as caught:
        reader_of(tmp_path, content).read(offset)
    assert message in str(caught.value)


def test_an_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.rec is empty"):
        reader_of(tmp_path, b"")
    with pytest.raises(DataError, match="No such file"):
        RecordReader(tmp_path / "absent.rec")


@pytest.mark.parametrize("text", ["0\t0\n7\t32\n3\t96\n", "0\t0\r\n7\t32\r\n3\t96\r\n", "0\t0\n7\t32\n3\t96"])
def test_an_index_may_be_unordered_with_gaps_and_any_line_end(tmp_path, text):
    (tmp_path / "a.idx").write_bytes(text.encode())
    index = open_index(tmp_path / "a.idx")
    assert index.keys.tolist() == [0, 3, 7]
    assert index.offsets.tolist() == [0, 96, 32]


BAD_LINES = ["3", "3\t", "\t3", "3 4", "3\t4\t5", "-3\t4", "3\tx", "", "3\t1234567890123456789"]


@pytest.mark.parametrize("line", BAD_LINES, ids=[repr(line) for line in BAD_LINES])
def test_a_bad_line_of_an_index_is_named(tmp_path, line):
    (tmp_path / "a.idx").write_text(f"0\t0\n{line}\n5\t64\n")
    with pytest.raises(DataError, match=r"a\.idx, line 2"):
        open_index(tmp_path / "a.idx")


def test_a_key_occurs_once_in_an_index(tmp_path):
    (tmp_path / "a.idx").write_text("1\t0\n2\t32\n1\t64\n")
    with pytest.raises(DataError, match="key 1 more than once"):
        open_index(tmp_path / "a.idx")


def test_a_large_index_survives_the_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    index = RecordIndex(np.arange(30_000), rng.integers(0, 10**15, 30_000))
    write_index(tmp_path / "a.idx", index)
    assert np.array_equal(open_index(tmp_path / "a.idx").offsets, index.offsets)


def test_any_bytes_give_records_or_a_data_error(tmp_path):
    whole = part(0, header(label=1.0) + b"image-a") + part(1, header() + b"abcd") + part(3, b"efg") + part(0, header(2))
    rng = np.random.default_rng(0)
    path = tmp_path / "a.rec"
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.integers(0, len(whole), rng.integers(1, 4)):
            damaged[position] = rng.integers(256)
        path.write_bytes(damaged[: rng.integers(1, len(whole) + 1)])
        reader = RecordReader(path)
        for offset in (0, 40, 88):
            try:
                assert isinstance(reader.read(offset).payload, bytes)
            except DataError:
                num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize("num_bytes", [2**14 - 33, 2**14 - 32, 2**14 - 31, 2**17 + 1])
def test_a_payload_is_whole_however_long_it_is(tmp_path, num_bytes):
    payload = np.random.default_rng(0).bytes(num_bytes)
    for labels in (b"", struct.pack("<5000f", *range(5000))):
        content = part(0, header(flag=len(labels) // 4) + labels + payload)
        assert reader_of(tmp_path, content + part(0, header() + b"next")).read_payload(0) == payload


def test_the_search_for_a_mark_passes_over_megabytes_of_damage(tmp_path):
    damage = b"\0" * (2**20 + 4) + b"x" + MAGIC + b"xxx"
    reader = reader_of(tmp_path, damage + part(0, header() + b"image"))
    assert reader.find_mark(4) == len(damage)
    assert reader.find_mark(len(damage) + 4) == reader.num_bytes
