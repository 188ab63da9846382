"""Elastic jobs of 3 ranks over NCCL: one is killed, and the others continue with 2. Run with `make test-gpu`."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.launch.conftest import run, wait_until  # noqa: F401 (fixture)
from tests.many_gpus.conftest import DEVICE
from tests.many_gpus.test_train import HERE, WITHOUT_TF32, curve, runs, same, start  # noqa: F401 (fixture)

ELASTIC = ("--min-np", "1", "-np", "3", "-H", "localhost:3", "--verbose")
JOB = Path(__file__).parents[1] / "launch" / "elastic_job.py"


@pytest.mark.gpu
@pytest.mark.parametrize("killed", [0, 2])
def test_hvd_elastic_continues_without_a_killed_rank_and_loses_no_sample(run, gpu_ranks, tmp_path, killed):  # noqa: F811
    gpu_ranks.skip_if_impossible(3)
    stop = tmp_path / "stop"
    command = (sys.executable, str(HERE / "as_host.py"), str(JOB), "400", "100000", "0.02", str(stop), DEVICE)
    env = {"MEGACLASS_TEST_ONE_GPU": "1" if gpu_ranks.are_hosts(3) else "0"}
    job = run.start(*ELASTIC, *command, env=env)
    job.says("of 3 from epoch 0", 3, timeout_s=90)
    pids = {int(rank): int(pid) for pid, rank in re.findall(r"pid (\d+) rank (\d+) of 3", job.out)}
    os.kill(pids[killed], signal.SIGKILL)
    job.says(f"(pid {pids[killed]}) ended with signal SIGKILL; 2 rank(s) continue.")
    job.says("of 2 from epoch", 2, timeout_s=60)
    stop.touch()
    assert job.wait(60) == 0, job.story()
    assert {int(pid) for pid in re.findall(r"pid (\d+) rank \d+ of 2", job.out)} == {*pids.values()} - {pids[killed]}
    ends = re.findall(r"end: (\d+) samples lost, (\d+) repeated, \d+ steps, weights (.*)", job.out)
    assert len(ends) == 2 and len(set(ends)) == 1 and ends[0][:2] == ("0", "0"), job.story()


@pytest.mark.gpu
def test_an_elastic_training_continues_without_a_killed_rank_with_the_curve_of_one_process(run, runs, tmp_path):  # noqa: F811
    # With so small a rate rounding errors do not grow.
    settings = ("train.epochs=12", "train.commit_steps=5", "train.evaluate_epochs=0", "optimizer.lr=0.0003")
    run_dir = tmp_path / "run"
    runs.train(1, tmp_path / "alone", *settings)
    job = start(run, runs, ELASTIC, run_dir, *settings)

    def num_rows() -> int:
        return len(curve(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0

    wait_until(lambda: num_rows() >= 7 or job.process.poll() is not None, 120, job.story)
    pids = [int(pid) for pid in re.findall(r"as_host: pid (\d+)", job.out)]
    assert len(pids) == 3, job.story()
    os.kill(pids[0], signal.SIGKILL)
    job.says(f"(pid {pids[0]}) ended with signal SIGKILL; 2 rank(s) continue.")
    assert job.wait(120) == 0, job.story()
    assert "generation 2: 2 ranks on localhost:2; before: 3." in job.err, job.story()
    assert curve(run_dir) == same(curve(tmp_path / "alone"), rel=1e-2)
