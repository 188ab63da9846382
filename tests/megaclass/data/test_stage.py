"""A copy of the data in memory: once a host, used again, removed on request."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

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


def copy_of(data, place):
    """The folder of the staged copy, which it makes if it is not there."""
    stage(str(data), place)
    (folder,) = place.iterdir()
    assert folder.name.startswith(f"megaclass-{os.geteuid()}-") and folder.stat().st_mode & 0o777 == 0o700
    return folder


def test_the_copy_is_the_same_data_with_its_caches(data, tmp_path, monkeypatch):
    calls = []
    staged = open_source(stage(str(data), tmp_path / "ram", lambda *done: calls.append(done)))
    original = open_source(data)
    assert str(tmp_path / "ram") in staged.describe()
    assert np.array_equal(staged.labels, original.labels) and staged.read(7) == original.read(7)
    assert list(copy_of(data, tmp_path / "ram").glob("*/0/train.rec.labels"))
    assert calls[-1][0] == calls[-1][1] > 0


def test_a_finished_copy_is_used_again_until_the_data_changes(data, tmp_path):
    stage(str(data), tmp_path / "ram")
    calls = []
    stage(str(data), tmp_path / "ram", lambda *done: calls.append(done))
    assert not calls
    os.utime(data / "property", ns=(1, 1))
    stage(str(data), tmp_path / "ram", lambda *done: calls.append(done))
    assert copied(calls) > (data / "property").stat().st_size
    assert len(list(tmp_path.glob("ram/*/*/0"))) == 1, "the copy of the data as it was is removed"


@pytest.mark.ranks
def test_a_copy_that_a_running_job_uses_stays_when_the_data_changes(data, tmp_path):
    script = "import sys; from pathlib import Path; from megaclass.data.tools.stage import stage\n"
    script += "print(stage(sys.argv[1], Path(sys.argv[2])), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(data), str(tmp_path / "ram")]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    used = Path(job.stdout.readline().strip())
    os.utime(data / "property", ns=(1, 1))
    assert stage(str(data), tmp_path / "ram") != str(used) and open_source(used).num_images == 12
    job.communicate("")
    os.utime(data / "property", ns=(2, 2))
    stage(str(data), tmp_path / "ram")
    assert not used.exists() and len(list(tmp_path.glob("ram/*/*/0"))) == 1


def test_an_interrupted_copy_is_not_taken_for_a_finished_one(data, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(str(data), tmp_path / "ram", interrupt)
    assert not list((tmp_path / "ram").rglob("*.tmp*"))
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
    assert list((tmp_path / "ram").rglob("*.tmp*"))
    unstage(tmp_path / "ram")
    assert not (tmp_path / "ram").exists()


def test_the_space_is_checked_before_anything_is_copied(data, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DataError, match=r"takes 0\.0 GiB and 0\.0 GiB are free there\. .*data stage --remove --to"):
        stage(str(data), tmp_path / "ram")
    assert [path.name for path in (tmp_path / "ram").glob("*/*")] == [".lock"]


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
    staged = stage(str(faces), tmp_path / "ram")
    assert open_source(staged).labels.tolist() == open_source(faces).labels.tolist() == [1, 2]
    assert open_source(staged).num_classes == 3


@pytest.mark.parametrize("name", ["rec", "tar"])
def test_the_names_of_classes_come_along(data, tmp_path, name):
    pack(open_source(data), tmp_path / "named", PackOptions(layout=name), class_names=b"x\ny\nz\n")
    staged = stage(str(tmp_path / "named"), tmp_path / "ram")
    (names,) = copy_of(tmp_path / "named", tmp_path / "ram").glob("*/0/classes.txt")
    assert names.read_bytes() == b"x\ny\nz\n"
    assert class_list(staged, open_source(staged)).text == b"x\ny\nz\n"


NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that belongs to another user")


@needs_root
def test_a_folder_of_another_user_is_refused(data, tmp_path):
    copy = copy_of(data, tmp_path / "ram")
    os.chown(copy, NOBODY, NOBODY)
    for attempt in (lambda: stage(str(data), tmp_path / "ram"), lambda: unstage(tmp_path / "ram")):
        with pytest.raises(DataError, match=r"is not a folder that only you may enter \(drwx------, user 65534"):
            attempt()
    assert list(copy.glob("*/0/train.rec"))


def test_a_folder_that_others_may_enter_and_a_link_are_refused(data, tmp_path):
    copy = copy_of(data, tmp_path / "ram")
    copy.chmod(0o750)
    with pytest.raises(DataError, match=r"is not a folder that only you may enter \(drwxr-x---"):
        stage(str(data), tmp_path / "ram")
    copy.chmod(0o700)
    copy.rename(tmp_path / "elsewhere")
    copy.symlink_to(tmp_path / "elsewhere")
    for attempt in (lambda: stage(str(data), tmp_path / "ram"), lambda: unstage(tmp_path / "ram")):
        with pytest.raises(DataError, match=r"is not a folder that only you may enter \(lrwx"):
            attempt()
    assert list((tmp_path / "elsewhere").glob("*/0/train.rec"))


def test_a_place_that_everybody_may_replace_is_refused(data, tmp_path):
    for place in (tmp_path / "shared", tmp_path / "shared" / "ram"):
        place.mkdir(exist_ok=True)
        (tmp_path / "shared").chmod(0o777)
        with pytest.raises(DataError, match=r"lies in .*shared, where every user may replace it"):
            stage(str(data), place)
    (tmp_path / "shared").chmod(0o1777)
    assert open_source(stage(str(data), tmp_path / "shared")).num_images == 12


def test_what_lies_in_the_folder_beside_the_copy_is_removed(data, tmp_path):
    stage(str(data), tmp_path / "ram")
    (folder,) = (tmp_path / "ram").iterdir()
    (copy,) = (one for one in folder.iterdir() if one.is_dir())
    shutil.rmtree(copy)
    (folder / "0").mkdir()
    (folder / ".staged.json").write_text("{}")
    assert open_source(stage(str(data), tmp_path / "ram")).num_images == 12
    assert sorted(one.name for one in folder.iterdir()) == [".lock", copy.name]


def _photos(folder, num_images=20):
    for number in range(num_images):
        file = folder / f"person {number % 4}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), number, dtype=np.uint8)).save(file)


def test_a_link_that_leads_nowhere_is_left_out_counted_and_named(tmp_path, caplog):
    _photos(tmp_path / "photos")
    (tmp_path / "photos" / "person 1" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    staged = open_source(stage(str(tmp_path / "photos"), tmp_path / "ram"))
    assert staged.num_images == 20
    assert "gone.jpg: the link leads to a file that does not exist" in caplog.text
    assert "1 of 21 images cannot be read and are left out" in caplog.text


def test_a_large_share_of_dangling_links_is_an_error(tmp_path):
    _photos(tmp_path / "photos")
    for number in range(10):
        (tmp_path / "photos" / "person 1" / f"gone-{number}.jpg").symlink_to(tmp_path / "nowhere.jpg")
    with pytest.raises(DataError, match=r"could not be read, more than the limit of this command = 0\.2 allows"):
        stage(str(tmp_path / "photos"), tmp_path / "ram")
    assert not list(tmp_path.glob("ram/*/0"))


def test_a_stray_record_file_without_an_index_is_no_obstacle(data, tmp_path):
    (data / "stray.rec").write_bytes(b"no records")
    assert open_source(stage(str(data), tmp_path / "ram")).num_images == 12
