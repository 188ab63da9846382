"""One training step through the public parts: accumulation, loss scale, running mean, what is not finite."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaclass.backbones import BACKBONES
from megaclass.backbones.vit import VisionTransformer
from megaclass.config.read import load_config_values
from megaclass.config.schema import Config
from megaclass.data.loader import Batch
from megaclass.errors import NotFiniteError, TrainError
from megaclass.head.step import HeadStats
from megaclass.training.metrics import Meter, StepClock, StepResult, check_finite
from megaclass.training.model.build import Model, build_model
from megaclass.training.model.keyed_dropout import KeyedDropout, key_dropout
from megaclass.training.model.precision import LossScale, Precision
from megaclass.training.step import training_step
from megaclass_launch.errors import ConfigError
from megaclass_launch.world import World

CPU = torch.device("cpu")


class TinySource:
    num_images, num_classes, image_size = 64, 12, (16, 16)


class TinyNet(nn.Module):
    """With batch norm, dropout and a place for NaN to come from."""

    def __init__(self, embedding_dim: int, image_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 4)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.0)
        self.fc = nn.Linear(4 * 16, embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(torch.flatten(self.dropout(self.norm(self.conv(x)).relu()), 1))
        return result


def settings(**changes: object) -> Config:
    tables: dict[str, dict[str, object]] = {
        "data": {"path": "unused"},
        "backbone": {"name": f"{__name__}:TinyNet", "embedding_dim": 8},
        "head": {"scale": 16.0, "margin_size": 0.2, "sample_rate": 0.5},
        "train": {"run_dir": "unused", "global_batch": 11},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        tables.setdefault(section, {})[key] = value
    return load_config_values(tables, where="test")


def global_batch(step: int, size: int = 11) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch(
        images=torch.randint(0, 256, (size, 3, 16, 16), generator=generator, dtype=torch.uint8),
        labels=torch.randint(12, (size,), generator=generator),
        indices=np.arange(step * size, (step + 1) * size),
        epoch=0,
        step=step,
    )


def my_batch(step: int, parts: list[int]) -> Batch:
    batch = global_batch(step)
    here = slice(sum(parts[: dist.get_rank()]), sum(parts[: dist.get_rank() + 1]))
    return replace(batch, images=batch.images[here], labels=batch.labels[here], indices=batch.indices[here])


def new_model(config: Config) -> Model:
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=0, local_size=1)
    BACKBONES["tiny"] = TinyNet  # importable in the ranks, where this module is a file of the tests
    config = replace(config, backbone=replace(config.backbone, name="tiny"))
    model = build_model(config, TinySource(), world, CPU)
    model.parallel.train()
    return model


def _train(config: Config, parts: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    model = new_model(config)
    losses = [
        training_step(model, my_batch(step, parts), config, lr=0.05, step=step, device=CPU).loss.item()
        for step in range(5)
    ]
    state = {name: tensor.clone() for name, tensor in model.shared_state().items()}
    return losses, state | {"centres": model.head.centres(torch.arange(12))}


@pytest.mark.parametrize("parts", [[6, 5], [4, 3, 4], [3, 3, 2, 3]], ids=str)
def test_with_synchronised_batch_norm_the_whole_run_is_the_same_on_any_number_of_ranks(run_ranks, parts):
    config = settings(backbone__batch_norm="sync", backbone__dropout=0.3, train__ema=0.9, head__margin="curricularface")
    ((losses, state),) = run_ranks(1, _train, config, [11])
    for other_losses, other_state in run_ranks(len(parts), _train, config, parts):
        assert other_losses == pytest.approx(losses, rel=2e-5)
        assert set(other_state) == set(state)
        for name, tensor in state.items():
            torch.testing.assert_close(other_state[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def _train_vit(config: Config, parts: list[int]) -> list[float]:
    BACKBONES["tiny_vit"] = partial(VisionTransformer, 32, 3)
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=0, local_size=1)
    model = build_model(config, TinySource(), world, CPU)
    model.parallel.train()
    return [
        training_step(model, my_batch(step, parts), config, lr=0.05, step=step, device=CPU).loss.item()
        for step in range(5)
    ]


def test_a_transformer_with_dropped_branches_and_masked_patches_trains_alike_on_any_number_of_ranks(run_ranks):
    def config(**changes: object) -> Config:
        shares = {"backbone__drop_path": 0.5, "backbone__mask_patches": 0.4}
        return settings(backbone__name="tiny_vit", backbone__batch_norm="sync", **{**shares, **changes})

    (losses,) = run_ranks(1, _train_vit, config(), [11])
    for other in run_ranks(3, _train_vit, config(), [4, 3, 4]):
        assert other == pytest.approx(losses, rel=1e-4)
    (again,) = run_ranks(1, _train_vit, config(backbone__checkpoint_activations=True), [11])
    assert again == pytest.approx(losses, rel=1e-5)
    (plain,) = run_ranks(1, _train_vit, config(backbone__drop_path=0.0, backbone__mask_patches=0.0), [11])
    assert plain != pytest.approx(losses, rel=1e-3)


def test_dropped_branches_are_refused_for_backbones_without_them(run_ranks):
    (message,) = run_ranks(1, _refusal, settings(backbone__drop_path=0.1))
    assert "only the transformers (vit_t to vit_h) have them" in message


def _refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        new_model(config)
    return str(caught.value)


def test_accumulated_parts_give_the_step_of_the_whole_batch(run_ranks):
    # Without batch norm, whose statistics are those of a part: frozen in evaluation mode here.
    whole = run_ranks(2, _train_without_norm, settings(), [6, 5])
    parts = run_ranks(2, _train_without_norm, settings(train__accumulate=3), [6, 5])
    for (losses, state), (other_losses, other_state) in zip(whole, parts, strict=True):
        assert other_losses == pytest.approx(losses, rel=1e-5)
        for name, tensor in state.items():
            torch.testing.assert_close(other_state[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def _train_without_norm(config: Config, parts: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    model = new_model(config)
    model.backbone.get_submodule("norm").eval()
    losses = [
        training_step(model, my_batch(step, parts), config, lr=0.05, step=step, device=CPU).loss.item()
        for step in range(4)
    ]
    return losses, {name: tensor.clone() for name, tensor in model.backbone.state_dict().items()}


def _differing(before: dict[str, Tensor], model: Model) -> list[str]:
    return [name for name, tensor in model.shared_state().items() if not torch.equal(before[name], tensor)]


def _poisoned(config: Config) -> tuple[str, list[str], int, bool]:
    """One rank's weights make NaN before the batch norm in step 1; steps 0 and 2 are fine."""
    model = new_model(config)
    training_step(model, my_batch(0, [6, 5]), config, lr=0.05, step=0, device=CPU)
    before = {name: tensor.clone() for name, tensor in model.shared_state().items()}
    weight = model.backbone.get_parameter("conv.weight").detach()
    clean = weight.clone()
    if dist.get_rank() == 1:
        weight.fill_(math.nan)
    try:
        result = training_step(model, my_batch(1, [6, 5]), config, lr=0.05, step=1, device=CPU)
        assert result.was_skipped
        message = ""
    except NotFiniteError as error:
        message = str(error)
        model.head.abandon_step()
    weight.copy_(clean)
    moved = _differing(before, model)
    last = training_step(model, my_batch(2, [6, 5]), config, lr=0.05, step=2, device=CPU)
    return message, moved, model.head.step_count, bool(last.loss.isfinite())


