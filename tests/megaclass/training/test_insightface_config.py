"""InsightFace's configs as recipes: what is carried over, what is named, what is refused."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.megaclass.training.published_configs import COS, PUBLISHED, Published

from megaclass.backbones import build_backbone
from megaclass.backbones.vit import VisionTransformer
from megaclass.config.read import load_config
from megaclass.config.schema import Config
from megaclass.insightface.import_config import import_config, recipe_text
from megaclass.training.schedule import learning_rate
from megaclass_launch.errors import ConfigError

MS1MV3_R50 = """
from easydict import EasyDict as edict

config = edict()
config.margin_list = (1.0, 0.5, 0.0)
config.network = "r50"
config.resume = False
config.output = None
config.embedding_size = 512
config.sample_rate = 1.0
config.fp16 = True
config.momentum = 0.9
config.weight_decay = 5e-4
config.batch_size = 128
config.lr = 0.1
config.verbose = 2000
config.dali = False
config.rec = "/train_tmp/ms1m-retinaface-t1"
config.num_classes = 93431
config.num_image = 5179510
config.num_epoch = 20
config.warmup_epoch = 0
config.val_targets = ['lfw', 'cfp_fp', "agedb_30"]
"""


def imported(tmp_path, more: str = "", text: str = MS1MV3_R50, name: str = "config", **options) -> tuple[Config, str]:
    """The config, and the remarks in one text."""
    path = tmp_path / f"{name}.py"
    path.write_text(text + more + "\n")
    config, remarks = import_config(path, **{"num_gpus": 8, **options})
    return config, "\n".join(remarks)


def test_a_published_config_becomes_a_recipe_with_the_same_settings(tmp_path):
    config, remarks = imported(tmp_path)
    assert (config.backbone.name, config.backbone.embedding_dim) == ("iresnet50", 512)
    assert (config.head.margin, config.head.margin_size, config.head.sample_rate) == ("arcface", 0.5, 1.0)
    assert (config.head.scale, config.head.gradient) == (64.0, "straight-through")
    assert config.head.sample_positives, "InsightFace draws r * C classes with the positives"
    assert (config.train.global_batch, config.train.epochs, config.train.nproc) == (1024, 20.0, 8)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.clip_norm) == (0.1, 5e-4, 5.0)
    assert (config.optimizer.schedule, config.optimizer.power) == ("polynomial", 1.0)
    assert config.data.path == "/train_tmp/ms1m-retinaface-t1"
    assert config.train.evaluate_sets == ("lfw", "cfp_fp", "agedb_30")
    # 5179510 // 1024 = 5058 steps per epoch.
    assert round(config.train.evaluate_epochs * 5058) == 2000
    for name in ("num_classes", "num_image", "fp16", "power 1"):
        assert name in remarks


def test_what_the_file_leaves_out_is_taken_from_insightfaces_base_and_named(tmp_path):
    text = "config = edict()\nconfig.rec = '/data'\nconfig.num_epoch = 4\n"
    config, remarks = imported(tmp_path, text=text)
    assert (config.train.seed, config.train.precision, config.train.report_steps) == (2048, "float32", 10)
    assert (config.head.margin, config.data.threads, config.optimizer.lr) == ("arcface", 2, 0.1)
    assert "taken from InsightFace's base.py: margin_list = (1.0, 0.5, 0.0), network = 'r50'" in remarks
    assert "warmup_epoch is not set" in remarks
    assert "verbose = 2000 was not carried over: without num_image" in remarks


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.name)
def test_every_published_config_imports_and_reads_back(tmp_path, published: Published):
    path = published.write(tmp_path)
    config, remarks = import_config(path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(config, remarks, path))
    assert load_config(recipe) == config
    assert all(f"# - {remark}\n" in recipe.read_text() for remark in remarks)
    parts = 12 if "gradient_acc" in published.more else 1
    assert config.train.global_batch == published.batch_size * published.gpus * parts
    assert config.train.accumulate == parts
    assert config.head.sample_rate == published.sample_rate
    assert (config.head.margin, config.head.margin_size) == (
        ("cosface", 0.4) if published.margin == COS else ("arcface", 0.5)
    )
    assert config.head.gradient == "straight-through"
    assert config.head.filter_above == (0.4 if "filtering" in published.more else None)
    assert config.optimizer.name == config.head.optimizer == published.optimizer
    assert config.optimizer.weight_decay == config.head.weight_decay == published.weight_decay
    assert (config.train.evaluate_epochs > 0) == published.val_targets
    if published.name == "3millions":
        assert config.data.path == "synthetic:300000x100000"


def insightface_curve(lr: float, warmup_steps: int, num_steps: int) -> list[float]:
    """The rates that today's train_v2.py steps with: its scheduler multiplies the last rate by a quotient each time."""
    rates = [lr]
    for step in range(1, num_steps):
        if step <= warmup_steps:
            rates.append(lr * step / warmup_steps)
        else:
            span = num_steps - warmup_steps
            quotient = (1 - (step - warmup_steps) / span) / (1 - (step - 1 - warmup_steps) / span)
            rates.append(rates[-1] * quotient)
    return rates


