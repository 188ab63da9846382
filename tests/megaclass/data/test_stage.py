"""A copy of the data in memory: once a host, used again, removed on request."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from megaclass.checkpoint.class_names import class_list
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools import stage as stage_module
from megaclass.data.tools.pack import PackOptions, pack
from megaclass.data.tools.stage import stage, unstage
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError


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


@pytest.mark.ranks
def test_what_a_killed_copy_leaves_can_be_removed(data, tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from megaclass.data.tools.stage import stage
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


NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that belongs to another user")


@pytest.fixture
def precious(tmp_path):
    """A file of the user's own that no staging may touch."""
    (tmp_path / "home").mkdir()
    file = tmp_path / "home" / "precious.txt"
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"


@pytest.mark.parametrize("absolute", [True, False])
def test_a_list_that_names_files_outside_removes_none_of_them(data, tmp_path, precious, absolute):
    ram = tmp_path / "ram"
    ram.mkdir(mode=0o700)
    name = str(precious) if absolute else "0/../../home/precious.txt"
    (ram / ".staged.json").write_text(json.dumps([[name, 4, 0]]))
    for attempt in (lambda: unstage(ram), lambda: stage(str(data), ram)):
        with pytest.raises(DataError, match=r"\.staged\.json names .*precious\.txt.*outside"):
            attempt()


def test_links_in_a_staging_folder_are_not_followed(data, tmp_path, precious):
    ram = tmp_path / "ram"
    ram.mkdir(mode=0o700)
    for name in (".staged.json.partial", ".lock"):
        (ram / name).symlink_to(precious)
    with pytest.raises(DataError, match=r"Cannot stage .*symbolic link"):
        stage(str(data), ram)
    (ram / ".lock").unlink()
    assert open_source(stage(str(data), ram)).num_images == 12
    # A copied file that is replaced by a link is copied again; what the link points to stays.
    (ram / "0" / "property").unlink()
    (ram / "0" / "property").symlink_to(precious)
    os.utime(data / "property", ns=(1, 1))
    assert open_source(stage(str(data), ram)).num_images == 12
    assert not (ram / "0" / "property").is_symlink()
    shutil.rmtree(ram / "0")
    (tmp_path / "home" / "property").write_text("mine")
    (ram / "0").symlink_to(tmp_path / "home")
    with pytest.raises(DataError, match="symbolic link"):
        unstage(ram)
    assert (tmp_path / "home" / "property").read_text() == "mine"


def test_a_staging_folder_that_is_a_link_is_refused(data, tmp_path, precious):
    (tmp_path / "ram").symlink_to(precious.parent)
    for attempt in (lambda: stage(str(data), tmp_path / "ram"), lambda: unstage(tmp_path / "ram")):
        with pytest.raises(DataError, match=r"is a symbolic link: name the folder itself"):
            attempt()
    assert sorted(path.name for path in precious.parent.iterdir()) == ["precious.txt"]


@needs_root
def test_a_folder_of_another_user_is_refused(data, tmp_path, precious):
    ram = tmp_path / "ram"
    ram.mkdir(mode=0o777)
    (ram / ".staged.json").write_text(json.dumps([["0/a", 4, 0]]))
    os.chown(ram, NOBODY, NOBODY)
    for attempt in (lambda: stage(str(data), ram), lambda: unstage(ram)):
        with pytest.raises(DataError, match=r"belongs to user 65534 .*, not to you: choose a folder of your own"):
            attempt()


def test_a_folder_that_everybody_may_replace_is_refused(data, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(DataError, match=r"lies in .*shared, where every user may replace it"):
        stage(str(data), tmp_path / "shared" / "ram")
    (tmp_path / "shared").chmod(0o1777)
    assert open_source(stage(str(data), tmp_path / "shared" / "ram")).num_images == 12


def test_a_folder_that_everybody_may_write_to_is_refused(data, tmp_path):
    (tmp_path / "ram").mkdir()
    (tmp_path / "ram").chmod(0o1777)
    with pytest.raises(DataError, match="every user may write to it"):
        stage(str(data), tmp_path / "ram")


@pytest.mark.parametrize("content", ["[[1, 2]]", '[["0/a"]]', '[["0/a", "1", 2]]', "{}", "[" * 100_000, "\udcff"])
def test_a_damaged_list_is_copied_anew(data, tmp_path, content):
    stage(str(data), tmp_path / "ram")
    (tmp_path / "ram" / ".staged.json").write_text(content, errors="surrogateescape")
    assert open_source(stage(str(data), tmp_path / "ram")).num_images == 12
    unstage(tmp_path / "ram")
    assert not (tmp_path / "ram").exists()
