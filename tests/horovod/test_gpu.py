"""Horovod's API on CUDA tensors against plain references, on one rank over NCCL and on two and four ranks.

With fewer GPUs than ranks, tensors travel through main memory. MEGACLASS_TEST_DEVICE=cpu runs the same checks, less those
about streams and GPU memory, on a machine without a GPU.
"""

import copy
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.horovod.jobs import job
from torch import Tensor, nn

import horovod.torch as hvd
from horovod.engine.job import current

DEVICE = os.environ.get("MEGACLASS_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU"),
]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SLEEP_CYCLES = 200_000_000  # about a tenth of a second


class Place:
    """Who this rank is, and where its tensors lie."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = hvd.rank(), hvd.size()

    def of(self, rank: int, dtype: torch.dtype = torch.float32, rows: int = 2) -> Tensor:
        return (torch.arange(rows * 3, device=self.device).view(rows, 3) % 5 + rank).to(dtype)

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(self.device)

    def full(self, count: int, value: float) -> Tensor:
        return torch.full((count,), float(value), device=self.device)


def same(one: Tensor, two: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(one, two, **tolerance)


def equal(one: Tensor, two: Tensor) -> None:
    """To the bit, and on the same device: a result that comes back on the CPU is wrong, too."""
    torch.testing.assert_close(one, two, rtol=0, atol=0)


# -- collectives ------------------------------------------------------------------------------------------------------


def reductions_in_every_dtype(place: Place) -> None:
    rank, size = place.rank, place.size
    for dtype in INTEGERS + FLOATS:
        mine = place.of(rank, dtype)
        everybody = torch.stack([place.of(r, dtype).double() for r in range(size)])
        for op, expected in (
            (hvd.Sum, everybody.sum(0)),
            (hvd.Min, everybody.amin(0)),
            (hvd.Max, everybody.amax(0)),
            (hvd.Product, everybody.prod(0)),
        ):
            equal(hvd.allreduce(mine, op=op), expected.long().to(dtype))
        mean = everybody.mean(0)
        same(hvd.allreduce(mine), (mean if dtype.is_floating_point else mean.trunc()).to(dtype))
        equal(mine, place.of(rank, dtype))
        in_place = mine.clone()
        assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
        equal(in_place, everybody.sum(0).to(dtype))
        whole = sum(place.of(r, dtype, rows=size + 1).double() for r in range(size))
        scattered = hvd.reducescatter(place.of(rank, dtype, rows=size + 1), op=hvd.Sum)
        equal(scattered, whole[rank + 1 if rank else 0 : rank + 2].to(dtype))
    whole = torch.tensor([7, -7, 10], device=place.device)
    equal(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.3), (whole.double() * 0.3).long() * size)
    half = torch.tensor([1.5, 3.0], dtype=torch.float16, device=place.device)
    same(hvd.allreduce(half, op=hvd.Sum, prescale_factor=0.1), (half.float() * 0.1).half() * size)


def moves_in_every_dtype(place: Place) -> None:
    rank, size, root = place.rank, place.size, place.size - 1
    for dtype in [*INTEGERS, *FLOATS, torch.bool]:
        mine = place.of(rank, dtype)
        equal(hvd.allgather(mine), torch.cat([place.of(r, dtype) for r in range(size)]))
        uneven = hvd.allgather(place.of(rank, dtype, rows=rank))
        equal(uneven, torch.cat([place.of(r, dtype, rows=r) for r in range(size)]))
        equal(hvd.broadcast(mine, root), place.of(root, dtype))
        in_place = mine.clone()
        assert hvd.broadcast_(in_place, root) is in_place
        equal(in_place, place.of(root, dtype))
        splits = [destination + rank for destination in range(size)]
        sent = torch.full((sum(splits), 2), rank, device=place.device).to(dtype)
        received, counts = hvd.alltoall(sent, splits=torch.tensor(splits, dtype=torch.int32, device=place.device))
        assert counts.tolist() == [rank + source for source in range(size)] and counts.device == place.device
        equal(received[:, 0], torch.arange(size, device=place.device).repeat_interleave(counts.long()).to(dtype))


def odd_shapes(place: Place) -> None:
    rank, size, device = place.rank, place.size, place.device
    assert hvd.allreduce(torch.tensor(float(rank), device=device), op=hvd.Sum).shape == ()
    empty = torch.zeros(0, 3, device=device)
    results = [hvd.allreduce(empty), hvd.allgather(empty), hvd.alltoall(empty), hvd.reducescatter(empty)]
    assert all(result.shape == (0, 3) and result.device == device for result in results)
    equal(hvd.allgather(place.full(5 if rank == size - 1 else 0, 1.0)), place.full(5, 1.0))
    large = place.full(12_000_000, rank + 1.0)
    equal(hvd.allreduce(large, op=hvd.Sum), place.full(12_000_000, size * (size + 1) / 2))
    equal(hvd.allreduce(large, name="large", prescale_factor=2.0), place.full(12_000_000, size + 1.0))


def handles_and_groups(place: Place) -> None:
    rank, size, device = place.rank, place.size, place.device
    # Ranks submit in different orders, and all at once: they are fused, each under its own name.
    names = list(range(60))[:: 1 if rank % 2 else -1]
    handles = [
        (number, hvd.allreduce_async(place.full(1000 + number, number + rank), name=f"{number}", op=hvd.Sum))
        for number in names
    ]
    for number, handle in handles:
        equal(hvd.synchronize(handle), place.full(1000 + number, size * number + size * (size - 1) / 2))
    tensors = _of_three_dtypes(place, rank)
    expected = [sum(parts) for parts in zip(*[_of_three_dtypes(place, r) for r in range(size)], strict=True)]
    copies = [tensor.clone() for tensor in tensors]
    hvd.grouped_allreduce_(copies, op=hvd.Sum)
    asynchronous = hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum))
    for got in (hvd.grouped_allreduce(tensors, op=hvd.Sum), asynchronous, copies):
        for one, two in zip(got, expected, strict=True):
            equal(one, two)
    gathered = hvd.grouped_allgather([place.full(rank, rank), place.full(1, 1.0)])
    assert gathered[0].tolist() == [r for r in range(size) for _ in range(r)] and gathered[1].shape == (size,)
    scattered = hvd.grouped_reducescatter([place.full(size, 1.0), place.full(2 * size, 1.0)], op=hvd.Sum)
    equal(scattered[1], place.full(2, size))
    output, splits = hvd.synchronize(hvd.alltoall_async(place.full(size, rank)))
    assert output.tolist() == list(range(size)) and splits.tolist() == [1] * size
    waiting = [hvd.broadcast_async(place.full(4, rank), 0), hvd.allgather_async(place.full(1, rank))]
    equal(hvd.synchronize(waiting[1]), torch.arange(size, device=device).float())
    equal(hvd.synchronize(waiting[0]), place.full(4, 0.0))
    hvd.barrier()


def _of_three_dtypes(place: Place, rank: int) -> list[Tensor]:
    return [place.full(3, rank), place.of(rank, torch.int64), place.of(rank, torch.float16)]


def gradients_of_collectives(place: Place) -> None:
    rank, size = place.rank, place.size
    data = place.random(size, 2 * size, 3, seed=1, dtype=torch.float64)
    weight = place.random(size, 2 * size * size, 3, seed=2, dtype=torch.float64)

    def own(function: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        leaf = data[rank].clone().requires_grad_()
        (function(leaf) * weight[rank, :rows]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    rows, average = 2 * size, weight[:, : 2 * size].mean(0)
    same(own(hvd.allreduce, rows), average)
    same(own(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, prescale_factor=0.5)[0], rows), average * size * 0.5)
    same(own(lambda x: hvd.broadcast(x, 0), rows), average * (rank == 0))
    same(own(hvd.allgather, rows * size), weight.mean(0)[rank * rows : (rank + 1) * rows])
    same(own(hvd.reducescatter, 2), torch.cat([weight[r, :2] for r in range(size)]))
    same(own(hvd.alltoall, rows), torch.cat([weight[r, 2 * rank : 2 * rank + 2] for r in range(size)]))


def process_sets(place: Place) -> None:
    rank, size = place.rank, place.size
    if size == 1:
        return  # there is no other set than that of all
    sets = [hvd.add_process_set([r for r in range(size) if r % 2 == odd]) for odd in range(2)]
    ends = hvd.add_process_set([0, size - 1]) if size > 2 else None
    mine, members = sets[rank % 2], [r for r in range(size) if r % 2 == rank % 2]
    same(hvd.allreduce(place.full(5, rank), process_set=mine), place.full(5, sum(members) / len(members)))
    same(hvd.broadcast(place.full(5, rank), members[-1], process_set=mine), place.full(5, members[-1]))
    equal(hvd.allgather(place.full(1, rank), process_set=mine), torch.tensor(members, device=place.device).float())
    if ends is not None and ends.included():
        same(hvd.allreduce(place.full(7, rank), process_set=ends), place.full(7, (size - 1) / 2))
    same(hvd.allreduce(place.full(5, rank)), place.full(5, (size - 1) / 2))
    assert all(hvd.remove_process_set(one) for one in [*sets, ends] if one is not None)


def adasum(place: Place) -> None:
    vectors = [place.random(50, seed=r, dtype=torch.float64) for r in range(place.size)]

    def combined(a: Tensor, b: Tensor) -> Tensor:
        dot, aa, bb = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
        return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b

    level = list(vectors)
    while len(level) > 1:
        level = [combined(*level[i : i + 2]) for i in range(0, len(level), 2)]
    same(hvd.allreduce(vectors[place.rank], op=hvd.Adasum), level[0])
    same(hvd.allreduce(vectors[place.rank].float(), op=hvd.Adasum), level[0].float(), atol=1e-5, rtol=1e-5)


def compression(place: Place) -> None:
    size = place.size
    for name, limit in (("fp16", 1e-3), ("bf16", 1e-2), ("fp8", 0.06), ("int8", 0.03)):
        narrow = getattr(hvd.Compression, name)
        vectors = torch.stack([place.random(5003, seed=r) for r in range(size)])
        truth = vectors.double().mean(0)
        got = hvd.allreduce(vectors[place.rank], compression=narrow)
        assert float((got - truth).norm() / truth.norm()) < limit
        gathered = hvd.allgather(got[None])
        assert all(torch.equal(gathered[0], other) for other in gathered)
        # Under a name, what rounding loses comes later: the mean over steps tends to the truth.
        mean = sum(hvd.allreduce(vectors[place.rank], name=name, compression=narrow).double() for _ in range(20)) / 20
        assert float((mean - truth).norm() / truth.norm()) < max(limit / 8, 2e-5)
        group = hvd.grouped_allreduce([place.full(3, 1.0), place.full(200, 1.0)], compression=narrow, op=hvd.Sum)
        assert [part.unique().tolist() for part in group] == [[size], [size]]
    half = place.random(300, seed=3).half()
    same(hvd.allreduce(half, compression=hvd.Compression.int8), half, atol=0.05, rtol=0.05)


def mismatches_are_errors_everywhere(place: Place) -> None:
    if place.size == 1:
        return
    if place.device.type == "cuda":
        # (A rank whose tensor lies elsewhere is told, too, and nothing hangs.)
        where = place.device if place.rank else torch.device("cpu")
        _raises("CPU/GPU device", lambda: hvd.allreduce(torch.ones(3, device=where), name="where"))
    _raises("shape", lambda: hvd.allreduce(place.full(3 + place.rank, 1.0), name="shape"))
    equal(hvd.allreduce(place.full(3, place.rank), op=hvd.Sum), place.full(3, place.size * (place.size - 1) / 2))


def _raises(word: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except hvd.HorovodInternalError as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"nothing was raised about the {word}")


# -- training ---------------------------------------------------------------------------------------------------------


def _model(place: Place) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2), nn.Flatten(), nn.Linear(8 * 4, 5)]
    # Channels last: gradients whose memory is laid out unlike their shape.
    return nn.Sequential(*layers).to(place.device).to(memory_format=torch.channels_last)


def _batch(place: Place, rank: int, step: int) -> Tensor:
    return place.random(4, 3, 7, 7, seed=100 * rank + step)


def _reference(place: Place, steps: int, passes: int = 1, is_sum: bool = False) -> list[Tensor]:
    """One process that sees all batches."""
    model = _model(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank, again in itertools.product(range(place.size), range(passes)):
            loss = model(_batch(place, rank, step * passes + again)).square().mean()
            (loss if is_sum else loss / place.size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _trained(place: Place, steps: int, passes: int = 1, **options: Any) -> list[Tensor]:
    model = _model(place)
    if place.rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for again in range(passes):
            model(_batch(place, place.rank, step * passes + again)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def training_is_that_of_one_process(place: Place) -> None:
    plain = _reference(place, 5)
    cases: list[tuple[dict[str, Any], list[Tensor], float]] = [
        ({}, plain, 1e-5),
        ({"passes": 2}, _reference(place, 5, passes=2), 1e-5),
        ({"op": hvd.Sum}, _reference(place, 5, is_sum=True), 1e-4),
        ({"gradient_predivide_factor": 2.0}, plain, 1e-5),
        ({"groups": 2}, plain, 1e-5),
        ({"compression": hvd.Compression.fp16}, plain, 1e-3),
        ({"compression": hvd.Compression.bf16}, plain, 5e-3),
        ({"compression": hvd.Compression.fp8}, plain, 2e-2),
        ({"compression": hvd.Compression.int8}, plain, 2e-2),
    ]
    for options, expected, limit in cases:
        for one, two in zip(_trained(place, 5, **options), expected, strict=True):
            assert float((one - two).norm() / two.norm()) < limit, options


def adasum_optimizer(place: Place) -> None:
    model, before = _model(place), _model(place)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    before(_batch(place, place.rank, 0)).square().mean().backward()
    steps = [hvd.allreduce((-0.1 * p.grad).contiguous(), op=hvd.Adasum) for p in before.parameters()]
    model(_batch(place, place.rank, 0)).square().mean().backward()
    optimizer.step()
    for parameter, old, step in zip(model.parameters(), before.parameters(), steps, strict=True):
        same(parameter, old + step, atol=1e-5, rtol=1e-4)


def half_precision_with_a_loss_scale(place: Place) -> None:
    """The usual recipe: synchronize, unscale, clip, step without waiting again."""
    if place.device.type == "cpu":
        return
    model = _model(place)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = (model(_batch(place, place.rank, 0)) - 1).square().mean()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    for parameter in model.parameters():
        gathered = hvd.allgather(parameter.detach()[None].contiguous())
        assert all(torch.equal(gathered[0], other) for other in gathered)


def states_and_objects(place: Place) -> None:
    model = _model(place)
    for parameter in model.parameters():
        parameter.data.add_(place.rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + place.rank, fused=True)
    if place.rank == 0:
        model(_batch(place, 0, 0)).sum().backward()
        optimizer.step()
        model.zero_grad()
    expected = copy.deepcopy(model.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if place.rank == 0:
        for name, value in model.state_dict().items():
            equal(value, expected[name])
    states = hvd.allgather_object([optimizer.state_dict(), model.state_dict()])
    assert str(states[0]) == str(states[-1])
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    assert moment.device == place.device and hvd.broadcast_object(moment.cpu(), 0).shape == moment.shape


def batch_norm_over_ranks(place: Place) -> None:
    rank, size = place.rank, place.size
    flat, images = (3 * size, 4), (2 * size, 4, 5, 3)
    for shape, dtype in ((flat, torch.float32), (images, torch.float32), (images, torch.float16)):
        data, factor = place.random(*shape, seed=1) * 2 + 10, place.random(*shape, seed=2)
        plain: nn.Module = nn.BatchNorm2d(4) if len(shape) > 2 else nn.BatchNorm1d(4)
        plain, synced = plain.to(place.device).double(), hvd.SyncBatchNorm(4).to(place.device)
        here = slice(rank * shape[0] // size, (rank + 1) * shape[0] // size)
        part = data[here].to(dtype).requires_grad_()
        whole = data.to(dtype).double().requires_grad_()
        limit = 1e-3 if dtype is torch.float32 else 2e-2
        got, expected = synced(part), plain(whole)
        assert got.dtype is dtype
        same(got.double(), expected[here], atol=limit, rtol=limit)
        (got * factor[here].to(dtype)).sum().backward()
        (expected * factor.to(dtype).double()).sum().backward()
        assert part.grad is not None and whole.grad is not None
        same(part.grad.double(), whole.grad[here], atol=limit, rtol=limit)
        same(hvd.allreduce(synced.weight.grad, op=hvd.Sum).double(), plain.weight.grad, atol=10 * limit, rtol=limit)
        same(synced.running_mean.double(), plain.running_mean, atol=limit, rtol=limit)
        same(synced.running_var.double(), plain.running_var, atol=limit, rtol=limit)


def sparse_gradients(place: Place) -> None:
    for is_dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True).to(place.device)
        expected = table.weight.detach().clone()
        expected[: place.size] -= 1 / place.size
        expected[5] -= 1
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0),
            named_parameters=table.named_parameters(),
            sparse_as_dense=is_dense,
        )
        table(torch.tensor([place.rank, 5], device=place.device)).sum().backward()
        optimizer.step()
        same(table.weight.detach(), expected)


def uneven_data_ends_in_a_join(place: Place) -> None:
    """Rank r has r + 1 batches; the others' sums go on with its zeros."""
    for step in range(place.rank + 1):
        still = [r for r in range(place.size) if r >= step]
        got = hvd.allreduce(place.full(1000, place.rank + 1.0), name=f"step {step}", op=hvd.Sum)
        equal(got, place.full(1000, sum(r + 1.0 for r in still)))
        narrow = hvd.allreduce(place.full(256, 1.0), name=f"narrow {step}", compression=hvd.Compression.fp8)
        same(narrow, place.full(256, len(still) / place.size), atol=0.02, rtol=0.02)
    assert hvd.join() == place.size - 1
    equal(hvd.allreduce(place.full(3, 1.0), op=hvd.Sum), place.full(3, place.size))


