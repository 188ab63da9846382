"""`train.shard_backbone`: FSDP2 splits the backbone, and nothing else changes but rounding."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.forked import ended_ranks, megaclass_command
from tests.megaclass.training.test_step import CPU, TinySource, my_batch, settings
from tests.timm_here import NEEDS_TIMM, import_timm

import megaclass
from megaclass.cli.main import main
from megaclass.config.schema import Config
from megaclass.distributed.sharded import ShardedBackbone
from megaclass.training import rank_main
from megaclass.training.model.build import Model, build_model
from megaclass.training.start.restart import StartMode
from megaclass.training.step import training_step
from megaclass_launch.errors import ConfigError
from megaclass_launch.world import World

PARTS = {1: [11], 2: [6, 5], 4: [3, 3, 2, 3]}
SHARED = {"backbone__name": "slim", "backbone__batch_norm": "sync", "backbone__freeze": ["stem"], "train__ema": 0.5}
VARIANTS = {
    "sgd": {},
    # Ten rows of the last layer: the last one of four ranks has fewer.
    "adamw": {"optimizer__name": "adamw", "optimizer__layer_decay": 0.7, "backbone__embedding_dim": 10},
    "vit": {
        "backbone__name": "vit_t",
        "backbone__drop_path": 0.1,
        "backbone__batch_norm": "local",
        "backbone__freeze": [],
    },
}


VARIANTS["lora"] = {**VARIANTS["vit"], "backbone__lora": 2}


def config_of(variant: str, *, is_sharded: bool) -> Config:
    return settings(**SHARED | VARIANTS[variant], train__shard_backbone=is_sharded)


def model_of(config: Config) -> Model:
    if config.backbone.lora:
        import_timm()
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=0, local_size=1)
    model = build_model(config, TinySource(), world, CPU)
    model.parallel.train()
    return model


def steps(model: Model, config: Config, numbers: range) -> list[float]:
    parts = PARTS[dist.get_world_size()]
    return [
        float(training_step(model, my_batch(step, parts), config, lr=0.02, step=step, device=CPU).loss)
        for step in numbers
    ]


def embedded(model: Model) -> torch.Tensor:
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(9))
    with model.for_evaluation() as network, torch.no_grad():
        # A rank that embeds more images than another one must not wait for it.
        for _ in range(dist.get_rank()):
            network.eval()(images)
        return network.eval()(images).clone()


def trained(variant: str, is_sharded: bool, numbers: range = range(4)) -> tuple[list[float], object, object]:
    config = config_of(variant, is_sharded=is_sharded)
    model = model_of(config)
    assert isinstance(model.parallel, ShardedBackbone) == is_sharded
    losses = steps(model, config, numbers)
    return losses, {name: tensor.clone() for name, tensor in model.shared_state().items()}, embedded(model)


@pytest.mark.parametrize(
    ("size", "variant"), [(2, "sgd"), (2, "vit"), (4, "adamw"), pytest.param(2, "lora", marks=NEEDS_TIMM)]
)
def test_losses_state_and_embeddings_are_those_of_the_whole_backbone(run_ranks, size, variant):
    whole = run_ranks(size, trained, variant, False)
    split = run_ranks(size, trained, variant, True)
    for (losses, _, embeddings), (expected, _, expected_embeddings) in zip(split, whole, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(embeddings, expected_embeddings, rtol=1e-3, atol=1e-4)
    state, expected_state = split[0][1], whole[0][1]
    assert list(state) == list(expected_state)
    for name, tensor in expected_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def continued(variant: str, is_sharded: bool, state: dict, first: int) -> tuple[list[float], object]:
    """The centres start anew, as they do not in a run: what is compared is the backbone's part."""
    config = config_of(variant, is_sharded=is_sharded)
    model = model_of(config)
    model.load_shared_state(state)
    loaded = {name: tensor.clone() for name, tensor in model.shared_state().items()}
    return steps(model, config, range(first, first + 2)), loaded


def test_state_of_4_ranks_loads_on_2_and_without_sharding(run_ranks):
    state = run_ranks(4, trained, "adamw", True)[0][1]
    curves = []
    for size, is_sharded in ((4, True), (2, True), (2, False), (1, True)):
        losses, loaded = run_ranks(size, continued, "adamw", is_sharded, state, 4)[0]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items()), (size, is_sharded)
        curves.append(losses)
    for losses in curves:
        assert losses == pytest.approx(curves[0], rel=1e-4)


def sizes() -> tuple[int, int, list[int]]:
    config = config_of("adamw", is_sharded=True)
    model = model_of(config)
    steps(model, config, range(1))
    own = [p.numel() for p in model.parameters.values()]
    state = [s["exp_avg"].numel() for s in model.optimizer.state.values()]
    return sum(own), sum(p.numel() for p in model.backbone.parameters()), sum(state)


def test_each_rank_holds_its_share(run_ranks):
    own, states = [], []
    for mine, total, state in run_ranks(4, sizes):  # noqa: B007 (the same on all ranks)
        own.append(mine)
        states.append(state)
    assert sum(own) == total and max(own) < 0.3 * total
    assert max(states) < 0.3 * total


