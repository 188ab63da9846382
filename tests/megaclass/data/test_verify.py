"""Verification of data sets: every kind of damage is found and named, and what is sound is saved."""

import re

import numpy as np
import pytest

from megaclass.cli.main import main
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.pack import PackOptions, pack
from megaclass.data.tools.synthesize import synthesize
from megaclass.data.tools.verify import verify
from megaclass.errors import DataError


@pytest.fixture
def folder(tmp_path):
    synthesize(tmp_path / "set", num_identities=3, images_per_identity=5, image_size=16, num_pairs=2, num_processes=1)
    return tmp_path / "set"


def offset_of(folder, key: int) -> int:
    return int((folder / "train.idx").read_text().splitlines()[key].split("\t")[1])


def overwrite(path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def edit_index(folder, edit) -> None:
    lines = (folder / "train.idx").read_text().splitlines()
    (folder / "train.idx").write_text("\n".join(edit(lines)) + "\n")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_sound_set_has_nothing_to_find(folder, num_threads):
    calls = []
    findings, sound = verify(folder, num_threads=num_threads, on_progress=lambda *done: calls.append(done))
    assert findings.is_sound and findings.num_images == sound.num_images == 15
    assert calls[-1] == (19, 19)


DAMAGE = {
    "a damaged JPEG": lambda folder: overwrite(folder / "train.rec", offset_of(folder, 4) + 60, b"\0" * 400),
    "no JPEG": lambda folder: overwrite(folder / "train.rec", offset_of(folder, 4) + 32, b"\0" * 8),
    "a label out of range": lambda folder: overwrite(
        folder / "train.rec", offset_of(folder, 4) + 12, np.float32(3).tobytes()
    ),
    "half a label": lambda folder: overwrite(
        folder / "train.rec", offset_of(folder, 4) + 12, np.float32(0.5).tobytes()
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_bad_record_is_named_by_its_key_and_left_out_of_the_copy(folder, tmp_path, damage):
    damage(folder)
    findings, sound = verify(folder, num_threads=2)
    assert [name.split(",")[0] for name, _ in findings.bad] == ["key 4"]
    pack(sound, tmp_path / "clean", PackOptions(shuffle_seed=None))
    again, clean = verify(tmp_path / "clean")
    assert again.is_sound and clean.num_images == 14
    assert open_source(tmp_path / "clean").num_classes == 3


STRUCTURE = {
    "truncated": (
        lambda folder: (folder / "train.rec").write_bytes(
            (folder / "train.rec").read_bytes()[: offset_of(folder, 9) + 50]
        ),
        r"bytes are skipped",
        8,
    ),
    "a record without a mark": (
        lambda folder: overwrite(folder / "train.rec", offset_of(folder, 4), b"\0\0\0\0"),
        r"expected the record mark",
        14,
    ),
    "no index": (lambda folder: (folder / "train.idx").unlink(), r"Cannot read the index .* No such file", 15),
    "an index that leaves one out": (
        lambda folder: edit_index(folder, lambda lines: lines[:4] + lines[5:]),
        "is not in the index",
        15,
    ),
    "a key twice": (
        lambda folder: edit_index(folder, lambda lines: [*lines, lines[3]]),
        "The index names key 3 2 times",
        15,
    ),
    "past the end": (
        lambda folder: edit_index(folder, lambda lines: [*lines, "99\t10000000"]),
        "key 99 starts at byte 10000000: no whole record starts there",
        15,
    ),
    "no index at all": (lambda folder: (folder / "train.idx").write_bytes(b"\xff" * 50), r"train\.idx, line 1", 15),
    "a header that announces more": (
        lambda folder: overwrite(folder / "train.rec", 32, np.float32(20).tobytes()),
        "announces 19 images, 15 were found",
        15,
    ),
    "a property that says nothing": (lambda folder: (folder / "property").write_text("?"), "expected num_classes", 15),
}


@pytest.mark.parametrize(("damage", "message", "num_sound"), STRUCTURE.values(), ids=STRUCTURE.keys())
def test_damage_to_the_structure_is_said_and_the_images_are_saved(folder, tmp_path, damage, message, num_sound):
    images = {open_source(folder).read(index) for index in range(15)}
    damage(folder)
    findings, sound = verify(folder)
    assert not findings.is_sound
    assert any(re.search(message, fault) for fault in findings.faults), findings.faults
    assert sound.num_images == num_sound
    pack(sound, tmp_path / "clean")
    clean = open_source(tmp_path / "clean")
    assert {clean.read(index) for index in range(clean.num_images)} <= images
    assert verify(tmp_path / "clean")[0].is_sound


def test_folders_are_verified_image_by_image(tmp_path):
    source = open_source("debug")
    for number in range(4):
        (tmp_path / "faces" / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "faces" / f"{number % 2}" / f"{number}.jpg").write_bytes(source.read(number))
    (tmp_path / "faces" / "1" / "bad.jpg").write_bytes(b"\xff\xd8\xffno")
    (tmp_path / "faces" / "2").mkdir()
    findings, sound = verify(tmp_path / "faces")
    assert [name.endswith("1/bad.jpg") for name, _ in findings.bad] == [True]
    assert findings.notes == ["1 of 3 classes have no image."]
    pack(sound, tmp_path / "clean")
    assert open_source(tmp_path / "clean").num_images == 4


def test_what_is_no_data_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        verify(tmp_path / "absent")


def test_names_with_escape_sequences_do_not_reach_the_terminal(folder, tmp_path, capsys):
    evil = folder.rename(tmp_path / "set\x1b]0;owned\x07\x1b[2J")
    main(["data", "verify", str(evil)])
    shown = capsys.readouterr()
    assert "owned" in shown.out and "\x1b" not in shown.out and "\x07" not in shown.out
