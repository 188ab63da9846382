"""A copy of the data in memory: once a host, used again, removed on request."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from megaclass.data import stage as stage_module
from megaclass.data.pack import PackOptions, pack
from megaclass.data.source import open_source
from megaclass.data.stage import stage, unstage
from megaclass.data.synthesize import synthesize
from megaclass.errors import DataError
from megaclass.train.class_list import class_list


@pytest.fixture
def data(tmp_path):
    synthesize(tmp_path / "set", num_identities=3, images_per_identity=4, image_size=16, num_pairs=2, num_processes=1)
    open_source(tmp_path / "set")
    return tmp_path / "set"


def copied(calls: list) -> int:
    return calls[-1][0] if calls else 0


def test_the_copy_is_the_same_data_with_its_caches(data, tmp_path, monkeypatch):
    calls = []
    staged = open_source(stage(str(data), tmp_path / "ram", lambda *done: calls.append(done)))
    original = open_source(data)
    assert str(tmp_path / "ram") in staged.describe()
    assert np.array_equal(staged.labels, original.labels) and staged.read(7) == original.read(7)
    assert (tmp_path / "ram" / "0" / "train.rec.labels").exists()
    assert calls[-1][0] == calls[-1][1] > 0


def test_a_finished_copy_is_used_again_until_the_data_changes(data, tmp_path):
    stage(str(data), tmp_path / "ram")
    calls = []
    stage(str(data), tmp_path / "ram", lambda *done: calls.append(done))
    assert not calls
    os.utime(data / "property", ns=(1, 1))
    stage(str(data), tmp_path / "ram", lambda *done: calls.append(done))
    assert copied(calls) == (data / "property").stat().st_size


def test_an_interrupted_copy_goes_on_and_is_not_taken_for_a_finished_one(data, tmp_path, monkeypatch):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(str(data), tmp_path / "ram", interrupt)
    assert not list((tmp_path / "ram").rglob("*.partial"))
    assert open_source(stage(str(data), tmp_path / "ram")).num_images == 12


def test_what_a_killed_copy_leaves_can_be_removed(data, tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from megaclass.data.stage import stage
stage(sys.argv[1], Path(sys.argv[2]), lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", script, str(data), str(tmp_path / "ram")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "ram").rglob("*.partial"))
    unstage(tmp_path / "ram")
    assert not (tmp_path / "ram").exists()


def test_the_space_is_checked_before_anything_is_copied(data, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DataError, match=r"takes 0\.0 GiB and 0\.0 GiB are free there\. Choose another data\.stage"):
        stage(str(data), tmp_path / "ram")
    assert [path.name for path in (tmp_path / "ram").iterdir()] == [".lock"]


def test_removing_a_copy_removes_nothing_else(data, tmp_path):
    opened = open_source(stage(str(data), tmp_path / "ram"))
    assert opened.num_images == 12
    (tmp_path / "ram" / "own.txt").write_text("mine")
    assert unstage(tmp_path / "ram") >= 3
    assert [path.name for path in (tmp_path / "ram").iterdir()] == ["own.txt"]
    with pytest.raises(DataError, match="holds no staged data"):
        unstage(tmp_path / "ram")
    assert open_source(data).num_images == 12


def test_folders_lists_and_several_sources_are_staged_too(data, tmp_path):
    for identity in ("a", "b"):
        (tmp_path / "faces" / identity).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "faces" / identity / "1.png")
    staged = stage(f"{tmp_path / 'faces'},{data / 'train.rec'}", tmp_path / "ram")
    assert open_source(staged).num_images == 14
    assert stage("synthetic:5x10@16", tmp_path / "other") == "synthetic:5x10@16"


def test_identities_that_are_empty_or_have_gone_leave_the_labels_as_they_are(tmp_path):
    faces = tmp_path / "faces"
    for identity in ("a", "b", "c", "d"):
        (faces / identity).mkdir(parents=True)
        if identity != "b":
            Image.new("RGB", (16, 16)).save(faces / identity / "1.png")
    staged = stage(str(faces), tmp_path / "ram")
    assert open_source(staged).labels.tolist() == [0, 2, 3]
    shutil.rmtree(faces / "a")
    assert (
        open_source(stage(str(faces), tmp_path / "ram")).labels.tolist() == open_source(faces).labels.tolist() == [1, 2]
    )
    assert open_source(staged).num_classes == 3


@pytest.mark.parametrize("name", ["rec", "tar"])
def test_the_names_of_classes_come_along(data, tmp_path, name):
    pack(open_source(data), tmp_path / "named", PackOptions(layout=name), class_names=b"x\ny\nz\n")
    staged = stage(str(tmp_path / "named"), tmp_path / "ram")
    assert (tmp_path / "ram" / "0" / "classes.txt").read_bytes() == b"x\ny\nz\n"
    assert class_list(staged, open_source(staged)).text == b"x\ny\nz\n"
