"""Wrong labels, doubled identities and test identities in training: found, shown, edited, and applied to a new set."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import megaclass
from megaclass.checkpoint.class_names import class_list
from megaclass.cli import clean
from megaclass.cli.main import main
from megaclass.data.sources.features import write_features
from megaclass.data.sources.open_source import open_source
from megaclass.errors import DataError
from megaclass.evaluation.suspects import LabelFinding, close_pairs, find_suspects, merged_classes
from megaclass.inference import LoadedModel
from megaclass.inference.clean import apply, read_list, review, same_names, write_review

_CPU = torch.device("cpu")
_NUM_CLASSES, _PER_CLASS = 60, 12


def _unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def embedded():
    """60 classes of 12 images in 128 dimensions; cosines within a class are about 0.5."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(_NUM_CLASSES), _PER_CLASS)
    centres = _unit(rng.normal(size=(_NUM_CLASSES, 128)))
    return _unit(centres[labels] + 0.09 * rng.normal(size=(len(labels), 128))), labels


def test_flipped_labels_doubled_classes_and_outliers_are_found_and_nothing_else(embedded):
    rows, true_labels = embedded
    labels = true_labels.copy()
    flipped = np.arange(5, len(labels), 40)
    labels[flipped] = (labels[flipped] + 7) % _NUM_CLASSES
    # Class 3 is there twice: half of its images have the number 60.
    labels[np.flatnonzero(labels == 3)[::2]] = _NUM_CLASSES
    # One image is the opposite of its class.
    rows[100] = -_unit(rows[true_labels == true_labels[100]].sum(axis=0, keepdims=True))[0]
    rows[200] = np.nan
    found = find_suspects(rows, labels, _NUM_CLASSES + 1, _CPU).findings
    assert [(one.label, one.other) for one in found if one.kind == "doubled"] == [(_NUM_CLASSES, 3)]
    moved = {one.image: one.other for one in found if one.kind == "mislabelled"}
    assert moved.keys() == set(flipped.tolist()) and all(moved[image] == true_labels[image] for image in moved)
    assert [one.image for one in found if one.kind == "outlier"] == [100]


def test_labels_that_are_right_are_not_accused(embedded):
    assert find_suspects(*embedded, _NUM_CLASSES, _CPU).findings == []


def test_close_pairs_are_those_of_plain_float64(monkeypatch):
    monkeypatch.setattr("megaclass.evaluation.suspects._BLOCK_ROWS", 7)
    monkeypatch.setattr("megaclass.evaluation.suspects._BLOCK_COLUMNS", 14)
    rows = _unit(np.random.default_rng(1).normal(size=(50, 4)))
    cosines = rows.astype(np.float64) @ rows.T.astype(np.float64)
    want = {(i, j) for i in range(50) for j in range(i + 1, 50) if cosines[i, j] > 0.6}
    first, second = close_pairs(torch.from_numpy(rows), 0.6)
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == want and len(first) == len(want) > 20


def test_a_model_that_tells_nothing_apart_is_an_error():
    rows = np.ones((4000, 4), dtype=np.float32) / 2
    with pytest.raises(DataError, match="does not tell the classes apart well enough"):
        find_suspects(rows, np.repeat(np.arange(2000), 2), 2000, _CPU)