def test_nan_on_one_rank_stops_all_of_them_and_names_it(run_ranks):
    for message, moved, _, _ in run_ranks(2, _poisoned, settings()):
        assert "5 embedding(s)" in message
        assert "position 0 of rank 1" in message and "in step 1, counted from 0" in message
        assert not moved


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_nan_on_one_rank_is_skipped_by_all_when_asked_and_leaves_no_trace(run_ranks, batch_norm, accumulate):
    config = settings(
        train__on_nan="skip", train__ema=0.9, backbone__batch_norm=batch_norm, train__accumulate=accumulate
    )
    assert run_ranks(2, _poisoned, config) == [("", [], 3, True)] * 2


def _infinite_gradient(config: Config) -> tuple[list[str], bool]:
    """Parameters, means and statistics that a step with such a gradient moved; and whether a good one moves statistics."""
    model = new_model(config)
    before = {name: tensor.clone() for name, tensor in model.shared_state().items()}
    hook = model.backbone.get_parameter("conv.bias").register_hook(lambda grad: grad * math.inf)
    result = training_step(model, my_batch(0, [6, 5]), config, lr=0.05, step=0, device=CPU)
    assert result.was_skipped
    moved = _differing(before, model)
    hook.remove()
    training_step(model, my_batch(1, [6, 5]), config, lr=0.05, step=1, device=CPU)
    statistics = {"backbone.norm.running_mean", "backbone.norm.running_var", "backbone.norm.num_batches_tracked"}
    return moved, statistics <= set(_differing(before, model))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_a_gradient_that_is_not_finite_moves_nothing(run_ranks, batch_norm, accumulate):
    config = settings(train__ema=0.5, backbone__batch_norm=batch_norm, train__accumulate=accumulate)
    assert run_ranks(2, _infinite_gradient, config) == [([], True)] * 2


