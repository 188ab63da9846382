"""Steps captured as CUDA graphs, emulated on a CPU, where Triton's interpreter runs the programs.

tests/test_triton_interpreter.py starts the interpreted tests; tests/head/test_graphs_gpu.py runs the same on a GPU.
"""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.head.graph_scenario import (
    NUM_REPLAYED_FORWARDS,
    NUM_REPLAYED_UPDATES,
    assert_same_bits,
    train_with_interruptions,
)
from tests.triton_interpreter import interpreted, outside
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from tests.emulated_graphs import EmulatedGraph, emulate_graphs
from tests.head.gpu.test_interpreted import WIDTH, tiny_tiles  # noqa: F401
from tests.head.gpu.test_interpreted import new_head as new_head_of

from megaclass.gpu.cuda_graphs import NUM_ORDINARY_STEPS
from megaclass.head.gpu.captured_step import StepGraphs, can_capture
from megaclass.head.gpu.tiling import GRAPH_BYTES

# Two tiles of classes. The interpreter takes a third of a second per step.
NUM_CLASSES, NUM_IMAGES = 40, 4


def new_head(**options: Any) -> Any:
    return new_head_of("triton_fused", NUM_CLASSES, **{"max_batch": NUM_IMAGES, **options})


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    y = torch.randint(NUM_CLASSES, (NUM_IMAGES,), generator=generator)
    y[1] = y[0]
    return torch.randn(NUM_IMAGES, WIDTH, generator=generator), y


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedGraph]:
    return emulate_graphs(monkeypatch)


def take_step(head: Any, number: int, **options: Any) -> Tensor:
    x, y = batch_of(number)
    loss = head(x.requires_grad_(), y)
    loss.backward()
    head.step(**{"lr": 0.05, **options})
    return loss.detach()


@interpreted
def test_replayed_steps_give_the_bits_of_ordinary_ones_whatever_comes_between(graphs):
    from megaclass import RowAdamW

    options: dict[str, Any] = {"sample_rate": 0.5, "storage": "bf16", "optimizer": RowAdamW()}
    truth = train_with_interruptions(new_head(cuda_graph="off", **options), batch_of)
    assert not graphs
    assert_same_bits(train_with_interruptions(new_head(**options), batch_of), truth)
    forward, update = graphs
    assert (forward.num_replays, update.num_replays) == (NUM_REPLAYED_FORWARDS, NUM_REPLAYED_UPDATES)


@interpreted
@pytest.mark.parametrize("name", ["all classes", "recomputed, sub-centres"])
def test_every_kind_of_step_can_be_replayed(graphs, name):
    from megaclass import CosFace

    options: dict[str, Any] = {
        "all classes": {},
        "recomputed, sub-centres": {
            "sample_rate": 0.4, "num_subcentres": 2, "stored_bytes": 0, "margin": CosFace(scale=16),
            "correct_sampling": True,
        },
    }[name]  # fmt: skip
    heads = [new_head(cuda_graph=cuda_graph, **options) for cuda_graph in ("off", "auto")]
    for number in range(5):
        losses = [take_step(head, number) for head in heads]
        assert losses[0] == losses[1]
    for name, tensor in heads[0].rows().items():
        assert torch.equal(tensor, heads[1].rows()[name])
    assert [graph.num_replays for graph in graphs] == [2, 2]


@interpreted
def test_a_new_sample_rate_is_captured_anew_and_a_smaller_last_batch_is_not(graphs):
    rates = [(0, 0.3), (5, 0.6)]
    outcomes = []
    for cuda_graph in ("off", "auto"):
        head = new_head(sample_rate=rates, max_batch=None, cuda_graph=cuda_graph)
        rows = []
        for number in range(10):
            x, y = batch_of(number)
            size = 3 if number == 4 else NUM_IMAGES
            head(x[:size].requires_grad_(), y[:size]).backward()
            head.step(lr=0.05)
            rows.append([head.rows()["weight"].clone()])
        outcomes.append(rows)
    assert_same_bits(outcomes[1], outcomes[0])
    # Step 3 with the first rate, steps 8 and 9 with the second.
    assert [graph.num_replays for graph in graphs] == [1, 1, 2, 2]


