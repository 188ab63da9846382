"""Pairs named in a text file: LFW's form and plain paths."""

import numpy as np
import pytest

from megaclass.errors import DataError
from megaclass.evaluation.protocols.pairs import read_pairs_list


@pytest.fixture
def folder(tmp_path):
    for name, count in (("Anna_A", 3), ("Bert", 2)):
        (tmp_path / name).mkdir()
        for number in range(1, count + 1):
            (tmp_path / name / f"{name}_{number:04d}.jpg").write_bytes(b"")
    return tmp_path


def _read(folder, text):
    (folder / "pairs.txt").write_text(text)
    return read_pairs_list(folder / "pairs.txt")


def test_lfws_form_is_read(folder):
    pairs = _read(folder, "2\t1\nAnna_A\t1\t3\nAnna_A\t2\tBert\t1\nBert\t1\t2\nBert\t2\tAnna_A\t1\n")
    assert [path.name for path in pairs.paths] == [
        "Anna_A_0001.jpg",
        "Anna_A_0003.jpg",
        "Anna_A_0002.jpg",
        "Bert_0001.jpg",
        "Bert_0001.jpg",
        "Bert_0002.jpg",
        "Bert_0002.jpg",
        "Anna_A_0001.jpg",
    ]
    np.testing.assert_array_equal(pairs.is_same_N, [True, False, True, False])
    assert pairs.num_folds == 2


def test_plain_paths_are_read(folder):
    text = "Anna_A/Anna_A_0001.jpg Bert/Bert_0001.jpg 0\n\nBert/Bert_0001.jpg Bert/Bert_0002.jpg 1\n"
    pairs = _read(folder, text)
    assert pairs.is_same_N.tolist() == [False, True]
    assert pairs.num_folds == 10
    assert pairs.paths[:2] == [folder / "Anna_A/Anna_A_0001.jpg", folder / "Bert/Bert_0001.jpg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Anna_A 1 9\n", r"Line 1 of .*pairs\.txt names image 9 of Anna_A"),
        ("Anna_A 1 2\nx.jpg y.jpg 1\n", r"Line 2 of .*pairs\.txt names .*x\.jpg, which does not exist"),
        ("Anna_A 1 2\n\nBert only\n", r"Line 3 of .*pairs\.txt is 'Bert only': expected"),
        ("10 300\n", r"pairs\.txt holds no pairs"),
        ("", r"pairs\.txt holds no pairs"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(folder, text, message):
    with pytest.raises(DataError, match=message):
        _read(folder, text)
