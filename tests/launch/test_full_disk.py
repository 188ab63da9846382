"""Training whose disk is full for a while, under `megaclass run`: it goes on, and where it cannot, a restart is allowed."""

import json
import subprocess
import time
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"
# 12 identities x 8 images in batches of 16: 6 steps per epoch, each of which is saved.
TINY = (
    *("synth.identities=12", "synth.images_per_identity=8", "synth.size=32", "synth.pairs=40"),
    *("backbone.embedding_dim=16", "train.global_batch=16", "train.report_steps=2", "train.checkpoint_epochs=1"),
    *("export.onnx=false", "train.keep_checkpoints=1"),
)


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def train(tmp_path, disk, *more):
    places = (f"data.path={tmp_path / 'data'}", f"train.run_dir={disk / 'run'}")
    return ("megaclass", "train", str(RECIPE), *TINY, *places, *more)


def fill(disk):
    """Takes all that is left, whatever is freed meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def wait_for_checkpoint(started, disk):
    deadline = time.monotonic() + 120
    while not list((disk / "run" / "checkpoints").glob("step-*")):
        assert started.process.poll() is None and time.monotonic() < deadline, started.story()
        time.sleep(0.02)


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(run, tmp_path, disk):
    num_epochs = 30
    started = run.start("-np", "2", *train(tmp_path, disk, f"train.epochs={num_epochs}"))
    wait_for_checkpoint(started, disk)
    fill(disk)
    started.says("training continues", timeout_s=60)
    (disk / "ballast").unlink()
    assert started.wait(200) == 0, started.story()
    assert "cannot write the checkpoint" in started.err and "No space left on device" in started.err
    rows = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(2, 6 * num_epochs + 1, 2)), (
        "rows that the disk refused were written later"
    )
    assert json.loads((disk / "run" / "summary.json").read_text())["steps"] == 6 * num_epochs


def test_a_disk_that_stays_full_ends_the_run_so_that_it_may_be_restarted(run, tmp_path, disk):
    started = run.start("-np", "2", "--restarts", "1", *train(tmp_path, disk, "train.epochs=8"))
    wait_for_checkpoint(started, disk)
    fill(disk)
    # After the last step: the last save has been tried four times.
    started.says("ended with exit code 74", timeout_s=120)
    (disk / "ballast").unlink()
    assert started.wait(200) == 0, started.story()
    assert "restart 1 of 1" in started.err
    assert json.loads((disk / "run" / "summary.json").read_text())["steps"] == 48


def test_the_last_words_name_the_rank_whose_disk_failed_and_why(run, tmp_path, disk):
    """Only rank 1 fails: it may open no further files from the first checkpoint on."""
    started = run.start("-np", "2", *train(tmp_path, disk, "train.epochs=8"))
    wait_for_checkpoint(started, disk)
    ranks = [pid for pid in run.processes() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    for pid in ranks:
        subprocess.run(["prlimit", f"--pid={pid}", "--nofile=3:3"], check=True)
    assert started.wait(200) == 74, started.story()
    last_words = started.err[started.err.index("the first to fail was") :]
    assert "the first to fail was rank 1 on " in last_words, started.story()
    assert "Too many open files" in last_words