def older_curve(lr: float, warmup_steps: int, num_steps: int) -> list[float]:
    """The rates of the scheduler before it, as a function of its own count of steps."""
    return [
        lr * step / warmup_steps if step < warmup_steps else lr * ((num_steps - step) / (num_steps - warmup_steps)) ** 2
        for step in range(num_steps)
    ]


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.name)
def test_the_learning_rate_is_that_of_insightface_at_20_points(tmp_path, published: Published, power: int):
    config, _ = import_config(published.write(tmp_path), lr_power=power)
    # Fewer steps per epoch than in truth, which only makes the comparison coarser.
    steps_per_epoch = 50
    num_steps, warmup_steps = published.num_epoch * steps_per_epoch, published.warmup * steps_per_epoch
    curve = (insightface_curve if power == 1 else older_curve)(published.lr, warmup_steps, num_steps)
    # Step 0 apart: today's scheduler leaves it at the full rate whatever the warm-up, ours begins the warm-up.
    for step in torch.linspace(1, num_steps - 1, 20).long().tolist():
        found = learning_rate(config.optimizer, step, num_steps, steps_per_epoch)
        # In the warm-up ours is one step ahead, so no step has rate 0.
        ahead = published.lr / warmup_steps if 0 <= step < warmup_steps else 0.0
        assert found == pytest.approx(curve[step] + ahead, rel=1e-9), step


def test_the_mean_learning_rate_is_half_the_highest_one_and_a_third_with_power_2(tmp_path):
    for power, mean in ((1, 0.05), (2, 0.1 / 3)):
        config, _ = imported(tmp_path, lr_power=power)
        rates = [learning_rate(config.optimizer, step, 1000, 50) for step in range(1000)]
        assert sum(rates) / 1000 == pytest.approx(mean, rel=2e-3)


def test_negative_warm_up_is_none_today_and_a_later_start_before(tmp_path):
    config, remarks = imported(tmp_path, "config.warmup_epoch = -1")
    assert (config.optimizer.lr, config.optimizer.warmup_epochs) == (0.1, 0.0)
    assert "warmup_epoch = -1 means no warm-up" in remarks
    config, remarks = imported(tmp_path, "config.warmup_epoch = -1", lr_power=2)
    assert config.optimizer.lr == pytest.approx(0.1 * (20 / 21) ** 2)
    assert "starts as if 1 epochs had passed" in remarks


