import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "compression_lab.py"


@pytest.mark.soak
def test_the_laboratory_fills_its_table_in_one_run(tmp_path):
    out = tmp_path / "lab.md"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--drawn", "384", "--epochs", "1", "--seeds", "2", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    pattern = r"^\| ([^|]+) \| (\d) \| ([\d.]+) \| ([\d,]+) \| ([\d.–]+) \| ([\d.]+)% \| ([^|]+) \|$"
    rows = re.findall(pattern, run.stdout, flags=re.MULTILINE)
    assert [(what, size) for what, size, *_ in rows] == [
        ("serial", "1"),
        ("data parallel", "2"),
        ("data parallel", "4"),
        ("16 bits (bf16)", "2"),
        ("16 bits (bf16)", "4"),
        ("8 bits (fp8)", "2"),
        ("8 bits (fp8)", "4"),
        ("8 bits (int8)", "2"),
        ("8 bits (int8)", "4"),
    ]
    assert out.read_text() == run.stdout
    for what, _, _, sent, share, _, difference in rows:
        assert bool(re.fullmatch(r"[+-][\d.]+ ± [\d.]+", difference)) == ("bits" in what)
        if "bits" in what:
            assert float(share) <= (0.52 if "16" in what else 0.27), rows
        assert (int(sent.replace(",", "")) > 0) == (what != "serial")
