"""Collectives, agreement, head, checkpoint, search and fp16 on 2 and 4 ranks over NCCL. Run with `make test-gpu`."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import RankPool
from tests.megaclass.checkpoint.test_save_and_load import CONFIG
from torch import Tensor, nn

from megaclass import ArcFace, CurricularFace, PartialFC, RowAdagrad, RowAdamW
from megaclass.checkpoint.load import saved_rows
from megaclass.checkpoint.manifest import read_manifest
from megaclass.checkpoint.retention import checkpoint_folder
from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.distributed.agreement import on_every_rank, on_main_rank_for_long, text_of_main_rank
from megaclass.distributed.data_parallel import average_buffers_, data_parallel
from megaclass.errors import DataError
from megaclass.evaluation.search import search, shard_of_rank
from megaclass_launch.errors import AgreedError
from megaclass_launch.ranks.collectives import gather_blocks, scatter_sum, sum_over_ranks_

WIDTH, NUM_CLASSES, BATCH, NUM_STEPS = 128, 301, 24, 6
ON_GPU = os.environ.get("MEGACLASS_TEST_DEVICE", "cuda") == "cuda"
KERNELS = ("chunked", "triton_fused") if ON_GPU else ("chunked",)
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
    losses, centres = _train("chunked", "float64", CASES[case])
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


def _search() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    probes_PD, gallery_ND = (
        nn.functional.normalize(torch.randn(count, 32, generator=generator)) for count in (50, 1001)
    )
    labels_N = torch.arange(len(gallery_ND)) % 200
    device = own_device() if dist.is_initialized() else torch.device("cpu")
    shard = shard_of_rank(gallery_ND, labels_N.numpy())
    found = search(probes_PD, shard, k=7, device=device, probe_labels_P=labels_N[: len(probes_PD)].numpy())
    return found.other_scores_Pk.cpu(), found.other_indices_Pk.cpu(), found.mate_scores_P.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_a_search_over_all_ranks_finds_what_one_process_finds(run_gpu_ranks, size):
    scores_Pk, indices_Pk, mates_P = _search()
    for other_scores_Pk, other_indices_Pk, other_mates_P in run_gpu_ranks(size, _search):
        torch.testing.assert_close(other_scores_Pk, scores_Pk, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other_mates_P, mates_P, rtol=1e-4, atol=1e-5)
        assert float((other_indices_Pk == indices_Pk).double().mean()) > 0.99


def _train_in_half_precision() -> tuple[list[float], list[bool], float]:
    """Losses, whether backbone and head both stayed as they were, and the loss scale at the end.

    In step 2 a gradient of the last rank overflows; DDP tells the backbones of the others.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), own_device()
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(device)
    wrapped = data_parallel(backbone)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
    head = PartialFC(WIDTH, NUM_CLASSES, margin=ArcFace(scale=16, margin=0.4), seed=3, device=device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    head.follow_scaler(scaler)
    losses, are_unchanged = [], []
    for step, (x, y) in enumerate(_batches(torch.float32)):
        before = [tensor.detach().clone() for tensor in (*backbone.parameters(), *head.rows().values())]
        optimizer.zero_grad()
        # Equal statistics on all ranks: every rank normalises the whole batch and keeps its part.
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            embeddings = wrapped(x.to(device)).chunk(size)[rank]
        if step == 2 and rank == size - 1:
            embeddings.register_hook(lambda gradient: gradient * torch.inf)
        loss = head(embeddings, y.to(device).chunk(size)[rank])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        head.step(lr=0.1)
        after = [*backbone.parameters(), *head.rows().values()]
        unchanged = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert all(unchanged) or not all(unchanged[-2:]), unchanged
        are_unchanged.append(all(unchanged))
        losses.append(float(loss))
    average_buffers_(backbone)
    return losses, are_unchanged, scaler.get_scale()


@pytest.mark.gpu
def test_an_overflow_on_one_rank_skips_the_step_of_backbone_and_head_on_all_ranks(run_gpu_ranks):
    (expected,) = run_gpu_ranks(1, _train_in_half_precision)
    assert expected[1:] == ([step == 2 for step in range(NUM_STEPS)], 2.0**9)
    for size in (2, 4):
        for losses, are_unchanged, scale in run_gpu_ranks(size, _train_in_half_precision):
            assert (are_unchanged, scale) == expected[1:]
            assert losses == pytest.approx(expected[0], rel=1e-2)
