"""Backbones replayed as CUDA graphs against ordinary ones on a GPU, bit for bit. Run with `make test-gpu`.

test_backbone_graphs.py does the same on a CPU, with emulated graphs.
"""

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from tests.count_calls import count_calls
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
from megaclass.config.schema import Config
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

NOTHING = {"__init__": 0, "forward": 0, "backward": 0}


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    # cuDNN may otherwise choose algorithms whose order of addition differs from run to run.
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    with process_group(World()) as device:
        yield device
    torch.backends.cudnn.deterministic = before


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts captures, and replays of forward and backward."""
    from megaclass.training.model.graphed_backbone import CapturedBackbone

    return count_calls(monkeypatch, CapturedBackbone, *NOTHING)


def scenario_on(device: torch.device) -> Scenario:
    return Scenario(device, side=112, batch=32, num_classes=1000, embedding_dim=512)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("iresnet18", "bf16"), ("iresnet18", "fp16"), ("iresnet18", "float32"), ("mbf", "bf16"), ("mbf", "fp16")],
)
def test_replayed_steps_give_the_bits_of_ordinary_ones_whatever_comes_between(name, precision, device, replays):
    scenario = scenario_on(device)
    config = scenario.config(backbone__name=name, train__precision=precision, train__ema=0.9)
    truth = train_with_interruptions(scenario, with_graphs(config, "off"))
    assert replays == NOTHING
    ours = train_with_interruptions(scenario, with_graphs(config, "auto"))
    # A GPU also runs the backward of the step that is skipped.
    assert replays == {"__init__": 1, "forward": NUM_REPLAYED_FORWARDS, "backward": NUM_REPLAYED_BACKWARDS + 1}
    assert_same_bits(ours, truth)


def train_without_waiting(scenario: Scenario, config: Config) -> tuple[list[float], dict[str, Tensor]]:
    """Takes 14 steps, the last four of which must not make the host wait."""
    batches = [scenario.batch_of(number) for number in range(14)]
    model, losses = scenario.model(config), []
    for number, batch in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if number >= 10 else "default")
        try:
            losses.append(scenario.step(model, config, number, batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    model.head.check()
    return torch.stack(losses).tolist(), model.shared_state()


@pytest.mark.parametrize(("name", "precision"), [("iresnet18", "bf16"), ("mbf", "fp16")])
def test_steps_after_the_capture_have_the_bits_of_ordinary_ones_and_never_wait(name, precision, device, replays):
    scenario = scenario_on(device)
    config = scenario.config(backbone__name=name, train__precision=precision)
    truth, ours = (train_without_waiting(scenario, with_graphs(config, setting)) for setting in ("off", "on"))
    assert_same_bits(ours, truth)
    assert replays == {"__init__": 1, "forward": 11, "backward": 11}


def test_a_transformer_that_is_not_compiled_is_replayed(device, replays):
    """Its attention adds up gradients in any order, so bits differ between two ordinary runs, too."""
    scenario = scenario_on(device)
    config = scenario.config(backbone__name="vit_t", train__compile=False)
    truth, ours = (train_without_waiting(scenario, with_graphs(config, setting)) for setting in ("off", "auto"))
    assert ours[0][:8] == pytest.approx(truth[0][:8], rel=0.05)
    assert replays == {"__init__": 1, "forward": 11, "backward": 11}


def test_a_capture_that_fails_leaves_the_ordinary_way_and_random_numbers(device, replays, monkeypatch):
    monkeypatch.setitem(BACKBONES, "curious", Curious)
    scenario = scenario_on(device)
    config = scenario.config(backbone__name="curious")
    outcomes = []
    for setting in ("off", "on"):
        chosen = with_graphs(config, setting)
        torch.cuda.manual_seed(1)
        model = scenario.model(chosen)
        torch.rand(3, device=device)
        fails = pytest.warns(UserWarning, match=r"runs without one.*train\.cuda_graph=off")
        losses = []
        for number in range(6):
            with fails if setting == "on" and number == 3 else nullcontext():
                losses.append(scenario.step(model, chosen, number).item())
        outcomes.append((losses, {**model.shared_state(), "random": torch.rand(3, device=device)}))
    assert_same_bits(outcomes[1], outcomes[0])
    assert replays == {"__init__": 1, "forward": 0, "backward": 0}
    # The next model of the process is captured as if nothing had happened.
    config = with_graphs(scenario.config(backbone__name="mbf"), "on")
    model = scenario.model(config)
    for number in range(5):
        assert scenario.step(model, config, number).isfinite()
    assert replays == {"__init__": 2, "forward": 2, "backward": 2}


def test_the_memory_of_the_graphs_is_given_back_with_the_model(device, replays):
    scenario = scenario_on(device)
    held = []
    for setting in ("off", "on"):
        config = with_graphs(scenario.config(backbone__name="iresnet18"), setting)
        for _ in range(2):
            model = scenario.model(config)
            for number in range(4):
                scenario.step(model, config, number)
            del model
            gc.collect()
            # Memory that several streams have used counts as allocated until the allocator looks at it again.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_allocated())
    # What the first model leaves is kept by libraries; the second leaves no more than an ordinary one does.
    assert held[3] - held[2] <= held[1] - held[0] + (1 << 20), held
    assert replays == {"__init__": 2, "forward": 2, "backward": 2}


class Curious(nn.Module):
    """Looks at its own values, which is not possible in a graph."""

    def __init__(self, embedding_dim: int, image_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 4)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))
        return x * (1.0 if x.sum().item() > 0 else 2.0)
