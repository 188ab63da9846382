"""`run_gpu_ranks`: as `run_ranks`, over NCCL.

With a GPU for each rank they are used as they are. With fewer, all ranks share the first GPU, each as a host of its own
(`be_host`).
MEGACLASS_TEST_DEVICE=cpu rehearses the same tests on a machine without a GPU, over gloo.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import RankPool

DEVICE = os.environ.get("MEGACLASS_TEST_DEVICE", "cuda")


def _sum_of_ones(device: str) -> float:
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    return float(one)


class GpuRanks:
    def __init__(self, folder: Path) -> None:
        self._pools = {are_hosts: RankPool(folder, device=DEVICE, are_hosts=are_hosts) for are_hosts in (False, True)}
        self._refusal: str | None = None

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        self.skip_if_impossible(size)
        return self._pools[self.are_hosts(size)].run(size, function, *args, timeout_s=timeout_s)

    def are_hosts(self, size: int) -> bool:
        """Whether so many ranks share a GPU, each as a host of its own."""
        return DEVICE == "cpu" or torch.cuda.device_count() < size

    def skip_if_impossible(self, size: int) -> None:
        if DEVICE == "cuda" and not torch.cuda.is_available():
            pytest.skip("torch sees no GPU; MEGACLASS_TEST_DEVICE=cpu rehearses these tests over gloo")
        if self.are_hosts(size) and self._why_not_on_one_gpu():
            pytest.skip(f"needs {size} GPUs, or an NCCL that runs several ranks on one: {self._refusal}")

    def kill(self) -> None:
        for pool in self._pools.values():
            pool.kill()

    def _why_not_on_one_gpu(self) -> str:
        """Returns the error of a bare all-reduce of two ranks on one GPU; empty if it works. Tried once."""
        if self._refusal is None:
            try:
                assert self._pools[True].run(2, _sum_of_ones, DEVICE) == [2.0, 2.0]
                self._refusal = ""
            except pytest.fail.Exception as error:
                self._refusal = str(error)[-500:]
        return self._refusal


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[GpuRanks]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = GpuRanks(Path(folder))
        yield ranks
        ranks.kill()


@pytest.fixture
def run_gpu_ranks(gpu_ranks: GpuRanks) -> Callable[..., list[Any]]:
    """run_gpu_ranks(size, function, *args): results by rank."""
    return gpu_ranks.run