def test_chains_of_doubled_classes_end_at_the_smallest_number():
    pairs = [(5, 4), (2, 4), (9, 5), (8, 7)]
    merges = [LabelFinding(kind="doubled", action="merge", label=a, other=b) for a, b in pairs]
    kept = LabelFinding(kind="doubled", action="keep", label=1, other=0)
    assert merged_classes([*merges, kept], 10).tolist() == [0, 1, 2, 3, 2, 2, 6, 7, 7, 2]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder of 13 people with 15 pictures each, and a run that was trained on it. Person 12 is person 5, and one picture
    of person 3 lies in the folder of person 4."""
    folder = tmp_path_factory.mktemp("clean")
    rng = np.random.default_rng(0)
    bases = [rng.integers(0, 256, (8, 8, 3)) for _ in range(12)]
    for person in range(13):
        for take in range(15):
            base = bases[3 if (person, take) == (4, 7) else 5 if person == 12 else person]
            pixels = np.kron(base, np.ones((8, 8, 1))) + rng.normal(scale=30, size=(64, 64, 3))
            file = folder / "photos" / f"person {person:02d}" / f"{take}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file)
    settings = {"epochs": 6, "run_dir": str(folder / "run"), "export": {"onnx": False}, "train": {"seed": 1}}
    megaclass.train(folder / "photos", **settings)
    return folder


def _rows(folder: Path) -> list[list[str]]:
    lines = (folder / "findings.tsv").read_text(encoding="utf-8").splitlines()
    return list(csv.reader(lines[2:], delimiter="\t"))


def _clean(work: Path, out: str, *more: str) -> int:
    return main(["data", "clean", str(work / "run"), "--out", str(work / out), *more])


@pytest.mark.ranks
def test_from_a_run_to_a_page_an_edited_list_and_a_new_set(work):
    assert _clean(work, "review") == 0
    rows = _rows(work / "review")
    assert [row[:2] + row[3:5] for row in rows] == [["merge", "doubled", "12", "5"], ["move", "mislabelled", "4", "3"]]
    assert "person 04/7.png | person 04 | person 03" in rows[1][7]
    page = (work / "review" / "findings.html").read_text(encoding="utf-8")
    assert page.count("<img") == 1 + 4 * 4 and "person 04/7.png" in page

    assert _clean(work, "review", "--apply", str(work / "new")) == 0
    new = open_source(work / "new")
    assert (new.num_images, new.num_classes) == (195, 12)
    assert np.bincount(new.labels).tolist() == [15, 15, 15, 16, 14, 30, *[15] * 6]
    assert list(class_list(str(work / "new"), new).names())[5] == b"person 05"

    # A person who sees that both are two people changes the first line, and throws the picture away.
    listed = work / "review" / "findings.tsv"
    text = listed.read_text(encoding="utf-8")
    listed.write_text(text.replace("merge\t", "keep\t").replace("move\t", "remove\t"), encoding="utf-8")
    assert _clean(work, "review", "--apply", str(work / "edited")) == 0
    edited = open_source(work / "edited")
    assert (edited.num_images, edited.num_classes) == (194, 13) and np.bincount(edited.labels)[4] == 14


@pytest.mark.ranks
def test_identities_of_a_test_are_found_in_the_training_data(work, tmp_path):
    (tmp_path / "test").mkdir()
    for person in ("person 02", "person 09"):
        (tmp_path / "test" / person).symlink_to(work / "photos" / person)
    assert _clean(work, "tested", "--tests", str(tmp_path / "test")) == 0
    found = [row for row in _rows(work / "tested") if row[1] == "in-test"]
    assert found[0][7].startswith(f"class person 02 of {tmp_path / 'test'} | ")
    assert [(row[0], row[3]) for row in found] == [("remove", "2"), ("remove", "9")]
    assert _clean(work, "tested", "--apply", str(work / "without")) == 0
    names = list(class_list(str(work / "without"), open_source(work / "without")).names())
    assert b"person 02" not in names and b"person 09" not in names and len(names) == 10


@pytest.mark.ranks
def test_a_test_that_is_not_there_shows_before_anything_is_embedded(work, monkeypatch, capsys):
    monkeypatch.setattr(LoadedModel, "embed_source", None)
    assert _clean(work, "untested", "--tests", str(work / "nowhere")) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("merge\t", "delete\t", "says 'delete' for 'doubled': expected merge, keep"),
        ("\t12\t5\t", "\t12\t99\t", "has '99' in the columns image to other_class: expected a number below 13"),
        ("merge\tdoubled", "merge\ttwice", "expected one of the kinds mislabelled, outlier, doubled, in-test"),
        ("# findings", "# other", "its first line must start with '# findings about the data "),
    ],
)
@pytest.mark.ranks
def test_a_mistake_in_the_edited_list_is_named_with_its_line(work, tmp_path, old, new, message):
    assert _clean(work, "edited-list") == 0
    text = (work / "edited-list" / "findings.tsv").read_text(encoding="utf-8")
    (tmp_path / "findings.tsv").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_list(tmp_path / "findings.tsv", open_source(work / "photos"))


@pytest.mark.ranks
def test_sets_are_joined_by_name_or_by_likeness(work, tmp_path, capsys):
    both = [str(work / "photos"), str(tmp_path / "more")]
    (tmp_path / "more").mkdir()
    for old, new in (("person 01", "person 01"), ("person 08", "unknown")):
        (tmp_path / "more" / new).symlink_to(work / "photos" / old)
    by_name = ["data", "merge", *both, "--out", str(tmp_path / "by-name"), "--apply", str(tmp_path / "named")]
    assert main(by_name) == 0
    named = open_source(tmp_path / "named")
    assert (named.num_images, named.num_classes) == (225, 14) and np.bincount(named.labels)[1] == 30

    assert main(["data", "merge", *both, "--like", str(work / "run"), "--out", str(tmp_path / "like")]) == 0
    pairs = sorted((int(row[3]), int(row[4])) for row in _rows(tmp_path / "like"))
    assert pairs == [(12, 5), (13, 1), (14, 8)]
    assert main(["data", "merge", str(tmp_path / "named"), both[0], "--out", str(tmp_path / "again")]) == 0
    assert main(["data", "merge", both[0], "--out", str(tmp_path / "one")]) == 2
    assert "needs two sets or more" in capsys.readouterr().err


@pytest.fixture
def five_people(tmp_path):
    """Five people with three pictures each."""
    for person in range(5):
        (tmp_path / "five" / f"person {person}").mkdir(parents=True)
        for take in range(3):
            pixels = np.full((16, 16, 3), 40 * person + take, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "five" / f"person {person}" / f"{take}.png")
    return open_source(tmp_path / "five")


def test_a_removed_identity_goes_with_its_doubles_and_the_images_moved_to_it(five_people, tmp_path):
    findings = [
        LabelFinding(kind="doubled", action="merge", label=3, other=1),
        LabelFinding(kind="mislabelled", action="move", label=0, image=2, other=3),
        LabelFinding(kind="mislabelled", action="move", label=3, image=9, other=4),
        LabelFinding(kind="outlier", action="remove", label=4, image=14),
        LabelFinding(kind="in-test", action="remove", label=1),
    ]
    apply(five_people, findings, tmp_path / "new", [f"person {number}" for number in range(5)])
    new = open_source(tmp_path / "new")
    assert np.bincount(new.labels).tolist() == [2, 3, 3]
    assert list(class_list(str(tmp_path / "new"), new).names()) == [b"person 0", b"person 2", b"person 4"]


def test_the_list_survives_a_spreadsheet_and_names_with_the_line_breaks_of_other_alphabets(five_people, tmp_path):
    findings = [LabelFinding(kind="doubled", action="merge", label=3, other=1)]
    write_review(tmp_path, five_people, "five", ["a", "b\u2028b", "c", "d\x85d", "e"], findings)
    listed = tmp_path / "findings.tsv"
    listed.write_bytes(b"\xef\xbb\xbf" + listed.read_bytes().replace(b"\n", b"\r\n"))
    assert [(one.label, one.other) for one in read_list(listed, five_people)] == [(3, 1)]


def test_only_images_with_one_label_each_are_looked_at(tmp_path):
    features = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    source = open_source(write_features(features, np.repeat(np.arange(3), 2), tmp_path / "features"))
    with pytest.raises(DataError, match=r"Only images are looked at, not .*6 rows of 3 classes"):
        review(None, source)


def test_names_that_are_not_text_stay_different(tmp_path):
    for name in (b"\xfe", b"\xff"):
        folder = tmp_path / "data" / os.fsdecode(name)
        folder.mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(folder / "0.png")
    assert same_names(clean._names(str(tmp_path / "data"), open_source(tmp_path / "data"))) == []
