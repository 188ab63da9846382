"""Every check of tests/hvd/test_gpu.py on 2 and 4 ranks over NCCL. Run with `make test-gpu`."""

import pytest
from tests.hvd.test_gpu import CHECKS, _checked


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_over_nccl(run_gpu_ranks, check, size):
    run_gpu_ranks(size, _checked, check, timeout_s=120.0)
