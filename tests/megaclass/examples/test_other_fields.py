"""The examples for sound and text, small, alone and on two ranks of `megaclass run`."""

import json
import re
from pathlib import Path

import pytest
from tests.forked import ended_ranks, python_script, run_forked

EXAMPLES = Path(__file__).parents[3] / "examples"


def ended(script, num_ranks, folder, *arguments):
    given = (python_script, EXAMPLES / script, *arguments, "--run-dir", str(folder / "run"))
    runs = [run_forked(*given)] if num_ranks == 1 else ended_ranks(num_ranks, *given)
    assert all(run.returncode == 0 for run in runs), [run.stderr for run in runs]
    assert json.loads((folder / "run" / "summary.json").read_text())["world_size"] == num_ranks
    return "".join(run.stdout for run in runs)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_voices_are_recognised_and_unknown_ones_told_apart(tmp_path, num_ranks):
    out = ended("speakers.py", num_ranks, tmp_path, "--drawn", "--voices", "12", "--takes", "8", "--epochs", "10")
    [(known, unknown)] = re.findall(r"top-1 ([\d.]+)%\. Unknown voices: equal error rate ([\d.]+)%", out)
    # Of 12 voices chance gives 8 %, and of pairs 50 %.
    assert float(known) > 50 and float(unknown) < 25


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_titles_get_their_labels(tmp_path, num_ranks):
    out = ended("titles.py", num_ranks, tmp_path, "--labels", "200", "--epochs", "6")
    found = {
        int(k): (float(p), float(psp))
        for k, p, psp in re.findall(r"^P@(\d) ([\d.]+)%  PSP@\d ([\d.]+)%", out, re.MULTILINE)
    }
    assert found.keys() == {1, 3, 5}
    assert found[1][0] > 60 and found[5][1] > 50
