"""A training run under `megaclass run --restarts`: a rank is killed, all start again, the run goes on where it was saved."""

import json
import os
import signal

from tests.launch.conftest import wait_until
from tests.launch.counted_run import CountedRun


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(run, tmp_path):
    """6 steps per epoch, each of which is saved."""
    counted = CountedRun(tmp_path / "count", run_dir=tmp_path / "run")
    counted.hold(8)
    settings = ("train.epochs=3", "train.checkpoint_epochs=1")
    started = run.start("-np", "2", "--restarts", "1", *counted.train(*settings), env=counted.env)
    ranks = counted.wait_for(8, started, num_ranks=2)
    wait_until(lambda: [*(tmp_path / "run" / "checkpoints").glob("step-*6")], 60, started.story)
    os.kill(ranks[1], signal.SIGKILL)
    counted.release(8)
    assert started.wait(150) == 0, started.story()
    assert "megaclass: rank 1 on localhost" in started.err and "ended with signal SIGKILL" in started.err
    assert "megaclass: restart 1 of 1: 2 ranks on localhost:2." in started.err
    assert "megaclass: resuming from" in started.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 18
    # Of the two starts, both did the steps after the checkpoint, and no rank did another one twice.
    steps = sorted(row[1] for row in counted.rows() if row[2] == 0)
    assert steps == sorted([*range(18), 6, 7, 8])


def test_a_mistake_of_the_user_is_not_tried_again(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("another run\n")
    counted = CountedRun(tmp_path / "count", run_dir=tmp_path / "run")
    done = run("-np", "1", "--restarts", "3", *counted.train(), env=counted.env, timeout_s=120)
    assert done.code == 2 and "already holds a run" in done.err, done.story()
    assert "exit code 2 means that something has to be fixed first: no restart." in done.err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "another run\n"
