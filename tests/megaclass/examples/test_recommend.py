import re
from pathlib import Path

import pytest
from tests.forked import ended_ranks, python_script, run_forked

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[3] / "examples" / "recommend.py"
SMALL = ("--items", "2000", "--steps", "120", "--batch", "48", "--users", "400", "--width", "16")


def recalls(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"recall@10 ([\d.]+),", printed)]


def test_a_tenth_of_the_items_learns_as_the_full_softmax_does():
    run = run_forked(python_script, SCRIPT, *SMALL, "--rate", "1", "0.1")
    assert run.returncode == 0, run.stderr
    full, sampled = recalls(run.stdout)
    # Ten random items of 2,000 would hit 0.005.
    assert full > 0.3
    assert sampled > 0.9 * full


@pytest.mark.parametrize("negatives", ["frequencies", "in-batch"])
def test_the_example_runs_on_two_processes_with_other_negatives(negatives):
    ranks = ended_ranks(2, python_script, SCRIPT, *SMALL, "--rate", "0.1", "--negatives", negatives)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert recalls(ranks[0].stdout)[0] > 0.3