@pytest.mark.parametrize(
    ("name", "batch", "gpus", "remark"),
    [
        ("wf42m_pfc02_8gpus_r50_bs4k", 512, 8, "says 8 GPUs"),
        ("wf42m_pfc03_32gpu_r100", 128, 32, "32 GPUs are more than one machine has"),
        ("ms1mv3_r50_onegpu", 128, 1, "says 1 GPUs"),
        ("glint360k_mobileface_bs4k", 512, 8, "says 8 GPUs"),
        ("wf42m_16gpus_bs8k", 128, 16, "says a batch of 8192, but batch_size 128 on 16 GPUs is 2048"),
        ("ms1mv3_r50", 128, 8, "does not say how many GPUs"),
        ("r50_0gpu", 128, 8, "does not say how many GPUs"),
    ],
)
def test_the_name_of_the_file_hints_at_the_number_of_gpus(tmp_path, name, batch, gpus, remark):
    config, remarks = imported(tmp_path, f"config.batch_size = {batch}", name=name, num_gpus=None)
    assert config.train.global_batch == batch * gpus
    assert config.train.nproc == min(gpus, 8)
    assert remark in remarks


def test_the_number_given_wins_over_that_in_the_name(tmp_path):
    config, remarks = imported(tmp_path, name="wf42m_32gpu_r50", num_gpus=4)
    assert config.train.global_batch == 512
    assert "says 32 GPUs: but --gpus is 4" in remarks


@pytest.mark.parametrize(
    ("network", "name", "drop_path", "mask", "recomputes"),
    [
        ("r2060", "iresnet2060", 0.0, 0.0, True),
        ("vit_t", "vit_t", 0.1, 0.1, False),
        ("vit_t_dp005_mask0", "vit_t", 0.05, 0.0, False),
        ("vit_s_dp005_mask_0", "vit_s", 0.05, 0.0, False),
        ("vit_b_dp005_mask_005", "vit_b", 0.05, 0.1, True),
        ("vit_l_dp005_mask_005", "vit_l", 0.05, 0.1, True),
        ("vit_h", "vit_h", 0.1, 0.0, True),
    ],
)
def test_networks_train_with_what_insightface_drops_and_masks(tmp_path, network, name, drop_path, mask, recomputes):
    config, remarks = imported(tmp_path, f"config.network = {network!r}")
    backbone = config.backbone
    assert (backbone.name, backbone.drop_path, backbone.mask_patches) == (name, drop_path, mask)
    assert backbone.checkpoint_activations == recomputes
    assert ("suggests 5 % masked patches, but InsightFace's code masks 10 %" in remarks) == network.endswith("mask_005")


# iresnet2060, which takes a while, is built by the tests of the backbones.
@pytest.mark.parametrize("network", sorted({one.network for one in PUBLISHED} - {"r2060"}))
def test_the_backbone_of_every_published_config_is_built_and_gives_embeddings_in_training(tmp_path, network):
    config, _ = imported(tmp_path, f"config.network = {network!r}")
    settings = config.backbone
    # Shapes without memory: vit_h has 750 million parameters.
    with torch.device("meta"):
        backbone = build_backbone(settings.name, embedding_dim=settings.embedding_dim, image_size=112).train()
        if settings.drop_path:
            assert isinstance(backbone, VisionTransformer)
            backbone.regularise(settings.drop_path, settings.mask_patches)
        # The other families as they are built here are called by tests/megaclass/backbones/test_backbones.py.
        if isinstance(backbone, VisionTransformer):
            assert backbone(torch.empty(2, 3, 112, 112)).shape == (2, 512)


def test_accumulated_batches_count_as_one_and_one_optimizer_moves_both(tmp_path):
    config, remarks = imported(tmp_path, "config.gradient_acc = 4\nconfig.optimizer = 'adamw'")
    assert (config.optimizer.name, config.head.optimizer) == ("adamw", "adamw")
    assert (config.train.global_batch, config.train.accumulate) == (4096, 4)
    assert "gradient_acc = 4 became train.accumulate" in remarks


