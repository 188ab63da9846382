import re
from pathlib import Path

import pytest
from tests.forked import python_script, run_forked

SCRIPT = Path(__file__).parents[3] / "examples" / "own_margin.py"


@pytest.mark.ranks
def test_the_example_trains_with_both_margins_and_the_loss_falls():
    run = run_forked(python_script, SCRIPT)
    assert run.returncode == 0, run.stderr
    first, second = re.split(r"^HardNegatives\(.*\)$", run.stdout, flags=re.MULTILINE)
    assert first.startswith("GrowingMargin(scale=32.0, margin=0.4)\n")
    for text in (first, second):
        losses = [float(value) for value in re.findall(r"loss ([\d.]+)$", text, flags=re.MULTILINE)]
        assert len(losses) == 7
        assert losses[-1] < 0.25 * losses[0]
