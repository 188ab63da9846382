"""Horovod's API on 2 and 4 ranks over NCCL: every check of tests/horovod/test_gpu.py, and the head in a script.

Run with `make test-gpu`.
"""

import json
import sys
from pathlib import Path

import pytest
from tests.horovod.test_gpu import CHECKS, _checked
from tests.launch.conftest import run  # noqa: F401 (fixture)
from tests.launch.test_head_in_horovod_scripts import SCRIPT
from tests.many_gpus.conftest import DEVICE


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_over_nccl(run_gpu_ranks, check, size):
    run_gpu_ranks(size, _checked, check, timeout_s=60.0)


@pytest.mark.gpu
def test_the_head_in_a_horovod_script_has_the_same_curve_on_1_2_and_4_ranks(run, gpu_ranks, tmp_path):  # noqa: F811
    gpu_ranks.skip_if_impossible(4)
    program = tmp_path / "job.py"
    program.write_text(SCRIPT)
    env = {"MEGACLASS_TEST_ONE_GPU": "1" if gpu_ranks.are_hosts(4) else "0"}
    curves = []
    for size in (1, 2, 4):
        as_host = (sys.executable, str(Path(__file__).with_name("as_host.py")), str(program), DEVICE)
        done = run("-np", str(size), "--horovod", *as_host, env=env, timeout_s=120)
        assert done.code == 0, done.story()
        line = next(line for line in done.out.splitlines() if "losses" in line)
        curves.append(json.loads(line.partition("losses ")[2]))
    assert len(set(curves[0])) == 6
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-9)
