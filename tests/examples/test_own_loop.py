"""The own training loop of the README, alone and under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "examples" / "own_loop.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.ranks
@pytest.mark.parametrize("starter", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_the_loop_trains_and_its_loss_falls(starter):
    command = [sys.executable, *starter, SCRIPT]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    steps = [
        (int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", run.stdout, re.MULTILINE)
    ]
    assert [step for step, _ in steps] == [10, 20, 30, 40, 50, 60]
    assert steps[-1][1] < 0.5 * steps[0][1]
