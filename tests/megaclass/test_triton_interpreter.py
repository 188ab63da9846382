"""Starts the tests that run in Triton's interpreter, in processes of their own (see triton_interpreter.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
HEAD = "head/gpu/test_interpreted.py"
NORM = "backbones/test_fused_norm.py"
SHARES = {
    "on one rank": ([HEAD, NORM, "data/test_augment_gpu.py"], "not ranks"),
    "on several ranks": ([HEAD, NORM], "ranks"),
}
# A minute on an idle machine.
PATIENCE_S = 800


@pytest.mark.ranks
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("share", SHARES)
def test_every_program_computes_in_tritons_interpreter_what_its_reference_does(share):
    files, selection = SHARES[share]
    command = [sys.executable, "-m", "pytest", *(str(HERE / file) for file in files), "-q", "-x", "-n", "0"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "-k", selection], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