# -- streams and memory -----------------------------------------------------------------------------------------------


def slow_kernels_are_waited_for(place: Place) -> None:
    """What is submitted from a stream is what the stream will have written, and who reads the result waits for it."""
    if place.device.type == "cpu":
        return
    rank, size, count = place.rank, place.size, 100_000
    total = place.full(count, size * (size + 1) / 2)
    for operation in (hvd.allreduce_async, hvd.allreduce_async_):
        stream, reader = torch.cuda.Stream(), torch.cuda.Stream()
        mine = place.full(count, -1.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            mine.fill_(rank + 1.0)
            handle = operation(mine, name="slow", op=hvd.Sum)
        with torch.cuda.stream(reader):
            copied = hvd.synchronize(handle).clone()
        reader.synchronize()
        equal(copied, total)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        mine.fill_(rank + 1.0)
        gathered = hvd.allgather(mine)
        root, first = hvd.broadcast(mine, size - 1), hvd.reducescatter(mine, op=hvd.Sum)
        reduced = [part.clone() for part in hvd.grouped_allreduce([mine, mine.half()], op=hvd.Sum)]
        torch.cuda._sleep(SLEEP_CYCLES)
        mine.zero_()  # after the operations, however late they run
    stream.synchronize()
    equal(gathered, torch.cat([place.full(count, r + 1.0) for r in range(size)]))
    equal(root, place.full(count, size))
    equal(first, total[: len(first)])
    equal(reduced[0], total)
    equal(reduced[1], total.half())


def results_outlive_their_tensors(place: Place) -> None:
    """A result may be dropped while kernels still read it; the next operation must not write into its memory.

    Rank 0 submits two operations and drops the result of the first before the others submit the second.
    """
    count = 1 << 20
    for operation in (hvd.allgather_async, hvd.reducescatter_async, hvd.alltoall_async):
        ones, twos = place.full(count, 1.0), place.full(count, 2.0)
        first = operation(ones, name=f"first {operation.__name__}")
        second = operation(twos, name=f"second {operation.__name__}") if place.rank == 0 else None
        result = hvd.synchronize(first)
        result = result[0] if isinstance(result, tuple) else result
        if place.device.type == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        kept = result.clone()
        del result
        if second is None:
            time.sleep(0.05)
            second = operation(twos, name=f"second {operation.__name__}")
        hvd.synchronize(second)
        equal(kept, torch.ones_like(kept))


def memory_does_not_grow(place: Place) -> None:
    if place.device.type == "cpu":
        return
    used = []
    for step in range(30):
        for number in range(8):
            hvd.allreduce(place.full(50_000, 1.0), name=f"plain {number}")
            hvd.allreduce(place.full(50_000, 1.0), name=f"narrow {number}", compression=hvd.Compression.int8)
            hvd.allgather(place.full(5_000, 1.0), name=f"rows {number}")
        if step in (9, 29):
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert used[1] <= used[0] + 2**20, used


def gloo_connects_nobody_while_all_operations_run_on_gpus(place: Place) -> None:
    sets = current.running().sets
    result = hvd.allreduce(place.full(1000, 1.0), op=hvd.Sum)
    equal(result, place.full(1000, float(place.size)))
    connections = sets.connections[0]
    assert "cpu" not in vars(connections) or connections.gpu is None
    same(hvd.allreduce(torch.ones(100_000), op=hvd.Sum), torch.full((100_000,), float(place.size)))
    assert "cpu" in vars(connections) or place.size == 1


CHECKS = [
    gloo_connects_nobody_while_all_operations_run_on_gpus,
    reductions_in_every_dtype,
    moves_in_every_dtype,
    odd_shapes,
    handles_and_groups,
    gradients_of_collectives,
    process_sets,
    adasum,
    compression,
    mismatches_are_errors_everywhere,
    training_is_that_of_one_process,
    adasum_optimizer,
    half_precision_with_a_loss_scale,
    states_and_objects,
    batch_norm_over_ranks,
    sparse_gradients,
    uneven_data_ends_in_a_join,
    slow_kernels_are_waited_for,
    results_outlive_their_tensors,
    memory_does_not_grow,
]


def _checked(check: Callable[[Place], None]) -> None:
    """Runs the check in a job of its own."""
    device = torch.device("cpu")
    if DEVICE == "cuda":
        device = torch.device("cuda", torch.distributed.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with job(DYNAMIC_PROCESS_SETS="1", GLOO_TIMEOUT_SECONDS="60"):
        check(Place(device))
        # No rank leaves before all ranks have finished the check.
        hvd.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_gpu(run_ranks, check, size):
    run_ranks(size, _checked, check, timeout_s=240.0)
