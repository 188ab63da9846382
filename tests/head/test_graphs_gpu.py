"""Steps replayed as CUDA graphs against ordinary ones on a GPU, bit for bit. Run with `make test-gpu`.

tests/head/gpu/test_captured_step.py does the same on a CPU, with emulated graphs.
"""

from typing import Any

import pytest
import torch
from tests.count_calls import count_calls
from tests.head.graph_scenario import (
    NUM_REPLAYED_FORWARDS,
    NUM_REPLAYED_UPDATES,
    assert_same_bits,
    train_with_interruptions,
)
from torch import Tensor

from megaclass import CosFace, PartialFC, RowAdagrad, RowAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

WIDTH, NUM_CLASSES, BATCH = 512, 30_000, 192
CASES: dict[str, dict[str, Any]] = {
    "sampled": {"sample_rate": 0.3},
    "all classes, adagrad": {"margin": CosFace(), "optimizer": RowAdagrad()},
    "bf16 storage, adamw": {"sample_rate": 0.3, "storage": "bf16", "optimizer": RowAdamW()},
    "recomputed, corrected": {"stored_bytes": 0, "sample_rate": 0.3, "correct_sampling": True},
    "sub-centres, filtered": {"num_subcentres": 3, "sample_rate": 0.3, "filter_above": 0.05},
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts captures, and replays of forward and update."""
    from megaclass.head.gpu.captured_step import CapturedStep

    return count_calls(monkeypatch, CapturedStep, "__init__", "forward", "update")


def new_head(**options: Any) -> PartialFC:
    options = {"max_batch": BATCH + 8, "seed": 3, **options}
    return PartialFC(WIDTH, NUM_CLASSES, device="cuda", **options)


def batch_of(number: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    y = torch.randint(NUM_CLASSES, (BATCH,), generator=generator)
    y[1] = y[0]
    return torch.randn(BATCH, WIDTH, generator=generator).to("cuda", dtype), y.cuda()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES] + [("sampled", torch.float32)],
    ids=[*CASES, "sampled, float32"],
)
def test_replayed_steps_give_the_bits_of_ordinary_ones_whatever_comes_between(
    case: str, dtype: torch.dtype, replays: dict[str, int]
) -> None:
    truth = train_with_interruptions(new_head(cuda_graph="off", **CASES[case]), lambda n: batch_of(n, dtype))
    assert replays == {"__init__": 0, "forward": 0, "update": 0}
    ours = train_with_interruptions(new_head(**CASES[case]), lambda n: batch_of(n, dtype))
    # A GPU takes the step with the wrong label, which its update masks; a CPU raises in forward.
    assert replays == {"__init__": 1, "forward": NUM_REPLAYED_FORWARDS, "update": NUM_REPLAYED_UPDATES + 1}
    assert_same_bits(ours, truth)


def test_a_long_run_has_the_bits_of_an_ordinary_one_and_never_waits(replays: dict[str, int]) -> None:
    outcomes = []
    for cuda_graph in ("off", "auto"):
        head = new_head(cuda_graph=cuda_graph, sample_rate=0.3)
        losses = []
        for number in range(60):
            x, y = batch_of(number % 7)
            torch.cuda.set_sync_debug_mode("error" if number > 8 else "default")
            try:
                loss = head(x.requires_grad_(), y)
                loss.backward()
                head.step(lr=0.1 / (1 + number))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            losses.append(loss.detach())
        head.check()
        outcomes.append([[torch.stack(losses), *head.rows().values()]])
    assert_same_bits(outcomes[1], outcomes[0])
    assert replays == {"__init__": 1, "forward": 57, "update": 57}


def test_a_fault_is_raised_a_few_steps_later_and_names_its_step(replays: dict[str, int]) -> None:
    from megaclass import UserError

    head = new_head(sample_rate=0.3)
    before: dict[str, Tensor] = {}
    with pytest.raises(UserError, match=r"Label -5 at position 4 .* of step 6, counted from 0"):
        for number in range(30):
            x, y = batch_of(number)
            if number == 6:
                y[4] = -5
                before = {name: tensor.clone() for name, tensor in head.rows().items()}
            head(x.requires_grad_(), y).backward()
            head.step(lr=0.1)
    assert head.step_count < 20 and replays["update"] > 3
    assert all(torch.equal(before[name], tensor) for name, tensor in head.rows().items())


def test_the_sample_rate_changes_and_batches_without_max_batch_differ(replays: dict[str, int]) -> None:
    outcomes = []
    for cuda_graph in ("off", "auto"):
        head = new_head(cuda_graph=cuda_graph, sample_rate=[(0, 0.1), (10, 0.4)], max_batch=None)
        for number in range(20):
            x, y = batch_of(number)
            size = 50 if number in (5, 15) else BATCH
            head(x[:size].requires_grad_(), y[:size]).backward()
            head.step(lr=0.1)
        outcomes.append([list(head.rows().values())])
    assert_same_bits(outcomes[1], outcomes[0])
    assert replays == {"__init__": 2, "forward": 6 + 6, "update": 6 + 6}


def test_a_head_moved_to_the_cpu_and_back_drops_its_graphs_and_continues(replays: dict[str, int]) -> None:
    outcomes = []
    for cuda_graph in ("off", "auto"):
        head = new_head(cuda_graph=cuda_graph, sample_rate=0.3)
        for number in range(12):
            if number == 6:
                held = torch.cuda.memory_allocated()
                head.cpu()
                assert torch.cuda.memory_allocated() < held - 2 * 4 * WIDTH * NUM_CLASSES
                head.cuda()
            x, y = batch_of(number)
            head(x.requires_grad_(), y).backward()
            head.step(lr=0.1)
        outcomes.append([list(head.rows().values())])
    assert_same_bits(outcomes[1], outcomes[0])
    assert replays == {"__init__": 2, "forward": 6, "update": 6}


def test_graphs_are_used_on_a_stream_of_the_users_and_beside_another_head(replays: dict[str, int]) -> None:
    outcomes = []
    for cuda_graph in ("off", "auto"):
        heads = [new_head(cuda_graph=cuda_graph, sample_rate=0.3, seed=seed) for seed in (1, 2)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number in range(8):
                x, y = batch_of(number)
                leaf = x.requires_grad_()
                (heads[0](leaf, y) + heads[1](leaf, y)).backward()
                for head in heads:
                    head.step(lr=0.1)
        torch.cuda.current_stream().wait_stream(stream)
        outcomes.append([[leaf.grad, *heads[0].rows().values(), *heads[1].rows().values()]])
    assert_same_bits(outcomes[1], outcomes[0])
    assert replays == {"__init__": 2, "forward": 10, "update": 10}
