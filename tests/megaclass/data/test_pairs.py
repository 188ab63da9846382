"""Verification pairs: every form in which `.bin` files exist, and none in which they could do harm."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from megaclass.data.pair_file import PairSet, read_pairs, write_pairs
from megaclass.errors import DataError

IMAGES = [b"\xff\xd8one", b"two\x00", b"", b"four" * 100]
IS_SAME = [True, False]


def written(tmp_path, content: bytes):
    path = tmp_path / "lfw.bin"
    path.write_bytes(content)
    return path


def column(item: bytes) -> np.ndarray:
    return np.frombuffer(item, np.uint8)[:, None]


FORMS = {
    "tuple of bytes": (IMAGES, IS_SAME),
    "list of bytes": [IMAGES, IS_SAME],
    "flat arrays": ([np.frombuffer(item, np.uint8) for item in IMAGES], IS_SAME),
    "column arrays": ([column(item) for item in IMAGES], IS_SAME),
    "bytearrays": ([bytearray(item) for item in IMAGES], IS_SAME),
    "labels in an array": (IMAGES, np.array(IS_SAME)),
    "labels as NumPy scalars": (IMAGES, [np.bool_(same) for same in IS_SAME]),
    "labels as numbers": (IMAGES, [1, 0]),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_in_use_is_read(tmp_path, form, protocol):
    pair_set = read_pairs(written(tmp_path, pickle.dumps(form, protocol=protocol)))
    assert pair_set.images == IMAGES
    assert pair_set.is_same.tolist() == IS_SAME
    assert pair_set.is_same.dtype == bool


def test_files_of_python_2_are_read(tmp_path):
    # What Python 2 wrote for ([str, array of shape (3, 1)], [True]), protocol 2.
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x03K\x01tcnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\xff\xd8\xfetb"
    )
    content = b"\x80\x02((U\x04\xff\xd8ab" + array + b"l(\x88lt."
    pair_set = read_pairs(written(tmp_path, content))
    assert pair_set.images == [b"\xff\xd8ab", b"\xff\xd8\xfe"]
    assert pair_set.is_same.tolist() == [True]


def test_what_was_written_is_read_back_and_is_a_plain_pickle(tmp_path):
    path = tmp_path / "pairs.bin"
    write_pairs(path, PairSet(IMAGES, np.array(IS_SAME)))
    assert read_pairs(path).images == IMAGES
    # As InsightFace reads it.
    with path.open("rb") as file:
        bins, issame_list = pickle.load(file, encoding="bytes")
    assert bins == IMAGES and issame_list == IS_SAME
    assert [entry.name for entry in tmp_path.iterdir()] == ["pairs.bin"]


class Malicious:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


HARM = {
    "runs a command": (Malicious(os.system, "touch harmed"), r"(posix|nt)\.system"),
    "evaluates text": (Malicious(eval, "1"), "eval"),
    "opens a file": (Malicious(open, "/etc/passwd"), "open"),
    "other NumPy functions": (Malicious(np.zeros, 10), "numpy.zeros"),
    "loads another pickle": (Malicious(pickle.loads, b"N."), "loads"),
}


@pytest.mark.parametrize(("harm", "name"), HARM.values(), ids=HARM.keys())
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_by_name(tmp_path, monkeypatch, harm, name, protocol):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=name):
        read_pairs(written(tmp_path, pickle.dumps(([harm], IS_SAME), protocol=protocol)))
    assert not (tmp_path / "harmed").exists()


def test_a_request_for_memory_is_refused(tmp_path):
    with pytest.raises(DataError, match="bytes made of int"):
        read_pairs(written(tmp_path, pickle.dumps(([Malicious(bytes, 10**12)], IS_SAME))))
    with pytest.raises(DataError):
        read_pairs(written(tmp_path, b"\x80\x04\x8e" + (10**12).to_bytes(8, "little") + b"short."))
    with pytest.raises(DataError):
        read_pairs(written(tmp_path, b"\x80\x04Nr\xff\xff\xff\x7f."))


def test_counts_that_do_not_match_are_both_named(tmp_path):
    with pytest.raises(DataError, match="3 images and 2 labels"):
        read_pairs(written(tmp_path, pickle.dumps((IMAGES[:3], IS_SAME))))
    with pytest.raises(DataError, match="4 images and 1 labels"):
        write_pairs(tmp_path / "b.bin", PairSet(IMAGES, np.array([True])))


WRONG = {
    "not a pair": (pickle.dumps((IMAGES, IS_SAME, 3)), "found a tuple of 3"),
    "a number": (pickle.dumps(5), "found int '5'"),
    "an image that is text": (pickle.dumps((["a", "b"], [True])), "image 0 is str 'a'"),
    "an image of floats": (pickle.dumps(([np.zeros(3)] * 2, [True])), "type 'f8'"),
    "a label that is no truth value": (pickle.dumps((IMAGES, [True, 7])), "label 1 is int '7'"),
    "truncated": (pickle.dumps((IMAGES, IS_SAME))[:-10], "not a whole pickle"),
    "empty": (b"", "not a whole pickle"),
    "a JPEG": (b"\xff\xd8\xff\xe0" * 100, "not a whole pickle"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG.keys())
def test_anything_else_is_refused_with_what_was_found(tmp_path, content, message):
    with pytest.raises(DataError, match=r"lfw\.bin") as caught:
        read_pairs(written(tmp_path, content))
    assert message in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_pairs(tmp_path / "absent.bin")


def test_any_bytes_give_pairs_or_a_data_error(tmp_path):
    rng = np.random.default_rng(0)
    wholes = [pickle.dumps(form, protocol=protocol) for form in FORMS.values() for protocol in (0, 2, 5)]
    num_refused = 0
    for number in range(600):
        damaged = bytearray(wholes[number % len(wholes)])
        for position in rng.integers(0, len(damaged), rng.integers(1, 6)):
            damaged[position] = rng.integers(256)
        try:
            assert isinstance(read_pairs(written(tmp_path, bytes(damaged))), PairSet)
        except DataError:
            num_refused += 1
    assert num_refused > 100


MEBIBYTE = pickle.dumps(bytearray(2**20), protocol=5)[:-1]

GREEDY = {
    "a bytearray of 2 GiB in 15 bytes": b"\x80\x05\x96" + (2**31).to_bytes(8, "little") + b"\x88\x88\x86.",
    "one bytearray converted 4,000 times": b"(" + MEBIBYTE + b"q\x01" + b"h\x01" * 4000 + b"l" + b"]\x86.",
    "one array converted 4,000 times": pickle.dumps(([np.zeros(2**20, np.uint8)] * 4000, [True] * 2000), protocol=4),
    "one text encoded 4,000 times": b"X\0\0\x10\0" + b"a" * 2**20 + b"q\x010("
    + b"c_codecs\nencode\nh\x01X\x06\0\0\0latin1\x86R" * 4000 + b"l]\x86.",
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("content", GREEDY.values(), ids=GREEDY.keys())
def test_a_small_file_never_takes_much_memory(tmp_path, content):
    """In a process of its own, whose peak is its own."""
    path = written(tmp_path, content)
    script = """
import resource, sys
from pathlib import Path
from megaclass.data.pair_file import read_pairs
from megaclass.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_pairs(Path(sys.argv[1]))
except DataError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert int(found.stdout.split()[-1]) < 64 * 1024, found.stdout


@pytest.mark.parametrize(
    "content",
    [
        # A key of nested tuples, whose hash overflows the stack; a giant number as the whole content; the state of a list.
        b"}" + b")" + b"\x85" * 200_000 + b"Ns.",
        b"\x8b" + (2**20).to_bytes(4, "little") + b"\x7f" * 2**20 + b".",
        b"]}X\x06\0\0\0appendNsb.",
        b"\x8f(" + b")" + b"\x85" * 100_000 + b"\x90.",
    ],
)
def test_odd_pickles_are_refused(tmp_path, content):
    with pytest.raises(DataError, match="Cannot read the pairs"):
        read_pairs(written(tmp_path, content))
