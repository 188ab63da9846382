"""Narrow on the wire: what arrives, what it costs, what is not lost for ever. And the timeline."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from examples.wire_bytes import SentBytes
from tests.horovod.jobs import error_of, in_job, job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from megaclass_launch.ranks.wire_formats import compression_hook


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_8_bits_cannot_be_added_outside_of_an_allreduce(name):
    compressor = getattr(hvd.Compression, name)
    assert error_of(lambda: compressor.compress(torch.ones(2)))[0] == "ValueError"
    assert compressor.compress(torch.tensor([3]))[0].tolist() == [3]


ERRORS = {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "fp8": 0.08, "int8": 0.08}
"""Largest error of a tensor of a group, relative to its norm: with 8 bits, neighbours in a block share their exponent."""


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    """Ranks have batches of different sizes."""
    batch = torch.randn(5 + 3 * rank, 70, generator=torch.Generator().manual_seed(rank))
    return model(batch.to(next(model.parameters()).dtype)).square().mean()


def _gradient_groups(rank: int, size: int) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(70, 33), nn.Tanh(), nn.Linear(33, 5))
    exact = copy.deepcopy(start).double()
    # The truth: all ranks' gradients, computed here in float64 and added up.
    sum(_loss(exact, other) for other in range(size)).backward()
    sums = [parameter.grad for parameter in exact.parameters()]
    for name, error in ERRORS.items():
        for number, op in ((1, hvd.Average), (3, hvd.Sum), (0, hvd.Average)):
            model = copy.deepcopy(start)
            groups = number or [[model[0].weight, model[2].bias], [model[0].bias]]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.0),
                groups=groups,
                op=op,
                compression=getattr(hvd.Compression, name),
            )
            _loss(model, rank).backward()
            optimizer.step()
            for parameter, total in zip(model.parameters(), sums, strict=True):
                expected = total / size if op == hvd.Average else total
                off = float((parameter.grad.double() - expected).norm() / expected.norm())
                assert off < error, (name, number, op, tuple(parameter.shape), off)
            # Every rank has the same bits.
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
            gathered = hvd.allgather(flat[None])
            assert all(torch.equal(gathered[0], other) for other in gathered), (name, number, op)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_compressed_groups_of_gradients_are_averages_of_numbers_and_not_of_their_codes(run_ranks, size):
    run_ranks(size, in_job, _gradient_groups)


def _groups_of_several_dtypes(rank: int, size: int) -> None:
    by_rank = [torch.Generator().manual_seed(other) for other in range(size)]
    pairs = [(torch.randn(300, generator=each), torch.randn(7, 3, generator=each).half()) for each in by_rank]
    for name, error in ERRORS.items():
        got = hvd.grouped_allreduce(list(pairs[rank]), compression=getattr(hvd.Compression, name), op=hvd.Sum)
        for place, result in enumerate(got):
            expected = sum(pair[place].double() for pair in pairs)
            assert result.dtype is pairs[0][place].dtype
            assert float((result.double() - expected).norm() / expected.norm()) < max(error, 1e-3), (name, place)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_compressed_group_may_hold_several_dtypes(run_ranks, size):
    run_ranks(size, in_job, _groups_of_several_dtypes)


def _reduce(rank: int, size: int) -> None:
    for name, error in (("fp16", 1e-3), ("bf16", 1e-2), ("fp8", 0.06), ("int8", 0.03)):
        compression = getattr(hvd.Compression, name)
        vectors = torch.stack([torch.randn(5003, generator=torch.Generator().manual_seed(r)) for r in range(size)])
        got = hvd.allreduce(vectors[rank], compression=compression)
        assert float((got - vectors.mean(0)).norm() / vectors.mean(0).norm()) < (error if size > 1 else 1e-6)
        # Every rank has the same bits.
        gathered = hvd.allgather(got[None])
        assert all(torch.equal(gathered[0], other) for other in gathered)
        # With a name, what rounding loses comes later: the mean over steps tends to the truth.
        mean = sum(hvd.allreduce(vectors[rank], name=name, compression=compression) for _ in range(20)) / 20
        assert float((mean - vectors.mean(0)).norm() / vectors.mean(0).norm()) < max(error / 8, 2e-5)
        leaf = vectors[rank].clone().requires_grad_()
        hvd.allreduce(leaf, compression=compression, op=hvd.Sum).sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full_like(leaf, float(size)))
        assert hvd.allreduce(torch.ones(3, dtype=torch.int32), compression=compression).tolist() == [1, 1, 1]
        group = hvd.grouped_allreduce([torch.ones(3), torch.ones(200)], compression=compression, op=hvd.Sum)
        assert [part.unique().tolist() for part in group] == [[size], [size]]
    assert (
        error_of(lambda: hvd.allreduce(torch.ones(2), compression=hvd.Compression.fp8, op=hvd.Max))[0] == "ValueError"
    )
    assert hvd.allreduce(torch.ones(2), compression=hvd.Compression.fp16, op=hvd.Max).tolist() == [1, 1]

    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 2

    assert hvd.allreduce(torch.full((2,), 3.0), compression=Halved).tolist() == [3, 3]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_compressed_allreduce_is_the_same_on_all_ranks_and_right_over_time(run_ranks, size):
    run_ranks(size, in_job, _reduce)


def _traffic(rank: int, size: int) -> dict[str, int]:
    sent = {}
    tensor = torch.randn(1_000_000)
    for name in ("none", "fp16", "bf16", "fp8", "int8"):
        hvd.barrier()
        counter = SentBytes()
        hvd.allreduce(tensor, name=name, compression=getattr(hvd.Compression, name))
        hvd.barrier()
        sent[name] = counter.count()
    return sent


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_counted_by_the_kernel_fall_by_two_and_by_four(run_ranks, size):
    by_rank = run_ranks(size, in_job, _traffic)
    total = {name: sum(sent[name] for sent in by_rank) for name in by_rank[0]}
    assert total["none"] >= 2 * (size - 1) * 4_000_000
    for name, share in (("fp16", 0.52), ("bf16", 0.52), ("fp8", 0.30), ("int8", 0.30)):
        assert total[name] <= share * total["none"], total


def _data_parallel(wire: str) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 400), nn.ReLU(), nn.Linear(400, 10))
    parallel = DistributedDataParallel(model)
    if wire != "none":
        parallel.register_comm_hook(*compression_hook(wire))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    # The weights that rank 0 sends to the others at the start have left its socket only once they have arrived there.
    dist.barrier()
    counter = SentBytes()
    for _ in range(10):
        optimizer.zero_grad()
        parallel(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()
    sent = counter.count()
    # A rank that leaves closes its connections, which could no longer be counted on the other one.
    dist.barrier()
    return [parameter.detach() for parameter in model.parameters()], sent


def test_the_hook_of_data_parallel_training_sends_less_and_trains_alike(run_ranks):
    plain, plain_bytes = run_ranks(2, _data_parallel, "none")[0]
    for wire, share in (("bf16", 0.55), ("fp8", 0.3), ("int8", 0.3)):
        (weights, sent), (others, _) = run_ranks(2, _data_parallel, wire)
        assert all(map(torch.equal, weights, others))
        assert sent < share * plain_bytes
        for one, two in zip(weights, plain, strict=True):
            torch.testing.assert_close(one, two, atol=1e-3, rtol=0.05)


def _timeline(path: str) -> None:
    with job(TIMELINE="DYNAMIC") as (rank, _):
        hvd.start_timeline(path, mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="test_allreduce")
        for handle in [hvd.allreduce_async(torch.ones(70_000), name=f"fused.{i}") for i in range(3)]:
            hvd.synchronize(handle)
        hvd.stop_timeline()
        if rank == 0:
            hvd.start_timeline(path + ".second")
            hvd.stop_timeline()


def test_the_timeline_is_a_chrome_trace_of_negotiation_and_execution(run_ranks, tmp_path):
    run_ranks(2, _timeline, str(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    events = json.loads(text)
    names = {event.get("name") for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START", "MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE"} <= names
    assert "start_time_since_epoch_in_micros" in text and "allreduce.test_allreduce" in text
    assert sum(event["ph"] == "B" for event in events) == sum(event["ph"] == "E" for event in events)
    assert json.loads((tmp_path / "trace.json.second").read_text())


def _no_timeline(rank: int, size: int) -> tuple[str, str]:
    return error_of(lambda: hvd.start_timeline("anywhere.json"))


def test_a_timeline_must_have_been_announced(run_ranks):
    assert run_ranks(1, in_job, _no_timeline)[0][0] == "ValueError"
