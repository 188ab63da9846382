import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import free_port
from tests.hvd.jobs import outputs_of, start_script

SCRIPT = Path(__file__).parents[2] / "examples" / "mnist.py"


def _run(*arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_classic_script_learns_drawn_digits_on_two_processes():
    printed = _run("--num-proc", "2", "--drawn", "1500", "--epochs", "3", "--batch-size", "32", "--lr", "0.03")
    ends = re.findall(r"epoch \d: ([\d.]+) ms per step on 2 process\(es\), .* accuracy ([\d.]+)%", printed)
    assert len(ends) == 3 and float(ends[-1][0]) > 0
    assert float(ends[-1][1]) > 60  # guessing gives 10


def test_it_reads_idx_files(tmp_path):
    for name, count in (("train", 60), ("t10k", 20)):
        images = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        data = b"\x00\x00\x08\x03" + struct.pack(">3i", count, 28, 28) + images.numpy().tobytes()
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(data))
        labels = b"\x00\x00\x08\x01" + struct.pack(">i", count) + bytes(range(10)) * (count // 10)
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    assert "on 1 process(es)" in _run("--data-dir", str(tmp_path), "--epochs", "1")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(labels[:-1])
    command = [sys.executable, str(SCRIPT), "--data-dir", str(tmp_path)]
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert wrong.returncode == 1 and "says (20,), 28 bytes, but has 27" in wrong.stderr


@pytest.mark.parametrize("options", [["--use-adasum"], ["--compression", "fp8"]], ids=["adasum", "8 bits"])
def test_its_options_run_under_a_launcher(options):
    arguments = ["--drawn", "200", "--epochs", "1", *options]
    script = f"import runpy, sys; sys.argv[1:] = {arguments!r}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    for code, _, err in outputs_of(start_script(script, 2, free_port()), timeout_s=120):
        assert code == 0, err