def test_skipped_steps_end_the_run_unless_they_are_expected():
    row = {"skipped_steps": 2.0}
    with pytest.raises(Exception, match=r"2 of the steps before step 40.*train\.on_nan=skip"):
        check_finite(row, 40, "stop", is_scaled=False)
    check_finite(row, 40, "skip", is_scaled=False)
    check_finite(row, 40, "stop", is_scaled=True)


def test_a_run_whose_steps_are_all_skipped_ends_although_a_loss_scale_is_in_use():
    meter = Meter(4, [], CPU)
    for was_skipped in (True, False, *[True] * 60):
        meter.add(StepResult(torch.ones(()), torch.tensor(was_skipped)))
    row = meter.read()
    assert meter.skipped_in_row == 60
    check_finite(row, 62, "skip", is_scaled=True, skipped_in_row=meter.skipped_in_row)
    for _ in range(40):
        meter.add(StepResult(torch.ones(()), torch.tensor(True)))
    row = meter.read()
    with pytest.raises(TrainError, match=r"The last 100 steps before step 102 were skipped.*train\.precision=bf16"):
        check_finite(row, 102, "skip", is_scaled=True, skipped_in_row=meter.skipped_in_row)
    meter.add(StepResult(torch.ones(()), torch.tensor(False)))
    meter.read()
    assert meter.skipped_in_row == 0


def test_the_loss_scale_never_falls_to_zero():
    scale = LossScale(Precision(torch.float16), CPU)
    for _ in range(200):
        scale.follow(torch.tensor(True))
    assert scale.scale == 1


def test_the_loss_scale_halves_after_a_bad_step_and_doubles_after_two_thousand_good_ones():
    scale = LossScale(Precision(torch.float16), CPU)
    first = scale.scale.item()
    scale.follow(torch.tensor(True))
    assert scale.scale.item() == first / 2
    for _ in range(1999):
        scale.follow(torch.tensor(False))
    assert scale.scale.item() == first / 2
    scale.follow(torch.tensor(False))
    assert scale.scale.item() == first


def test_without_float16_there_is_no_loss_scale():
    scale = LossScale(Precision(torch.bfloat16), CPU)
    scale.follow(torch.tensor(True))
    assert scale.scale.item() == 1