def test_empty_val_targets_evaluate_nothing_during_training(tmp_path):
    config, remarks = imported(tmp_path, "config.val_targets = []")
    assert (config.train.evaluate_epochs, config.train.evaluate_sets) == (0.0, ())
    assert "val_targets is empty" in remarks


def test_dalis_augmentation_becomes_ours_where_dali_reads_the_images(tmp_path):
    config, remarks = imported(tmp_path, "config.dali = True\nconfig.dali_aug = True")
    assert config.data.augment == "low_resolution:0.1,blur:0.2,colour:0.2,grey:0.1"
    assert "differ from DALI's in detail" in remarks
    config, remarks = imported(tmp_path, "config.dali_aug = True")
    assert config.data.augment == ""
    assert "InsightFace reads it only if dali is True" in remarks


def test_margins_are_those_that_insightfaces_loss_makes_of_the_three_numbers(tmp_path):
    config, remarks = imported(tmp_path, "config.margin_list = (1.2, 0.4, 0.1)")
    assert (config.head.margin, config.head.margin_size) == ("cosface", 0.1)
    assert "ignores m1 and m2 if m3 is above 0" in remarks
    config, _ = imported(tmp_path, "config.margin_list = (1.0, 0.0, 0.4)")
    assert (config.head.margin, config.head.margin_size) == ("cosface", 0.4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.margin_list = (1.35, 0.0, 0.0)", "InsightFace's loss raises an error for these"),
        ("config.margin_list = 3", "expected three numbers"),
        ("config.margin_list = (1.0, 'a', 0.0)", "expected three numbers"),
        ("config.loss = 'cosface'", "and give config.margin_list: .* for cosface"),
        ("config.sample_rate = 3.0", r"head\.sample_rate is 3\.0"),
        ("config.optimizer = 'lion'", "expected sgd or adamw"),
        ("config.gradient_acc = 0.5", "expected a whole number of at least 1"),
        ("config.batch_size = 'many'", "expected a whole number of at least 1"),
        ("config.lr = None", "expected a number"),
        ("config.lr = -0.1", r"optimizer\.lr is -0\.1"),
        ("config.verbose = 0", "expected a whole number of at least 1"),
        ("config.network = 'transface_vit_b'", "unknown network; known networks are r18, "),
        ("config.network = 50", "expected text"),
        ("config.val_targets = 'lfw'", "expected a list of names"),
        (
            "config.lr_func = 'step'",
            "Delete the line from a copy of the file, and set optimizer.schedule = 'step'",
        ),
        ("config.decay_epoch = [10, 16]", "the setting belongs to older InsightFace code"),
        ("config.dpap_prob = 0.2", "dpap_prob is not a known setting of InsightFace's train_v2.py"),
        ("config.rec = 'synthetic'\ndel config.num_classes", "expected config = edict"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_with_the_line(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        imported(tmp_path, line)
    assert "\n" not in str(caught.value)
    # Ranges are checked by the settings, which do not know the line.
    is_range = "\\." in message
    place = "" if is_range else f", line {MS1MV3_R50.count(chr(10)) + 1 + line.count(chr(10))}"
    assert str(caught.value).startswith(f"{tmp_path / 'config.py'}{place}: ")


def test_settings_without_an_effect_are_named(tmp_path):
    _, remarks = imported(tmp_path, "config.save_all_states = True")
    assert "save_all_states was not carried over" in remarks
    assert "not carried over, because switched off: resume, dali" in remarks


def test_the_project_in_weights_and_biases_is_carried_over(tmp_path):
    more = "config.using_wandb = True\nconfig.wandb_key = 'KEY'\nconfig.wandb_project = 'faces'\n"
    config, remarks = imported(tmp_path, more + "config.wandb_entity = 'team'\nconfig.notes = 'first try'")
    assert config.train.wandb_project == "faces"
    assert "wandb_key was not carried over: log in with `wandb login`" in remarks and "KEY" not in remarks
    assert "wandb_entity was not carried over: set the variable WANDB_ENTITY" in remarks
    assert "notes was not carried over: set the variable WANDB_NOTES" in remarks
    config, remarks = imported(tmp_path, "config.using_wandb = True")
    assert config.train.wandb_project == "project" and "using_wandb became train.wandb_project" in remarks
    config, remarks = imported(tmp_path, "config.using_wandb = False\nconfig.wandb_project = 'faces'")
    assert config.train.wandb_project == ""
    assert "using_wandb is not True: Weights & Biases is switched off" in remarks


@pytest.mark.parametrize(
    ("recipe", "name", "sample_rate"),
    [
        ("ms1mv3-r50-arcface", "ms1mv3_r50", 1.0),
        ("glint360k-r100-cosface-pfc01", "glint360k_r100", 0.1),
        ("webface42m-r100-pfc02", "wf42m_pfc02_r100", 0.2),
    ],
)
def test_the_recipes_train_as_the_configs_they_name(tmp_path, recipe, name, sample_rate):
    path = Path(__file__).parents[3] / "recipes" / f"{recipe}.toml"
    shipped, text = load_config(path), path.read_text()
    theirs, _ = import_config(next(one for one in PUBLISHED if one.name == name).write(tmp_path))
    assert f"InsightFace's {name}.py" in text and "today's" in text and "optimizer.power=2" in text
    assert shipped.backbone == theirs.backbone
    assert shipped.optimizer == theirs.optimizer
    gradient = theirs.head.gradient if shipped.head.margin == "arcface" else shipped.head.gradient
    assert shipped.head == replace(theirs.head, sample_rate=sample_rate, gradient=gradient, sample_positives=False)
    assert shipped.train.global_batch == theirs.train.global_batch
    assert shipped.train.epochs == theirs.train.epochs


def test_every_line_is_carried_over_or_named(tmp_path):
    carried = {
        "margin_list",
        "network",
        "output",
        "embedding_size",
        "sample_rate",
        "momentum",
        "weight_decay",
        "batch_size",
    }
    carried |= {"lr", "rec", "num_epoch", "warmup_epoch", "val_targets"}
    _, remarks = imported(tmp_path)
    names = re.findall(r"(?m)^config\.(\w+)", MS1MV3_R50)
    assert [name for name in names if name not in carried and not re.search(rf"\b{name}\b", remarks)] == []


def test_curves_of_these_tests_are_insightfaces():
    rates = insightface_curve(0.1, 0, 100)
    assert rates[50] == pytest.approx(0.05)
    # A negative warm-up cancels out of the quotients.
    assert insightface_curve(0.1, -10, 100) == pytest.approx(rates)
    assert math.isclose(older_curve(0.1, -10, 100)[0], 0.1 * (100 / 110) ** 2)


def test_every_network_of_insightface_is_a_backbone_and_every_backbone_but_slim_has_a_name():
    from megaclass.backbones import BACKBONES, OF_FEATURES
    from megaclass.insightface.names import INSIGHTFACE_NAMES, NETWORKS

    assert set(INSIGHTFACE_NAMES) == set(BACKBONES) - {"slim", *OF_FEATURES}
    assert {NETWORKS[name].name for name in INSIGHTFACE_NAMES.values()} == set(INSIGHTFACE_NAMES)
    assert INSIGHTFACE_NAMES["iresnet100"] == "r100"
    assert INSIGHTFACE_NAMES["vit_l"] == "vit_l_dp005_mask_005", (
        "the only name under which InsightFace builds this size"
    )


def test_the_step_function_of_older_configs_is_a_remark(tmp_path):
    more = "def lr_step_func(epoch):\n    return 0.1 ** len([m for m in [8, 14] if m - 1 <= epoch])\n"
    config, remarks = imported(tmp_path, more + "config.lr_func = lr_step_func")
    assert config.optimizer.schedule == "polynomial"
    assert f"lr_step_func in line {MS1MV3_R50.count(chr(10)) + 1} was not carried over" in remarks
