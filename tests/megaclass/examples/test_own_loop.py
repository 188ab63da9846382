"""The own training loop of the README, alone and under torchrun."""

import re
from pathlib import Path

import pytest
from tests.forked import python_script, run_forked, torchrun

SCRIPT = Path(__file__).parents[3] / "examples" / "own_loop.py"


@pytest.mark.ranks
@pytest.mark.parametrize("starter", ["alone", "torchrun"])
def test_the_loop_trains_and_its_loss_falls(starter):
    run = run_forked(python_script, SCRIPT) if starter == "alone" else torchrun(2, python_script, SCRIPT)
    assert run.returncode == 0, run.stderr
    steps = [
        (int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", run.stdout, re.MULTILINE)
    ]
    assert [step for step, _ in steps] == [10, 20, 30, 40, 50, 60]
    assert steps[-1][1] < 0.5 * steps[0][1]
