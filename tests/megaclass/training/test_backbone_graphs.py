"""Backbones replayed as CUDA graphs, emulated on a CPU; test_backbone_graphs_gpu.py does the same on a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.emulated_graphs import EmulatedGraph, EmulatedRecorder, emulate_backbone_graphs
from tests.megaclass.training.backbone_scenario import (
    NUM_REPLAYED_BACKWARDS,
    NUM_REPLAYED_FORWARDS,
    Scenario,
    assert_same_bits,
    train_with_interruptions,
    with_graphs,
)
from torch import Tensor, nn

from megaclass.backbones import BACKBONES
from megaclass.backbones.configured import largest_replayed_bytes
from megaclass.backbones.iresnet import IResNet
from megaclass.training.model import graphed_backbone
from megaclass.training.model.build import build_model
from megaclass.training.model.graphed_backbone import NUM_ORDINARY_STEPS, NUM_TRIAL_STEPS, GraphedBackbone, can_capture
from megaclass.training.model.precision import Precision
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

SMALL = Scenario(torch.device("cpu"), side=16, batch=6)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(BACKBONES, "iresnet_small", partial(IResNet, (1, 1, 1, 1)))
    monkeypatch.setitem(BACKBONES, "tiny", Tiny)
    monkeypatch.setitem(BACKBONES, "curious", Curious)
    with process_group(World(), device="cpu"):
        yield


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedGraph]:
    return emulate_backbone_graphs(monkeypatch)


class Tiny(nn.Module):
    """With batch norm, a frozen parameter and a branch."""

    def __init__(self, embedding_dim: int, image_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 4)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 16, embedding_dim)
        self.fc.bias.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        result: Tensor = self.fc(torch.flatten(self.norm(x).relu() + x, 1))
        return result


class Curious(Tiny):
    """Looks at its own values, which is not possible in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        embeddings = super().forward(x)
        return embeddings * (1.0 if embeddings.sum().item() > 0 else 2.0)


def trained(setting: str, num_steps: int = 6, **changes: object) -> tuple[list[float], dict[str, Tensor]]:
    config = with_graphs(SMALL.config(**{"backbone__name": "tiny", **changes}), setting)
    model = SMALL.model(config)
    losses = [SMALL.step(model, config, number).item() for number in range(num_steps)]
    return losses, {name: tensor.clone() for name, tensor in model.shared_state().items()}


def test_replayed_steps_give_the_bits_of_ordinary_ones_whatever_comes_between(graphs):
    config = SMALL.config(backbone__name="iresnet_small", train__ema=0.9)
    truth = train_with_interruptions(SMALL, with_graphs(config, "off"))
    assert not graphs
    assert_same_bits(train_with_interruptions(SMALL, with_graphs(config, "auto")), truth)
    forward, backward = graphs
    assert (forward.num_replays, backward.num_replays) == (NUM_REPLAYED_FORWARDS, NUM_REPLAYED_BACKWARDS)


@pytest.mark.parametrize(
    "changes",
    [
        {"backbone__freeze": ["conv"]},
        {"optimizer__name": "adamw", "optimizer__lr": 0.001},
        {"optimizer__clip_norm": 0.01, "train__ema": 0.5},
    ],
    ids=["frozen", "adamw", "clipped"],
)
def test_every_kind_of_step_can_be_replayed(graphs, changes):
    assert_same_bits(trained("on", **changes), trained("off", **changes))
    assert [graph.num_replays for graph in graphs] == [3, 3]


def test_steps_under_autocast_read_the_weights_of_their_own_step(graphs):
    """Autocast keeps narrow copies of weights, which a graph must not take for the weights."""
    outcomes = []
    for setting in ("off", "on"):
        config = with_graphs(SMALL.config(backbone__name="tiny"), setting)
        model = SMALL.model(config)
        model.precision = Precision(torch.bfloat16)
        losses = [SMALL.step(model, config, number).item() for number in range(7)]
        outcomes.append((losses, model.shared_state()))
    assert_same_bits(outcomes[1], outcomes[0])
    assert [graph.num_replays for graph in graphs] == [4, 4]


