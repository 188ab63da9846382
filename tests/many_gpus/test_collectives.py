"""Collectives, agreement, head, checkpoint and faults on 2 and 4 ranks over NCCL. Run with `make test-gpu`."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.test_save_and_load import CONFIG
from tests.conftest import RankPool, be_host
from tests.forked import forked_ranks
from tests.launch.conftest import wait_until
from torch import Tensor

from megaclass import ArcFace, CurricularFace, PartialFC, RowAdagrad, RowAdamW
from megaclass.checkpoint.load import saved_rows
from megaclass.checkpoint.manifest import read_manifest
from megaclass.checkpoint.retention import checkpoint_folder
from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.distributed.agreement import on_every_rank, on_main_rank_for_long, text_of_main_rank
from megaclass.distributed.collectives import gather_blocks, scatter_sum, sum_over_ranks_
from megaclass.distributed.process_group import process_group
from megaclass.errors import AgreedError, DataError
from megaclass.world import world_from_environment

WIDTH, NUM_CLASSES, BATCH, NUM_STEPS = 128, 301, 24, 6
ON_GPU = os.environ.get("MEGACLASS_TEST_DEVICE", "cuda") == "cuda"
KERNELS = ("reference", "chunked", "triton_fused") if ON_GPU else ("reference", "chunked")
CASES: dict[str, dict[str, Any]] = {
    "all classes": {},
    "sampled": {"sample_rate": 0.3},
    "adamw": {"sample_rate": 0.3, "optimizer": RowAdamW()},
    "adagrad, sub-centres": {"sample_rate": 0.3, "optimizer": RowAdagrad(), "num_subcentres": 2},
    "curricular, corrected": {"sample_rate": 0.3, "margin": CurricularFace(scale=16), "correct_sampling": True},
}


def own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _exchanges() -> tuple[str, str]:
    rank, size, device = dist.get_rank(), dist.get_world_size(), own_device()
    mine = torch.full((2, 3), float(rank), device=device)
    blocks = torch.arange(size, device=device)[:, None].expand(size, 4) * 10.0 + rank
    everybody = size * (size - 1) / 2
    assert [float(block.mean()) for block in gather_blocks(mine, None)] == list(range(size))
    assert sum_over_ranks_(mine.clone(), None).unique().tolist() == [everybody]
    assert scatter_sum(blocks, None).unique().tolist() == [size * 10 * rank + everybody]
    assert text_of_main_rank(lambda: f"ü of rank {rank}", device) == "ü of rank 0"
    done: list[int] = []
    on_main_rank_for_long(lambda: done.append(rank), device)
    assert done == ([0] if rank == 0 else [])

    def fail_on_the_last() -> None:
        if rank == size - 1:
            raise DataError("the record is broken")

    with pytest.raises(DataError if rank == size - 1 else AgreedError, match="the record is broken"):
        on_every_rank(fail_on_the_last, device)
    return os.environ.get("NCCL_HOSTID", ""), socket.gethostname()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_exchanges_and_agreement(run_gpu_ranks, size):
    run_gpu_ranks(size, _exchanges)


@pytest.mark.ranks
def test_ranks_of_one_machine_pass_for_hosts(tmp_path):
    pool = RankPool(tmp_path, are_hosts=True)
    try:
        hosts = pool.run(2, _exchanges)
    finally:
        pool.kill()
    assert [number for number, _ in hosts] == ["h0", "h1"]
    assert os.getuid() != 0 or [name for _, name in hosts] == ["h0", "h1"]


def _batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator).to(dtype),
            torch.randint(NUM_CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(NUM_STEPS)
    ]


def _train(kernel: str, storage: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Losses and centres. Rank 0 has half of the images of the others."""
    is_group = dist.is_initialized()
    rank, size, device = (
        (dist.get_rank(), dist.get_world_size(), own_device()) if is_group else (0, 1, torch.device("cpu"))
    )
    options = {"margin": ArcFace(scale=16, margin=0.4), **options}
    head = PartialFC(WIDTH, NUM_CLASSES, kernel=kernel, storage=storage, seed=3, device=device, **options)
    parts = [BATCH // (2 * size)] + [0] * (size - 1) if size > 1 else [BATCH]
    for other in range(1, size):
        parts[other] = (BATCH - parts[0]) // (size - 1) if other < size - 1 else BATCH - sum(parts)
    losses = []
    for x, y in _batches(torch.float64 if storage == "float64" else torch.float32):
        loss = head(x.split(parts)[rank].to(device).requires_grad_(), y.split(parts)[rank].to(device))
        loss.backward()
        head.step(lr=1e-3 if isinstance(head.optimizer, RowAdamW) else 0.1)
        losses.append(loss.detach().double().cpu())
    head.check()
    return torch.stack(losses), head.centres(torch.arange(NUM_CLASSES)).double().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_the_head_is_that_of_one_float64_process_on_1_2_and_4_ranks(run_gpu_ranks, case, kernel):
    losses, centres = _train("reference", "float64", CASES[case])
    for size in (1, 2, 4):
        for other_losses, other_centres in run_gpu_ranks(size, _train, kernel, "float32", CASES[case]):
            torch.testing.assert_close(other_losses, losses, rtol=1e-4, atol=1e-4)
            assert float((other_centres - centres).norm() / centres.norm()) < 1e-3


def _write(folder: Path, head: PartialFC, device: torch.device) -> None:
    """Collective. Writes a checkpoint of the head and waits for it."""
    shard = {"class_start": head.classes.start, "class_stop": head.classes.stop, "num_classes": NUM_CLASSES}
    with CheckpointWriter(folder, config=CONFIG, keep=9, device=device) as writer:
        writer.save(Snapshot(step=2, shared={}, head_rows=head.rows(), **shard))


def _save(folder: Path) -> dict[str, Tensor]:
    device = own_device()
    head = PartialFC(WIDTH, NUM_CLASSES, sample_rate=0.5, seed=3, device=device)
    for x, y in _batches(torch.float32)[:2]:
        head(x.to(device).requires_grad_(), y.to(device)).backward()
        head.step(lr=0.1)
    _write(folder, head, device)
    return {name: rows.cpu() for name, rows in head.rows().items()}


def _load(folder: Path) -> dict[str, Tensor]:
    head = PartialFC(WIDTH, NUM_CLASSES, sample_rate=0.5, seed=3, device=own_device())
    for first_class, rows in saved_rows(folder, read_manifest(folder), head.classes.start, head.classes.stop):
        head.load_rows(first_class, rows)
    return {name: rows.cpu() for name, rows in head.rows().items()}


@pytest.mark.gpu
def test_what_4_ranks_save_2_ranks_load_bit_for_bit(run_gpu_ranks, tmp_path):
    saved = run_gpu_ranks(4, _save, tmp_path)
    loaded = run_gpu_ranks(2, _load, checkpoint_folder(tmp_path, 2))
    assert len(saved[0]) > 1
    for name in saved[0]:
        assert torch.equal(torch.cat([part[name] for part in loaded]), torch.cat([part[name] for part in saved])), name


def _fail(where: str, device: str, folder: Path) -> None:
    """The last rank raises, while the others wait for it in a collective."""
    be_host(int(os.environ["RANK"]))
    world = world_from_environment()
    with process_group(world, device=device, timeout_s=120) as place:
        head = PartialFC(WIDTH, NUM_CLASSES, device=place)

        def fail(at: str) -> None:
            if at == where and world.rank == world.size - 1:
                raise RuntimeError(f"planned failure in {at}")

        for number, (x, y) in enumerate(_batches(torch.float32)):
            leaf = x.to(place).requires_grad_()
            if number == 2:
                print("ready", flush=True)
                fail("forward")
                leaf.register_hook(lambda grad: fail("backward"))
            head(leaf, y.to(place)).backward()
            head.step(lr=0.1)
        fail("agreement")
        on_every_rank(lambda: None, place)
        fail("save")
        _write(folder, head, place)
        on_every_rank(lambda: None, place)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("where", ["forward", "backward", "agreement", "save"])
def test_one_rank_that_raises_is_heard_and_ends_all_ranks(run_gpu_ranks, tmp_path, where, size):
    run_gpu_ranks(2, own_device)  # skips where it cannot work
    device = "cuda" if ON_GPU else "cpu"
    with forked_ranks(size, _fail, where, device, tmp_path, ranks_per_host=1) as ranks:
        wait_until(lambda: all("ready" in rank.stdout for rank in ranks), timeout_s=90)
        deadline = time.monotonic() + 15
        codes = [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
        assert f"planned failure in {where}" in ranks[-1].stderr
        assert all(codes), codes  # None: it is still there