@interpreted
def test_what_a_step_returned_is_not_overwritten_by_the_next(graphs):
    head = new_head(sample_rate=0.5)
    results = []
    for number in range(6):
        x, y = batch_of(number)
        leaf = x.requires_grad_()
        loss = head(leaf, y)
        loss.backward()
        head.step(lr=0.05)
        results.append((loss, leaf.grad, loss.item(), leaf.grad.clone()))
    assert graphs[0].num_replays == 3
    for loss, grad, number, copy in results:
        assert loss.item() == number and torch.equal(grad, copy)


@interpreted
def test_two_open_forwards_have_memory_of_their_own(graphs):
    gradients = []
    for cuda_graph in ("off", "auto"):
        head = new_head(sample_rate=0.5, cuda_graph=cuda_graph)
        for number in range(4):
            take_step(head, number)
        leaves = [batch_of(number)[0].requires_grad_() for number in (4, 5)]
        first, _second = (head(leaf, batch_of(number)[1]) for leaf, number in zip(leaves, (4, 5), strict=True))
        first.backward()
        head.step(lr=0.05)
        gradients.append([[leaves[0].grad, head.rows()["weight"]]])
    assert_same_bits(gradients[1], gradients[0])
    assert [graph.num_replays for graph in graphs] == [2, 2]


@interpreted
@pytest.mark.parametrize("name", ["off", "another margin", "own optimizer", "large"])
def test_nothing_is_captured_where_it_is_switched_off_impossible_or_not_worth_it(graphs, monkeypatch, name):
    from megaclass import MagFace, RowSGD
    from megaclass.head.gpu import captured_step as step_graphs

    class Own(RowSGD):
        pass

    options: dict[str, Any] = {
        "off": {"cuda_graph": "off"},
        "another margin": {"margin": MagFace(scale=16), "cuda_graph": "on"},
        "own optimizer": {"optimizer": Own(), "cuda_graph": "on"},
        "large": {},
    }[name]
    if name == "large":
        monkeypatch.setattr(step_graphs, "GRAPH_BYTES", 1000)
    head = new_head(sample_rate=0.5, **options)
    for number in range(4):
        take_step(head, number)
    assert not graphs


@interpreted
def test_a_capture_that_fails_leaves_the_ordinary_way(graphs, monkeypatch):
    from megaclass.head.gpu import step

    class OutOfMemory:
        def __init__(self, device: torch.device) -> None:
            raise torch.OutOfMemoryError("no memory for a pool")

    truth = new_head(sample_rate=0.5, cuda_graph="off")
    losses = [take_step(truth, number) for number in range(5)]
    monkeypatch.setattr(step, "Recorder", OutOfMemory)
    head = new_head(sample_rate=0.5)
    with pytest.warns(UserWarning, match="runs without one.*cuda_graph='off'.*no memory for a pool") as warned:
        assert [take_step(head, number) for number in range(5)] == losses
    assert len([w for w in warned if "CUDA graph" in str(w.message)]) == 1
    assert torch.equal(head.rows()["weight"], truth.rows()["weight"])


@interpreted
def test_a_capture_that_reads_a_value_on_the_host_fails(graphs):
    """The emulation refuses what CUDA refuses; otherwise the tests here would show little."""
    from tests.emulated_graphs import EmulatedRecorder

    for forbidden in (lambda: torch.ones(()).item(), lambda: torch.tensor([1.0])):
        with pytest.raises(RuntimeError, match="not permitted while a graph is captured"):
            EmulatedRecorder(torch.device("cpu")).record(forbidden)


@interpreted
def test_a_head_that_is_moved_drops_its_graphs_and_the_memory_with_them(graphs):
    head = new_head(sample_rate=0.5)
    for number in range(5):
        loss = take_step(head, number)
    captured = weakref.ref(head._engine._graphs._captured)
    assert captured() is not None
    gc.disable()
    try:
        head.bfloat16()
        assert captured() is None, "something refers to itself in a circle"
    finally:
        gc.enable()
    assert loss.isfinite() and take_step(head, 5).isfinite()


@interpreted
def test_a_head_whose_tensors_were_replaced_is_captured_anew(graphs):
    outcomes = []
    for cuda_graph in ("off", "auto"):
        head = new_head(sample_rate=0.5, cuda_graph=cuda_graph)
        for number in range(8):
            if number == 4:
                head._apply(torch.clone)
            take_step(head, number)
        outcomes.append([list(head.rows().values())])
    assert_same_bits(outcomes[1], outcomes[0])
    assert [graph.num_replays for graph in graphs] == [1, 1, 1, 1]


