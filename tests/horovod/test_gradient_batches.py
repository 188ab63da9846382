"""Gradients are handed over in as few batches as can be, and it does not matter for the result how they were cut."""

import functools
import json
import statistics

import pytest
import torch
from tests.horovod.jobs import in_job, job
from torch import nn

import horovod.torch as hvd
from horovod.torch.gradient_batches import GradientBatches


def _steps(batches: GradientBatches, *steps: list[torch.Tensor]) -> list[list[list[int]]]:
    """For each gradient of each step, what is submitted when it is ready, as numbers of elements."""
    told = []
    for step in steps:
        told.append([[parameter.numel() for parameter in batches.arrive(parameter)] for parameter in step])
        batches.end_step()
    return told


def test_after_one_step_gradients_wait_for_the_others_of_their_batch_and_the_last_batch_for_step():
    small = [torch.empty(count) for count in (10, 20, 30)]
    large = torch.empty(300_000)
    order = [small[0], large, small[1], small[2]]
    first, second = _steps(GradientBatches(2**30), order, order)
    assert first == [[10], [300_000], [20], [30]]
    # The large one is a batch of its own; the small ones are the last batch, which step() submits.
    assert second == [[], [300_000], [], []]


def test_batches_end_at_one_megabyte_first_and_at_25_then():
    parameters = [torch.empty(200_000) for _ in range(70)]  # 0.8 MB each
    _, told = _steps(GradientBatches(2**30), parameters, parameters)
    assert [len(submitted) for submitted in told if submitted] == [2, 33, 33]
    assert told[1] and told[34] and told[67] and not any(told[68:])


def test_without_fusion_every_gradient_goes_by_itself():
    parameters = [torch.empty(count) for count in (10, 20, 30)]
    _, told = _steps(GradientBatches(0), parameters, parameters)
    assert told == [[10], [20], []]


def test_an_order_that_changes_is_learned_anew():
    one, two, three = (torch.empty(count) for count in (300_000, 400_000, 500_000))
    _, told, again, last = _steps(GradientBatches(0), [one, two, three], [three, one], [three, one], [one, two])
    assert told == [[], [300_000]]  # three was the last of the first step
    assert again == [[500_000], []]
    assert last == [[], [400_000]]


class _Branches(nn.Module):
    """A layer of more than a megabyte, and branches that not every rank uses in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 50_000)
        self.left, self.right = nn.Linear(50_000, 3), nn.Linear(6, 3)

    def forward(self, images: torch.Tensor, choice: int) -> torch.Tensor:
        output = self.right(images)
        return output + self.left(self.wide(images)) * 0.01 if choice else output


def _choice(rank: int, step: int) -> int:
    """Both branches, one of them, or different ones on different ranks."""
    return [1, 1, 0, (rank + 1) % 2, 1, rank % 2, 1][step]


def _images(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def _train(rank: int, size: int, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _Branches()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters(), **options
    )
    for step in range(7):
        optimizer.zero_grad()
        model(_images(rank, step), _choice(rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("size", "options"), [(2, {}), (3, {}), (2, {"groups": 2})])
def test_models_whose_branches_differ_between_steps_and_ranks_are_trained_right(run_ranks, size, options):
    torch.manual_seed(0)
    model = _Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(7):
        optimizer.zero_grad()
        for rank in range(size):
            (model(_images(rank, step), _choice(rank, step)).square().mean() / size).backward()
        optimizer.step()
    for weights in run_ranks(size, in_job, functools.partial(_train, **options)):
        for got, parameter in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.detach(), rtol=1e-4, atol=1e-6)


def _cycles(path: str) -> None:
    with job(TIMELINE="DYNAMIC"):
        torch.manual_seed(0)
        hidden = [layer for _ in range(6) for layer in (nn.Linear(20, 20), nn.ReLU())]
        model = nn.Sequential(*hidden, nn.Linear(20, 20_000))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
        )
        for step in range(14):
            if step == 3:
                hvd.start_timeline(path, mark_cycles=True)
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()
            hvd.barrier()
        hvd.stop_timeline()


def test_a_step_that_repeats_is_negotiated_once_a_batch(run_ranks, tmp_path):
    run_ranks(2, _cycles, str(tmp_path / "trace.json"))
    # Cycles of rank 0: 14 gradients are two batches, a large one and the small ones, and the barrier is a third. A batch that
    # was late shares a cycle with the next. The median, as a rank that was not on a core for a millisecond may have cut a
    # batch in two.
    cycles, counts = 0, []
    for event in json.loads((tmp_path / "trace.json").read_text()):
        if event.get("name") == "CYCLE_START":
            cycles += 1
        elif event.get("name") == "BARRIER" and event["ph"] == "B":
            counts.append(cycles)
            cycles = 0
    assert len(counts) >= 10
    assert statistics.median(counts) <= 3, counts