def clipped(is_sharded: bool) -> list[float]:
    config = settings(**SHARED, train__shard_backbone=is_sharded, optimizer__clip_norm=0.01, train__accumulate=2)
    return steps(model_of(config), config, range(4))


def test_clipping_and_accumulation_are_those_of_the_whole_backbone(run_ranks):
    (whole, *_), (split, *_) = run_ranks(2, clipped, False), run_ranks(2, clipped, True)
    assert split == pytest.approx(whole, rel=1e-4)


def seen_in_bf16() -> tuple[bool, torch.dtype, bool]:
    parallel = model_of(config_of("vit", is_sharded=True)).parallel
    seen = []
    parallel.module.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    parallel.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        dtype = parallel(torch.randn(4, 3, 16, 16)).dtype
        return seen[0], dtype, torch.is_autocast_cache_enabled()


def test_autocast_keeps_no_copies_of_blocks_that_are_used_once(run_ranks):
    assert run_ranks(2, seen_in_bf16) == [(False, torch.bfloat16, True)] * 2


def skipped() -> tuple[list[float], bool]:
    config = settings(**SHARED, train__shard_backbone=True, train__on_nan="skip")
    model = model_of(config)
    before = steps(model, config, range(1))
    state = model.shared_state()
    batch = my_batch(1, PARTS[dist.get_world_size()])
    with torch.no_grad():
        kept = model.parameters["fc.weight"].clone()
        model.parameters["fc.weight"].fill_(torch.nan)
    result = training_step(model, batch, config, lr=0.02, step=1, device=CPU)
    with torch.no_grad():
        model.parameters["fc.weight"].copy_(kept)
    again = model.shared_state()
    is_same = all(torch.equal(state[name], again[name]) for name in state if "running" not in name)
    return before + steps(model, config, range(2, 3)), bool(result.was_skipped) and is_same


def test_a_skipped_step_changes_nothing(run_ranks):
    for losses, is_same in run_ranks(2, skipped):
        assert is_same
        assert all(loss == loss for loss in losses)


@pytest.mark.parametrize(("setting", "value"), [("compile", True), ("cuda_graph", "on"), ("compression", "bf16")])
def test_what_does_not_work_with_it_is_refused(setting, value):
    with pytest.raises(ConfigError, match=rf"train\.{setting} is {value}; it must be .* with train\.shard_backbone"):
        settings(train__shard_backbone=True, **{f"train__{setting}": value})
    config = settings(train__shard_backbone=True)
    assert not config.is_compiled(on_gpu=True) and not config.may_replay_backbone()
    vit = replace(config, backbone=replace(config.backbone, name="vit_b"))
    assert not vit.is_compiled(on_gpu=True)


RECIPE = """
[data]
path = "{data}"
[backbone]
name = "slim"
embedding_dim = 32
batch_norm = "sync"
[head]
margin_size = 0.1
scale = 16.0
sample_rate = 0.5
[train]
device = "cpu"
run_dir = "unused"
epochs = 3
global_batch = 16
report_steps = 1
evaluate_epochs = 1
keep_checkpoints = 9
[export]
onnx = false
"""


def _command(*arguments: str) -> None:
    megaclass_command(*arguments)


@pytest.mark.ranks
def test_a_run_goes_from_4_ranks_to_2_to_one_whole_backbone_and_ends_like_one_that_never_was_split(tmp_path):
    """The mean of sampled centres and evaluations between the steps are part of it."""
    options = ["--identities", "10", "--images-per-identity", "8", "--size", "32", "--pairs", "20"]
    assert main(["data", "synth", *options, "--out", str(tmp_path / "data")]) == 0
    (tmp_path / "recipe.toml").write_text(RECIPE.format(data=tmp_path / "data"))

    def train(size, run, *more):
        recipe = str(tmp_path / "recipe.toml")
        done = ended_ranks(size, _command, "train", recipe, f"train.run_dir={tmp_path / run}", *more, timeout_s=200)
        assert [rank.returncode for rank in done] == [0] * size, "\n".join(rank.stderr[-3000:] for rank in done)
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows]

    def forget(run, newest):
        for folder in sorted((tmp_path / run / "checkpoints").glob("step-*"))[-newest:]:
            shutil.rmtree(folder)

    whole = train(1, "whole")
    split = "train.shard_backbone=true"
    assert train(4, "split", split) == pytest.approx(whole, rel=1e-3)
    model, reference = (
        megaclass.load(tmp_path / run / "model.safetensors", device="cpu") for run in ("split", "whole")
    )
    for name, tensor in reference.network.state_dict().items():
        torch.testing.assert_close(model.network.state_dict()[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
    forget("split", 2)
    assert train(2, "split", split, "--resume") == pytest.approx(whole, rel=1e-3)
    forget("split", 1)
    assert train(1, "split", "--resume") == pytest.approx(whole, rel=1e-3)
    assert (tmp_path / "split" / "summary.json").exists()


def test_elastic_jobs_are_refused_before_they_join(monkeypatch):
    monkeypatch.setattr(rank_main, "elastic_worker", lambda: object())
    with pytest.raises(ConfigError, match=r"train\.shard_backbone does not work in elastic jobs"):
        rank_main.train_as_rank(settings(train__shard_backbone=True), World(), StartMode())