def _running_mean() -> tuple[float, float]:
    config = settings(train__ema=0.75)
    model = new_model(config)
    bias = model.backbone.get_parameter("fc.bias")
    expected = bias.detach().clone()
    for step in range(3):
        training_step(model, my_batch(step, [11]), config, lr=0.05, step=step, device=CPU)
        expected = 0.75 * expected + 0.25 * bias.detach()
    own = bias.detach().clone()
    with model.for_evaluation() as backbone:
        inside = (backbone.get_parameter("fc.bias") - expected).abs().max().item()
    return inside, (bias - own).abs().max().item()


def test_evaluation_sees_the_running_mean_and_training_its_own_weights_again(run_ranks):
    ((inside, outside),) = run_ranks(1, _running_mean)
    assert inside < 1e-7
    assert outside == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone__freeze": ["layer9"]}, "no parameter of .* starts with that prefix"),
        ({"backbone__freeze": ["conv", "norm", "fc"]}, "leaves nothing of .* to train"),
        ({"train__precision": "bf16"}, "the device is a CPU"),
        ({"backbone__checkpoint_activations": True}, "only the iresnets and the transformers support it"),
        ({"backbone__name": "no.such.module:Net"}, "expected package.module:Class"),
    ],
)
def test_settings_that_this_backbone_or_device_cannot_follow_are_refused(run_ranks, changes, message):
    ((error,),) = [run_ranks(1, _build_error, settings(**changes), "name" not in str(changes))]
    assert error is not None
    import re

    assert re.search(message, error)


def _build_error(config: Config, is_tiny: bool) -> str | None:
    try:
        if is_tiny:
            new_model(config)
        else:
            build_model(config, TinySource(), World(), CPU)
    except ConfigError as error:
        return str(error)
    return None


def _lean(is_lean: bool, parts: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    config = settings(backbone__name="iresnet18", backbone__batch_norm="sync", backbone__checkpoint_activations=is_lean)
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=0, local_size=1)
    model = build_model(config, TinySource(), world, CPU)
    model.parallel.train()
    losses = [
        training_step(model, my_batch(step, parts), config, lr=0.05, step=step, device=CPU).loss.item()
        for step in range(2)
    ]
    return losses, {name: tensor.clone() for name, tensor in model.shared_state().items() if "num_batches" not in name}


def test_activations_computed_again_give_the_same_weights_and_running_statistics(run_ranks):
    (kept_losses, kept), (lean_losses, lean) = (run_ranks(2, _lean, is_lean, [6, 5])[1] for is_lean in (False, True))
    assert kept_losses == lean_losses
    assert set(kept) == set(lean) and "backbone.layer1.0.bn1.running_var" in kept
    for name in kept:
        assert torch.equal(kept[name], lean[name]), name


def _resumed_by_a_fused_optimizer(name: str) -> list[str]:
    """Parameters that differ after three steps, the state of the second taken over from a checkpoint's plain copies."""
    config = settings(optimizer__name=name)
    models = [new_model(config), new_model(config)]
    for model in models:
        # As on a GPU: fused optimizers walk through memory, not through indices.
        for group in model.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        model.optimizer.defaults["fused"] = True
    for step in range(3):
        for model in models:
            training_step(model, my_batch(step, [11]), config, lr=0.05, step=step, device=CPU)
        if step == 1:
            saved = {
                key: tensor.clone(memory_format=torch.contiguous_format)
                for key, tensor in models[0].shared_state().items()
            }
            models[1].load_shared_state(saved)
    whole, resumed = (dict(model.backbone.named_parameters()) for model in models)
    assert not whole["conv.weight"].is_contiguous()
    return [key for key in whole if not torch.equal(whole[key], resumed[key])]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_resumed_optimizers_state_lies_in_memory_as_the_weights_do(run_ranks, name):
    assert run_ranks(1, _resumed_by_a_fused_optimizer, name) == [[]]


