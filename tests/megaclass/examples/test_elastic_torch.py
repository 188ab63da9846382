"""examples/elastic_torch.py under `megaclass run --horovod`, unchanged but for the import, with a worker that is killed."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.launch.conftest import Here, assert_nothing_is_left

EPOCHS = 30
EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic_torch.py"


@pytest.mark.ranks
def test_the_example_is_one_of_horovods_programs_and_survives_a_killed_worker(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(EXAMPLE.read_text().replace("import horovod.torch as hvd", "import horovod.torch as hvd"))
    here = Here()
    job = here.start(
        *("--horovod", "--verbose", "--min-np", "1", "-np", "2", sys.executable, str(program)), "--epochs", str(EPOCHS)
    )
    try:
        job.says("epoch 1: accuracy", timeout_s=120)
        # Listed once: the training goes on meanwhile, and must not end before the kill.
        killed = [
            pid
            for pid in here.processes()
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] == [str(program).encode()]
        ]
        assert len(killed) == 2
        os.kill(max(killed), signal.SIGKILL)
        assert job.wait(120) == 0, job.story()
    finally:
        job.process.kill()
        assert_nothing_is_left(here.processes)
    epochs = re.findall(r"epoch (\d+): accuracy ([\d.]+) with (\d) ranks", job.out)
    assert [int(epoch) for epoch, *_ in epochs] == sorted({int(epoch) for epoch, *_ in epochs})
    assert len(epochs) == EPOCHS and {size for *_, size in epochs} == {"1", "2"}
    assert float(epochs[-1][1]) > 0.9
