"""The files of a synthetic set: complete, reproducible, never half written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megaclass.data.decode import decode_image
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.record_index import open_index
from megaclass.data.sources.recordio import RecordReader
from megaclass.data.synthetic.faces import draw_faces
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError

SMALL = {"num_identities": 5, "images_per_identity": 3, "image_size": 32, "num_pairs": 20}


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}


def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path):
    arguments = {**SMALL, "num_identities": 60, "images_per_identity": 5}
    synthesize(tmp_path / "one", **arguments, num_processes=1)
    synthesize(tmp_path / "two", **arguments, num_processes=2)
    synthesize(tmp_path / "other", **arguments, num_processes=1, seed=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert (tmp_path / "one/train.rec").read_bytes() != (tmp_path / "other/train.rec").read_bytes()


def test_the_files_are_those_of_an_insightface_folder(tmp_path):
    out = tmp_path / "a" / "set"
    assert synthesize(out, **SMALL, num_processes=1) is True
    names = {"train.rec", "train.idx", "property", "verification.bin", "synth.json", "holdout.rec", "holdout.idx"}
    assert set(contents(out)) == names
    assert (out / "property").read_text().strip() == "5,32,32"
    index, reader = open_index(out / "train.idx"), RecordReader(out / "train.rec")
    records = {
        key: reader.read(offset) for key, offset in zip(index.keys.tolist(), index.offsets.tolist(), strict=True)
    }
    assert sorted(records) == list(range(1 + 15 + 5))
    assert records[0].labels == (16.0, 21.0) and records[0].payload == b""
    assert [records[key].labels for key in range(1, 16)] == [(float(label),) for label in range(5) for _ in range(3)]
    assert [records[key].labels for key in range(16, 21)] == [(1 + 3.0 * label, 4 + 3.0 * label) for label in range(5)]
    drawn = draw_faces(0, np.array([4]), np.array([1]), 32)[0]
    assert np.abs(decode_image(records[14].payload, "key 14").astype(int) - drawn).mean() < 8


def test_pairs_are_balanced_in_every_fold_and_show_nobody_from_training(tmp_path):
    synthesize(tmp_path / "set", **{**SMALL, "num_pairs": 100}, num_processes=1)
    pair_set = read_pairs(tmp_path / "set" / "verification.bin")
    assert len(pair_set.images) == 200
    assert all(fold.sum() == 5 for fold in np.split(pair_set.is_same, 10))
    held_out = draw_faces(0, np.array([5, 5, 5, 6]), np.array([0, 1, 2, 3]), 32)
    for encoded, drawn in zip(pair_set.images, held_out, strict=False):
        assert np.abs(decode_image(encoded, "pair").astype(int) - drawn).mean() < 8
    assert len(set(pair_set.images)) == 200


def test_a_finished_set_is_not_drawn_again(tmp_path):
    synthesize(tmp_path / "set", **SMALL, num_processes=1)
    before = (tmp_path / "set" / "train.rec").stat().st_mtime_ns
    assert synthesize(tmp_path / "set", **SMALL, num_processes=1) is False
    assert (tmp_path / "set" / "train.rec").stat().st_mtime_ns == before


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    out = tmp_path / "set"
    synthesize(out, **SMALL, num_processes=1)
    before = contents(out)
    with pytest.raises(DataError, match=r"not empty .*another synthetic set.*'seed': 0"):
        synthesize(out, **SMALL, num_processes=1, seed=3)
    assert contents(out) == before
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"holds thesis\.tex"):
        synthesize(mine, **SMALL, num_processes=1)
    assert contents(mine) == {"thesis.tex": b"years of work"}
    with pytest.raises(DataError, match="is a file"):
        synthesize(mine / "thesis.tex", **SMALL, num_processes=1)


def test_an_empty_folder_is_filled_and_progress_is_told(tmp_path):
    (tmp_path / "set").mkdir()
    told: list[tuple[int, int]] = []
    assert synthesize(tmp_path / "set", **SMALL, num_processes=1, on_progress=lambda done, of: told.append((done, of)))
    assert told[-1] == (15 + 40 + 5, 15 + 40 + 5)


def test_an_interrupted_drawing_leaves_nothing(tmp_path):
    def interrupt(done: int, num_images: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "set", **SMALL, num_processes=1, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"num_identities": 0}, r"num_identities = 0: it must lie in \[1, 16,777,216\]"),
        ({"images_per_identity": -1}, "images_per_identity = -1"),
        ({"image_size": 8}, r"image_size = 8: it must lie in \[16, 1,024\]"),
        ({"num_pairs": 1}, r"num_pairs = 1: it must lie in \[2"),
        ({"seed": -1}, "seed = -1"),
        ({"num_processes": 0}, "num_processes = 0: at least one"),
    ],
)
def test_bad_arguments_are_refused_with_what_is_allowed(tmp_path, wrong, allowed):
    with pytest.raises(DataError, match=allowed):
        synthesize(tmp_path / "set", **{**SMALL, "num_processes": 1, **wrong})
    assert not (tmp_path / "set").exists()


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.ranks
def test_workers_die_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "draw.py"
    script.write_text(
        "from pathlib import Path\n"
        "from megaclass.data.tools.synthesize import synthesize\n"
        "if __name__ == '__main__':\n"
        f"    synthesize(Path({str(tmp_path / 'set')!r}), num_identities=100000, images_per_identity=9, image_size=64,\n"
        "               num_processes=2, on_progress=lambda done, of: print(done, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline()
        workers = children_of(parent.pid)
        assert len(workers) >= 2
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert [worker for worker in workers if Path(f"/proc/{worker}").exists()] == []
    assert not (tmp_path / "set").exists()
