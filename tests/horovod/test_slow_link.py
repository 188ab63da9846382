import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hvd_link.py"


def _can_make_namespaces() -> bool:
    name = f"mchvdtry{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return made.returncode == 0


@pytest.mark.ranks
@pytest.mark.skipif(not _can_make_namespaces(), reason="needs root and iproute2")
def test_over_a_slow_link_8_bits_save_bytes_as_the_interface_counts_them():
    command = [sys.executable, str(SCRIPT), "--steps", "2", "--pairs", "1", "--wires", "none", "bf16", "fp8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| [\d.]+ \| [\d,]+ \| ([\d.]+) \|$", run.stdout, flags=re.MULTILINE)
    shares = {wire: float(share) for wire, share in rows}
    assert shares["bf16"] <= 0.52 and shares["fp8"] <= 0.27, run.stdout
