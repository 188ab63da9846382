"""A training run under `megaclass run --restarts`: a rank is killed, all start again, the run goes on where it was saved."""

import json
import os
import signal
import time
from pathlib import Path

TINY = (
    *("synth.identities=12", "synth.images_per_identity=8", "synth.size=32", "synth.pairs=40"),
    *("backbone.embedding_dim=16", "train.global_batch=16", "train.report_steps=2", "export.onnx=false"),
)
RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"


def train(folder, *more):
    places = (f"data.path={folder / 'data'}", f"train.run_dir={folder / 'run'}")
    return ("megaclass", "train", str(RECIPE), *TINY, *places, *more)


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(run, tmp_path):
    """12 identities x 8 images in batches of 16: 6 steps an epoch, each of which is saved."""
    started = run.start("-np", "2", "--restarts", "1", *train(tmp_path, "train.epochs=12", "train.checkpoint_epochs=1"))
    checkpoints = tmp_path / "run" / "checkpoints"
    deadline = time.monotonic() + 100
    while not list(checkpoints.glob("step-*")):
        assert started.process.poll() is None and time.monotonic() < deadline, started.story()
        time.sleep(0.02)
    ranks = [pid for pid in run.processes() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(ranks[0], signal.SIGKILL)
    assert started.wait(150) == 0, started.story()
    assert "megaclass: rank 1 on localhost" in started.err and "ended with signal SIGKILL" in started.err
    assert "megaclass: restart 1 of 1: 2 ranks on localhost:2." in started.err
    assert "megaclass: resuming from" in started.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 72


def test_a_mistake_of_the_user_is_not_tried_again(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("another run\n")
    done = run("-np", "2", "--restarts", "3", *train(tmp_path), timeout_s=120)
    assert done.code == 2 and "already holds a run" in done.err, done.story()
    assert "exit code 2 means that something has to be fixed first: no restart." in done.err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "another run\n"
