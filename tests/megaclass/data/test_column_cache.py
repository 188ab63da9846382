"""What was collected once is mapped ever after, as long as the data is what it was."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from megaclass.data.sources import column_cache, record_index
from megaclass.data.sources import records as record_source
from megaclass.data.sources.column_cache import cached_columns
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.record_index import open_index
from megaclass.data.tools.pack import PackOptions, pack
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    synthesize(tmp_path / "set", num_identities=3, images_per_identity=4, image_size=16, num_pairs=2, num_processes=1)
    return tmp_path / "set"


@pytest.fixture
def num_built(monkeypatch):
    """How often an index was parsed and labels were collected."""
    counts = {"index": 0, "labels": 0}
    parse, collect = record_index.read_index_lines, record_source._collect_labels

    def counted_parse(*args):
        counts["index"] += 1
        return parse(*args)

    def counted_collect(*args):
        counts["labels"] += 1
        return collect(*args)

    monkeypatch.setattr(record_index, "read_index_lines", counted_parse)
    monkeypatch.setattr(record_source, "_collect_labels", counted_collect)
    return counts


def test_labels_and_index_are_collected_once_and_cached_beside_the_data(folder, num_built):
    first, second = open_source(folder), open_source(folder)
    assert num_built == {"index": 1, "labels": 1}
    assert (folder / "train.idx.cache").exists() and (folder / "train.rec.labels").exists()
    for name in ("keys", "offsets", "labels"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    assert second.has_header and second.read(5) == first.read(5)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_the_arrays_are_maps_of_one_file_not_copies(folder):
    source = open_source(folder)
    for array in (source.keys, source.offsets, source.labels):
        assert not array.flags.owndata and not array.flags.writeable


@pytest.mark.parametrize("changed", ["train.idx", "train.rec", "property"])
def test_a_cache_of_other_files_is_made_anew(folder, num_built, changed):
    open_source(folder)
    os.utime(folder / changed, ns=(1, 1))
    open_source(folder)
    assert num_built == {"index": 2 if changed == "train.idx" else 1, "labels": 2}


def test_a_folder_that_cannot_be_written_is_cached_elsewhere(folder, num_built, monkeypatch, tmp_path):
    write = column_cache._write

    def refuse(path, *args):
        if path.parent == folder:
            raise PermissionError(13, "Permission denied")
        return write(path, *args)

    monkeypatch.setattr(column_cache, "_write", refuse)
    assert open_source(folder).num_images == open_source(folder).num_images == 12
    assert num_built == {"index": 1, "labels": 1}
    assert not (folder / "train.idx.cache").exists() and list((tmp_path / "home").rglob("train.rec.labels"))


SHOW = """
source = open_source(sys.argv[1])
print(source.labels.tolist(), len(source.read(11)) > 100)
print(source.describe())
"""
FULL = "import resource, sys; from megaclass.data.sources.open_source import open_source\n"
# Every write beyond a cache's first page fails, in whatever folder.
FULL += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
STRANGER = "import os, sys; from megaclass.data.sources.open_source import open_source\n"
# Imported beforehand: the other user may be unable to read the Python installation.
STRANGER += "import filelock\n"
STRANGER += "os.environ.pop('HOME', None); os.environ.pop('XDG_CACHE_HOME', None); os.setuid(54321)\n"


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["rec", "tar"])
def test_where_no_cache_has_room_the_data_is_read_and_the_reason_told(folder, tmp_path, layout):
    pack(open_source(folder), tmp_path / "packed", PackOptions(layout=layout, shuffle_seed=None))
    said = subprocess.check_output([sys.executable, "-c", FULL + SHOW, str(tmp_path / "packed")], text=True)
    labels, described = said.splitlines()
    assert labels == "[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2] True"
    assert (
        f"not cached, so every process collects index and labels itself ({tmp_path / 'packed'}: File too" in described
    )
    assert f"; {tmp_path / 'home'}" in described
    left = [path.name for place in ("packed", "home") for path in (tmp_path / place).rglob("*") if path.is_file()]
    assert not [name for name in left if "cache" in name or "labels" in name or "partial" in name]


@pytest.mark.ranks
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_user_without_a_home_reads_a_folder_that_is_not_his():
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "set"
        data.parent.chmod(0o755)
        synthesize(data, num_identities=3, images_per_identity=4, image_size=16, num_pairs=2, num_processes=1)
        data.chmod(0o755)
        said = subprocess.check_output([sys.executable, "-c", STRANGER + SHOW, str(data)], text=True)
        assert "[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2] True" in said and f"({data}: Permission denied)" in said


def test_a_source_with_a_cache_says_nothing_of_it(folder):
    assert "cached" not in open_source(folder).describe() + open_source(folder).describe()


def test_a_damaged_cache_is_made_anew_or_refused(folder, num_built):
    open_source(folder)
    whole = (folder / "train.rec.labels").read_bytes()
    for damaged in (b"", b"{}", whole[:-8], b"\xff" * len(whole), whole.replace(b'"num_rows": ', b'"num_rows": 1')):
        (folder / "train.rec.labels").write_bytes(damaged)
        assert open_source(folder).labels.max() == 2
    (folder / "train.rec.labels").write_bytes(whole[:4096] + b"\x7f" * (len(whole) - 4096))
    with pytest.raises(DataError, match=r"train\.rec\.labels is damaged: remove it"):
        open_source(folder)


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.idx").write_text("0\t0\nx\n")
    with pytest.raises(DataError, match="line 2"):
        open_index(tmp_path / "a.idx")
    assert [path.name for path in tmp_path.iterdir()] == ["a.idx"]


def test_an_unordered_index_is_sorted_from_the_cache_too(tmp_path):
    (tmp_path / "a.idx").write_text("5\t64\n0\t0\n3\t32\n")
    for _ in range(2):
        index = open_index(tmp_path / "a.idx")
        assert index.keys.tolist() == [0, 3, 5] and index.offsets.tolist() == [0, 32, 64]
        assert not index.keys.flags.owndata and (tmp_path / "a.idx.cache").exists()
    (tmp_path / "a.idx").write_text("5\t64\n5\t0\n3\t32\n")
    for _ in range(2):
        with pytest.raises(DataError, match="key 5 more than once"):
            open_index(tmp_path / "a.idx")


def test_the_fast_parser_reads_what_python_reads(tmp_path):
    rng = np.random.default_rng(0)
    offsets = [int(rng.integers(0, 10 ** int(digits))) for digits in rng.integers(1, 17, 20_000)]
    (tmp_path / "a.idx").write_text("".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets)))
    assert open_index(tmp_path / "a.idx").offsets.tolist() == offsets


OPEN = """
import os, sys
from megaclass.data.sources import record_index
parse = record_index.read_index_lines
def counted(*args):
    print("parsed", flush=True)
    return parse(*args)
record_index.read_index_lines = counted
from megaclass.data.sources.open_source import open_source
print(open_source(sys.argv[1]).num_images)
"""


@pytest.mark.ranks
def test_of_processes_that_come_at_once_one_builds(folder):
    processes = [
        subprocess.Popen([sys.executable, "-c", OPEN, str(folder)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = "".join(process.communicate()[0] for process in processes)
    assert said.count("parsed") == 1 and said.count("12") == 3


def test_a_cache_holds_columns_and_facts_and_is_built_once_however_many_folders_refuse_it(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(b"x")
    built = []

    def build():
        built.append(1)
        return {"note": "yes"}, (np.arange(10), -np.arange(10))

    def refuse(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(column_cache, "_write", refuse)
        assert cached_columns("c", [tmp_path / "data"], 2, build).why_uncached.count("No space left") == 2
        assert len(built) == 1
    for _ in range(2):
        columns = cached_columns("c", [tmp_path / "data"], 2, build)
        assert columns.facts == {"note": "yes"} and not columns.why_uncached
        assert columns.arrays[0].tolist() == list(range(10)) and columns.arrays[1].tolist() == [-n for n in range(10)]
    assert len(built) == 2