def test_a_capture_changes_nothing(graphs):
    config = SMALL.config(backbone__name="iresnet_small")
    model = SMALL.model(config)
    images = SMALL.batch_of(0).prepared(SMALL.device)
    module = model.parallel.module
    assert isinstance(module, GraphedBackbone)
    before = {name: tensor.clone() for name, tensor in model.backbone.state_dict().items()}
    generator = torch.get_rng_state()
    module._capture(module._shape_of(images), images)
    assert len(graphs) == 2
    assert [name for name, tensor in model.backbone.state_dict().items() if not torch.equal(before[name], tensor)] == []
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("off", {}),
        ("on", {"train__accumulate": 2}),
        ("on", {"backbone__name": "iresnet_small", "backbone__dropout": 0.2}),
        ("on", {"backbone__name": "iresnet_small", "backbone__checkpoint_activations": True}),
        ("on", {"backbone__batch_norm": "sync"}),
        ("on", {"train__compile": True}),
        ("auto", {"backbone__name": f"{__name__}:Tiny"}),
    ],
    ids=["off", "accumulated", "dropout", "recomputed", "sync", "compiled", "own"],
)
def test_nothing_is_captured_where_it_is_switched_off_or_impossible(graphs, monkeypatch, setting, changes):
    monkeypatch.setattr("megaclass.training.model.build._compiled", lambda backbone, image_size: backbone)
    losses, _ = trained(setting, 5, **changes)
    assert not graphs and len(losses) == 5


def test_a_backbone_of_the_users_own_is_captured_if_it_is_switched_on(graphs):
    name = f"{__name__}:Tiny"
    assert_same_bits(trained("on", backbone__name=name), trained("off", backbone__name=name))
    assert [graph.num_replays for graph in graphs] == [3, 3]


@pytest.mark.parametrize(
    ("replayed_ms", "stays"),
    [(18.0, True), (50.5, False), (56.0, False)],
    ids=["the host is the limit", "no gain", "the exchange is the limit"],
)
def test_several_ranks_measure_whether_graphs_pay(graphs, monkeypatch, replayed_ms, stays):
    """Ordinary steps take 50 ms here. One with a checkpoint behind it takes longer, which changes nothing."""
    clock = Clock(monkeypatch)
    backbone = GraphedBackbone(Tiny(16, 16), "auto", num_ranks=2)
    images = SMALL.batch_of(0).prepared(SMALL.device)
    for number in range(40):
        before = graphs[0].num_replays if graphs else 0
        backbone(images).sum().backward()
        if number in (8, 25):
            backbone.eval()
            backbone(images)
            backbone.train()
        is_replayed = bool(graphs) and graphs[0].num_replays > before
        clock.now_ms += 9000.0 if number in (7, 20) else replayed_ms if is_replayed else 50.0
    num_ordinary = NUM_ORDINARY_STEPS + NUM_TRIAL_STEPS
    # The verdict comes with the start of the twelfth replay or, after the evaluation, of the thirteenth.
    assert graphs[0].num_replays == (40 - num_ordinary if stays else NUM_TRIAL_STEPS + 1)


def test_one_rank_and_the_setting_on_measure_nothing(graphs, monkeypatch):
    clock = Clock(monkeypatch)
    images = SMALL.batch_of(0).prepared(SMALL.device)
    for setting, num_ranks in (("auto", 1), ("on", 2)):
        backbone = GraphedBackbone(Tiny(16, 16), setting, num_ranks)
        for _ in range(NUM_ORDINARY_STEPS + 1):
            backbone(images).sum().backward()
    assert clock.num_moments == 0 and [graph.num_replays for graph in graphs] == [1, 1, 1, 1]


class Clock:
    """In place of the GPU's events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.num_moments = 0.0, 0
        monkeypatch.setattr(graphed_backbone, "_moment", self._moment)

    def _moment(self, device: torch.device) -> Any:
        self.num_moments += 1
        return Moment(self.now_ms)


@dataclass
class Moment:
    at_ms: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Moment") -> float:
        return other.at_ms - self.at_ms


def _train_on_this_rank(setting: str) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses, state, and how often each graph was replayed. Every rank has images of its own."""
    BACKBONES["tiny"] = Tiny
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        graphs = emulate_backbone_graphs(patch)
        config = with_graphs(SMALL.config(backbone__name="tiny", train__global_batch=SMALL.batch * size), setting)
        world = World(rank=rank, size=size, local_rank=rank, local_size=size)
        model = build_model(config, SMALL, world, SMALL.device)  # type: ignore[arg-type]
        model.parallel.train()
        losses = [SMALL.step(model, config, step, SMALL.batch_of(10 * step + rank)).item() for step in range(6)]
        state = {name: tensor.clone() for name, tensor in model.shared_state().items()}
        return losses, state, [graph.num_replays for graph in graphs]


@pytest.mark.ranks
def test_ranks_whose_backbones_are_replayed_exchange_their_gradients(run_ranks):
    for truth, ours in zip(
        run_ranks(2, _train_on_this_rank, "off"), run_ranks(2, _train_on_this_rank, "on"), strict=True
    ):
        assert truth[2] == [] and ours[2] == [3, 3]
        assert_same_bits(ours[:2], truth[:2])