def _after_a_skipped_first_step() -> list[str]:
    """Parameters that differ from those of a model which was never asked to skip."""
    config = settings()
    models = [new_model(config), new_model(config)]
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is then NaN
    try:
        for model in models:
            for group in model.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
        # As on a GPU, where the verdict stays on the device and the optimizer is told to move nothing.
        for parameter in models[1].backbone.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf)
        models[1].optimizer.found_inf = torch.ones(())
        models[1].optimizer.step()
        models[1].optimizer.found_inf = torch.zeros(())
        for step in range(2):
            for model in models:
                training_step(model, my_batch(step, [11]), config, lr=0.05, step=step, device=CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    whole, skipped = (dict(model.backbone.named_parameters()) for model in models)
    return [key for key in whole if not torch.equal(whole[key], skipped[key])]


def test_a_first_step_that_is_skipped_leaves_nothing_behind_in_the_optimizer(run_ranks):
    assert run_ranks(1, _after_a_skipped_first_step) == [[]]


def _frozen() -> list[str]:
    config = settings(backbone__freeze=["conv", "norm"])
    model = new_model(config)
    before = {name: p.detach().clone() for name, p in model.backbone.named_parameters()}
    training_step(model, my_batch(0, [11]), config, lr=0.05, step=0, device=CPU)
    return [name for name, p in model.backbone.named_parameters() if not torch.equal(p, before[name])]


def test_frozen_parameters_do_not_move(run_ranks):
    assert run_ranks(1, _frozen) == [["fc.weight", "fc.bias"]]


def test_the_meter_leaves_skipped_steps_out_of_the_mean():
    meter = Meter(12, [], CPU)
    for loss, skipped in ((1.0, False), (math.nan, True), (3.0, False)):
        meter.add(StepResult(torch.tensor(loss), torch.tensor(skipped)))
    row = meter.read()
    assert row["loss"] == 2.0
    assert row["skipped_steps"] == 1


def test_the_meter_tells_the_median_and_the_longest_steps(monkeypatch):
    # Ends of steps: the first one has no begin. After a pause the next step has none either.
    ends = iter([1.0, 1.1, 1.3, 1.4, 9.0, 9.1, 9.3])
    monkeypatch.setattr("megaclass.training.metrics.time.perf_counter", lambda: next(ends))
    clock = StepClock(CPU)
    meter = Meter(12, [], CPU, clock)
    for _ in range(4):
        clock.end_step()
        meter.add(StepResult(torch.tensor(1.0), torch.tensor(False)))
    row = meter.read()
    assert row["step_ms"] == pytest.approx(100) and row["step_ms_p99"] == pytest.approx(198)
    with meter.paused():
        pass
    clock.end_step()
    meter.add(StepResult(torch.tensor(1.0), torch.tensor(False)))
    assert "step_ms" not in meter.read()
    for _ in range(2):
        clock.end_step()
        meter.add(StepResult(torch.tensor(1.0), torch.tensor(False)))
    assert meter.read()["step_ms"] == pytest.approx(150)


def test_the_meter_leaves_evaluation_out_of_the_speed(monkeypatch):
    clock = iter([0.0, 2.0, 102.0, 4.0 + 100.0, 104.0])  # begun, pause begins, pause ends, read, end
    monkeypatch.setattr("megaclass.training.metrics.time.monotonic", lambda: next(clock))
    meter = Meter(12, [], CPU)
    meter.add(StepResult(torch.tensor(1.0), torch.tensor(False)))
    with meter.paused():
        pass
    row = meter.read()
    assert (row["images_per_second"], row["evaluation_s"], row["elapsed_s"]) == (3.0, 100.0, 104.0)
    assert meter.images_per_second() == 3.0


def test_the_meter_tells_the_head_stats_of_the_last_step_unless_that_was_skipped():
    stats = HeadStats(*torch.tensor([0.25, 3.0, 0.5], dtype=torch.float64))
    meter = Meter(12, [], CPU)
    for skipped in (False, True):
        meter.add(StepResult(torch.tensor(1.0), torch.tensor(False)))
        meter.add(StepResult(torch.tensor(1.0), torch.tensor(skipped), stats))
        row = meter.read()
        told = [row.get(name) for name in ("target_cosine", "head_gradient_norm", "sampled_share")]
        assert told == ([None] * 3 if skipped else [0.25, 3.0, 0.5])


def _rows(config: Config, parts: list[int]) -> list[list[float]]:
    model, meter = new_model(config), Meter(11, [], CPU)
    model.backbone.get_submodule("norm").eval()  # its statistics would be those of a part of the batch
    rows = []
    for step in range(3):
        batch = my_batch(step, parts)
        meter.add(training_step(model, batch, config, lr=0.01, step=step, device=CPU, is_measured=True))
        row = meter.read()
        rows.append([row[name] for name in ("target_cosine", "head_gradient_norm", "sampled_share")])
    return rows


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_the_measures_of_a_step_are_the_same_on_any_number_of_ranks_and_parts(run_ranks, rate):
    config = settings(head__sample_rate=rate)
    (truth,) = run_ranks(1, _rows, config, [11])
    assert all(math.isfinite(number) and number != 0 for row in truth for number in row)
    for parts in ([6, 5], [4, 3, 4], [3, 3, 2, 3]):
        for accumulate in (1, 2):
            for rows in run_ranks(
                len(parts), _rows, settings(head__sample_rate=rate, train__accumulate=accumulate), parts
            ):
                for row, true in zip(rows, truth, strict=True):
                    assert row == pytest.approx(true, rel=1e-4, abs=1e-5)


def test_gradients_that_travel_in_eight_bits_train_nearly_alike(run_ranks):
    plain = run_ranks(2, _train, settings(), [6, 5])
    narrow = run_ranks(2, _train, settings(train__compression="fp8"), [6, 5])
    assert narrow[0][0] == narrow[1][0]
    assert narrow[0][0] != plain[0][0]
    assert narrow[0][0] == pytest.approx(plain[0][0], rel=0.02)


def test_dropout_is_compiled_once_for_all_steps_and_drops_the_same():
    from torch._dynamo.utils import counters

    network = nn.Sequential(nn.Linear(8, 8), KeyedDropout(0.4, seed=0, layer=0)).train()
    compiled = torch.compile(network, dynamic=False, backend="eager")
    torch._dynamo.reset()
    counters.clear()
    images_BD, dropped = torch.randn(4, 8), set()
    for step in range(6):
        network.get_submodule("1").expect(torch.arange(4), step)
        embeddings_BD = compiled(images_BD)
        assert torch.equal(embeddings_BD, network(images_BD))
        dropped.add(tuple((embeddings_BD == 0).flatten().tolist()))
    assert len(dropped) == 6
    assert counters["stats"]["unique_graphs"] == 1


def test_a_transformer_that_drops_and_masks_is_compiled_once_for_all_steps_and_gives_the_same():
    from torch._dynamo.utils import counters

    network = VisionTransformer(16, 3, 8, 32)
    network.regularise(drop_path=0.5, mask_patches=0.4)
    keyed = key_dropout(network, seed=0)
    network.train().feature.eval()
    compiled = torch.compile(network, dynamic=False, backend="eager")
    torch._dynamo.reset()
    counters.clear()
    images = torch.randn(4, 3, 32, 32)
    for step in range(4):
        for one in keyed:
            one.expect(torch.arange(4), step)
        torch.testing.assert_close(compiled(images), network(images), rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.ranks
def test_where_the_compiler_fails_training_goes_on_without_and_says_why(tmp_path):
    body = (
        "from torch import nn\n"
        "from megaclass.training.model.build import _compiled\n"
        "network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())\n"
        "from megaclass_launch.messages import messages_on_stderr\n"
        "with messages_on_stderr():\n"
        "    assert _compiled(network, 16) is network and network.training\n"
    )
    # /bin/false as the C++ compiler: it fails as one that is not installed would.
    env = {**os.environ, "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", body], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "megaclass: torch.compile failed, continuing without it: " in done.stderr