# ---- the rule, without a head ----


@outside
@pytest.mark.parametrize(
    ("device", "num_ranks", "margin", "update", "expected"),
    [
        ("cuda", 1, True, True, True),
        ("cpu", 1, True, True, False),
        ("cuda", 2, True, True, False),
        ("cuda", 1, False, True, False),
        ("cuda", 1, True, False, False),
    ],
    ids=["one GPU", "a CPU", "two ranks", "autograd in the margin", "a user's own optimizer"],
)
def test_steps_that_are_launches_on_one_gpu_and_nothing_else_can_be_captured(
    device, num_ranks, margin, update, expected
):
    assert (
        can_capture(torch.device(device), num_ranks, has_margin_program=margin, has_update_program=update) == expected
    )


class Captures:
    """Stands for FusedStep._capture."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, shape: Any) -> Any:
        self.made.append(SimpleNamespace(shape=shape, is_free=True, number=len(self.made)))
        return self.made[-1]


def found(graphs: StepGraphs, captures: Captures, shapes: str, num_bytes: int = 1000) -> str:
    """For each step, given by the letter of its shape: the number of the capture that it replays, or a dot."""
    text = ""
    for shape in shapes:
        step = graphs.find(shape, num_bytes, captures)  # type: ignore[arg-type]
        text += "." if step is None else str(step.number)
    return text


@outside
def test_a_shape_is_captured_after_three_steps_in_a_row_and_stays_until_another_does():
    assert NUM_ORDINARY_STEPS == 3
    graphs, captures = StepGraphs("auto", is_possible=True), Captures()
    assert found(graphs, captures, "aaaaaa") == "...000"
    assert found(graphs, captures, "abbabbba") == "0..0...0"
    assert found(graphs, captures, "bbbbbaaaa") == "...11...2"
    assert found(StepGraphs("auto", is_possible=True), Captures(), "ababababab") == "." * 10


@outside
@pytest.mark.parametrize(
    ("setting", "is_possible", "num_bytes", "expected"),
    [
        ("auto", True, GRAPH_BYTES, "...0"),
        ("auto", True, GRAPH_BYTES + 1, "...."),
        ("on", True, GRAPH_BYTES + 1, "...0"),
        ("off", True, 1, "...."),
        ("on", False, 1, "...."),
    ],
)
def test_auto_captures_up_to_its_limit_on_everything_off_nothing(setting, is_possible, num_bytes, expected):
    assert found(StepGraphs(setting, is_possible=is_possible), Captures(), "aaaa", num_bytes) == expected


@outside
def test_a_step_whose_memory_is_in_use_takes_the_ordinary_way():
    graphs, captures = StepGraphs("auto", is_possible=True), Captures()
    assert found(graphs, captures, "aaaa") == "...0"
    captures.made[0].is_free = False
    assert found(graphs, captures, "aaaaa") == "....."
    captures.made[0].is_free = True
    assert found(graphs, captures, "a") == "0" and len(captures.made) == 1


@outside
def test_numbers_that_stay_the_same_are_written_once(monkeypatch):
    from megaclass.head.gpu.rows import StepNumbers

    numbers = StepNumbers(torch.device("cpu"))
    written: list[Any] = []
    fill = Tensor.fill_
    monkeypatch.setattr(Tensor, "fill_", lambda self, value: written.append(value) or fill(self, value))
    for step, lr in ((0, 0.1), (0, 0.1), (7, 0.1), (7, 0.2)):
        numbers.set_step(step)
        numbers.set_factors(lr, 1.0, None)
    assert written == [0.1, 1.0, 7, 0.2] and numbers.step.item() == 7
    # A tensor's value is not known to the host, so the number after it is written again.
    numbers.set_factors(torch.tensor(0.5, dtype=torch.float64), torch.tensor([4.0]), torch.tensor(True))
    assert numbers.factors.tolist() == [0.5, 4.0, 1.0] and len(written) == 4
    numbers.set_factors(0.2, 4.0, None)
    assert written[4:] == [0.2, 4.0, 0.0]
    numbers.set_step(3)
    assert numbers.step.item() == 3
    assert numbers.factors.tolist() == pytest.approx([0.2, 4.0, 0.0])