def test_cpus_and_modules_with_hooks_are_left_alone():
    gpu, plain, hooked = torch.device("cuda"), Tiny(4, 16), Tiny(4, 16)
    hooked.norm.register_forward_hook(lambda module, args, output: None)
    assert can_capture(gpu, plain)
    assert not can_capture(gpu, hooked)
    assert not can_capture(torch.device("cpu"), plain)


@pytest.mark.parametrize(
    ("setting", "num_bytes", "num_graphs"),
    [("auto", 4 << 30, 2), ("auto", (4 << 30) + 1, 0), ("on", (4 << 30) + 1, 2)],
)
def test_auto_captures_up_to_a_limit_of_what_forward_keeps(graphs, monkeypatch, setting, num_bytes, num_graphs):
    """The emulated GPU has 16 GiB."""
    moments = iter([0, num_bytes] * 8)
    asked: list[Any] = []
    monkeypatch.setattr(graphed_backbone, "_allocated_bytes", lambda device: asked.append(device) or next(moments))
    trained(setting, 7)
    assert len(graphs) == num_graphs
    # Once known to be too large, it is not measured again; the question costs the host some time.
    assert len(asked) == {"on": 0, "auto": 6 if num_graphs else 2}[setting]


def test_the_limit_is_a_quarter_of_the_gpu_but_not_more_than_a_slow_host_needs():
    assert largest_replayed_bytes(80 << 30) == 20 << 30
    assert largest_replayed_bytes(140 << 30) == 32 << 30


def test_a_capture_that_fails_warns_once_and_leaves_the_ordinary_way(graphs):
    truth = trained("off", 8, backbone__name="curious")
    with pytest.warns(UserWarning, match="runs without one.*train.cuda_graph=off.*not permitted") as warned:
        ours = trained("on", 8, backbone__name="curious")
    assert len([w for w in warned if "CUDA graph" in str(w.message)]) == 1
    assert_same_bits(ours, truth)
    assert not graphs


def test_a_capture_whose_backward_fails_leaves_the_ordinary_way(graphs, monkeypatch):
    truth = trained("off", 8)

    class FailingRecorder(EmulatedRecorder):
        def record(self, function: Any) -> Any:
            if graphs:
                raise torch.OutOfMemoryError("no memory for backward")
            return super().record(function)

    monkeypatch.setattr(graphed_backbone, "Recorder", FailingRecorder)
    with pytest.warns(UserWarning, match="no memory for backward"):
        assert_same_bits(trained("on", 8), truth)
    assert [graph.num_replays for graph in graphs] == [0]


def test_a_backbone_whose_tensors_were_moved_is_captured_anew(graphs):
    outcomes = []
    for setting in ("off", "on"):
        config = with_graphs(SMALL.config(backbone__name="tiny"), setting)
        model = SMALL.model(config)
        losses = []
        for number in range(9):
            if number == 5:
                for parameter in model.backbone.parameters():
                    parameter.data = parameter.data.clone()
            losses.append(SMALL.step(model, config, number).item())
        outcomes.append((losses, model.shared_state()))
    assert_same_bits(outcomes[1], outcomes[0])
    assert [graph.num_replays for graph in graphs] == [2, 2, 1, 1]


def test_a_second_backward_is_refused(graphs):
    config = SMALL.config(backbone__name="tiny")
    model = SMALL.model(config)
    for number in range(4):
        SMALL.step(model, config, number)
    embeddings = model.parallel(SMALL.batch_of(4).prepared(SMALL.device))
    assert graphs[0].num_replays == 2
    embeddings.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward.*train\.cuda_graph=off"):
        embeddings.sum().backward()


def test_forwards_that_do_not_train_are_ordinary(graphs):
    config = SMALL.config(backbone__name="tiny")
    model = SMALL.model(config)
    for number in range(4):
        SMALL.step(model, config, number)
    images = SMALL.batch_of(4).prepared(SMALL.device)
    model.parallel.eval()
    assert torch.equal(model.parallel(images), model.backbone(images))
    model.parallel.train()
    with torch.no_grad():
        assert not model.parallel(images).requires_grad
    leaf = images.clone().requires_grad_()
    model.parallel(leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.any()
    assert [graph.num_replays for graph in graphs] == [1, 1]


def test_weights_that_change_between_forward_and_backward_are_an_error(graphs):
    config = SMALL.config(backbone__name="tiny")
    model = SMALL.model(config)
    for number in range(4):
        SMALL.step(model, config, number)
    embeddings = model.parallel(SMALL.batch_of(4).prepared(SMALL.device))
    with torch.no_grad():
        model.backbone.get_parameter("conv.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        embeddings.sum().backward()
