import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hvd_link.py"


def _can_make_namespaces() -> bool:
    name = f"mchvdtry{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return made.returncode == 0


@pytest.mark.skipif(not _can_make_namespaces(), reason="needs root and iproute2")
def test_over_a_slow_link_8_bits_save_bytes_as_the_interface_counts_them_and_time():
    command = [sys.executable, str(SCRIPT), "--steps", "4", "--pairs", "1", "--wires", "none", "bf16", "fp8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \| [\d,]+ \| ([\d.]+) \|$", run.stdout, flags=re.MULTILINE)
    found = {wire: (float(faster), float(share)) for wire, faster, share in rows}
    assert found["bf16"][1] <= 0.52 and found["fp8"][1] <= 0.27, run.stdout
    # The benchmark has the figure; here only that it is worth it, on a machine that does other things too.
    assert found["fp8"][0] > 1.5, run.stdout
