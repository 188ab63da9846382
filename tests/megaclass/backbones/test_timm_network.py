"""Networks of timm as backbones, randomly initialised: train, resume, export, load, and start with weights of a file."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tests.commands import ended_in_this_process
from tests.timm_here import NEEDS_TIMM, import_timm
from torch import nn

import megaclass
from megaclass.backbones import build_backbone, own_size
from megaclass.backbones.configured import layer_depths
from megaclass.config.read import load_config
from megaclass.errors import CheckpointError
from megaclass.training.model.build import _parameter_groups
from megaclass_launch.errors import ConfigError

pytestmark = NEEDS_TIMM


@pytest.fixture(autouse=True, scope="module")
def _imported():
    import_timm()


@pytest.fixture
def photos(tmp_path):
    for label in range(4):
        (tmp_path / f"photos/{label}").mkdir(parents=True)
        base = np.random.default_rng(label).integers(0, 255, (4, 6, 3))
        for number in range(4):
            noise = np.random.default_rng([label, number]).integers(-20, 20, (32, 48, 3))
            pixels = (np.kron(base, np.ones((8, 8, 1))) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"photos/{label}/{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    return tmp_path / "recipe.toml"


def train(photos, run, *more):
    settings = [
        f"data.path={photos}",
        f"train.run_dir={run}",
        "train.nproc=1",
        "train.global_batch=8",
        "train.device=cpu",
    ]
    settings += ["train.precision=float32", "train.epochs=2", "backbone.embedding_dim=16", "export.onnx=false", *more]
    (photos.parent / "recipe.toml").write_text("")
    ended = ended_in_this_process(["train", str(photos.parent / "recipe.toml"), *settings])
    assert ended.returncode == 0, ended.stderr
    return run


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_pixels_arrive_as_the_network_expects_them(name):
    torch.manual_seed(0)
    backbone = build_backbone(f"timm/{name}", embedding_dim=16, image_size=(64, 96)).eval()
    pixels = torch.rand(3, 3, 64, 96)
    facts = backbone.body.pretrained_cfg
    mean, std = (torch.tensor(facts[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        want = backbone.feature(backbone.body((pixels - mean) / std))
        assert torch.allclose(backbone(pixels * 2 - 1), want, atol=1e-5)
    assert want.shape == (3, 16)


def test_the_size_is_that_of_the_network_unless_it_is_set(tmp_path, photos):
    assert own_size("timm/test_vit") == 160 and own_size("iresnet18") is None
    run = train(photos, tmp_path / "run", "backbone.name=timm/test_resnet", "train.epochs=0.5")
    assert json.loads((run / "summary.json").read_text())["image_size"] == 160
    assert megaclass.load(run, device="cpu").image_size == 160


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_train_resume_evaluate_export_load_and_plan(tmp_path, photos, name):
    settings = [f"backbone.name=timm/{name}", "data.size=[32,48]"]
    whole = train(photos, tmp_path / "whole", *settings)
    half = train(photos, tmp_path / "half", *settings, "train.epochs=1")
    # Behind all other rows: the schedule of the second epoch is that of the whole run.
    train(photos, half, *settings, "--resume")
    images = sorted(photos.rglob("*.png"))
    model = megaclass.load(whole, device="cpu")
    assert model.backbone == f"timm/{name}" and model.image_size == (32, 48)
    wanted = model.embed(images)
    assert megaclass.load(half, device="cpu").embed(images).shape == wanted.shape == (16, 16)
    for form in ("safetensors", "onnx"):
        out = tmp_path / form
        ended = ended_in_this_process(["export", str(whole), "--to", form, "--out", str(out)])
        assert ended.returncode == 0, ended.stderr
        assert megaclass.load(out, device="cpu").embed(images) == pytest.approx(wanted, abs=1e-4)
    ended = ended_in_this_process(["evaluate", str(whole), "--classify", str(photos), "--device", "cpu"])
    assert ended.returncode == 0, ended.stderr
    planned = ["plan", "demo", f"backbone.name=timm/{name}", "--classes", "100", "--images", "1000", "--json"]
    ended = ended_in_this_process(planned)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["backbone"] == f"timm/{name}"


@pytest.mark.ranks
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path, photos):
    settings = ["backbone.name=timm/test_vit", "data.size=32", "optimizer.layer_decay=0.7", "optimizer.name=adamw"]
    settings += ["optimizer.schedule=cosine", "optimizer.decay_vectors=false", "train.keep_checkpoints=9"]
    whole = train(photos, tmp_path / "whole", *settings)
    _, last = sorted((whole / "checkpoints").glob("step-*"))
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / last.name)
    train(photos, again, *settings, "--resume")
    one, other = (megaclass.load(run, device="cpu").network.state_dict() for run in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.ranks
def test_a_run_starts_with_weights_of_a_file_at_another_size_and_the_card_says_so(tmp_path, photos):
    torch.manual_seed(5)
    import timm

    source = timm.create_model("test_vit", pretrained=False, num_classes=7)
    torch.save(source.state_dict(), tmp_path / "own.pth")
    run = train(
        photos,
        tmp_path / "run",
        "backbone.name=timm/test_vit",
        f"backbone.pretrained={tmp_path / 'own.pth'}",
        "data.size=[32,48]",
        "optimizer.lr=1e-30",
        "optimizer.weight_decay=0",
    )
    body = megaclass.load(run, device="cpu").network.body.state_dict()
    for name, weight in source.state_dict().items():
        if name.startswith("blocks"):
            assert torch.allclose(body[name], weight, atol=1e-20), name
    assert body["pos_embed"].shape != source.pos_embed.shape, "position embeddings are resampled"
    out = tmp_path / "out"
    ended_in_this_process(["export", str(run), "--to", "safetensors", "--out", str(out)])
    assert (
        "Training started with the weights own.pth for timm/test_vit, licence not known"
        in (out / "README.md").read_text()
    )


def test_a_file_of_another_network_is_refused(tmp_path):
    backbone = build_backbone("timm/test_vit", embedding_dim=16, image_size=32)
    torch.save({"other.weight": torch.zeros(3, 3)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"other\.pth does not hold the weights of timm/test_vit: \d+ tensors"):
        backbone.load_pretrained_(str(tmp_path / "other.pth"))
    with pytest.raises(CheckpointError, match=r'expected "hub", or a \.safetensors or \.pth file'):
        backbone.load_pretrained_("nowhere.pth")
    (tmp_path / "broken.pth").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="Cannot load pretrained weights"):
        backbone.load_pretrained_(str(tmp_path / "broken.pth"))


def test_what_timm_does_not_have_is_named():
    with pytest.raises(ConfigError, match="did you mean timm/test_vit"):
        build_backbone("timm/test_vitt", embedding_dim=16, image_size=32)


def test_pretrained_weights_belong_to_networks_of_timm(recipe):
    with pytest.raises(
        ConfigError, match=r"backbone\.pretrained is hub; it must be empty unless backbone\.name is timm/NAME"
    ):
        load_config(recipe, ["data.path=x", "train.run_dir=y", "backbone.pretrained=hub"])


# ---- learning rates by depth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "block", "depth", "last"),
    [
        ("timm/test_vit", "body.patch_embed.proj.weight", "body.blocks.2.attn.qkv.weight", 3, 7),
        ("timm/test_resnet", "body.conv1.0.weight", "body.layer2.0.conv1.weight", 2, 5),
        ("vit_t", "patch_embed.proj.weight", "blocks.2.attn.qkv.weight", 3, 13),
        ("iresnet18", "conv1.weight", "layer3.0.conv1.weight", 3, 5),
    ],
)
def test_depths_follow_the_blocks(name, first, block, depth, last):
    backbone = build_backbone(name, embedding_dim=16, image_size=32 if "timm" in name else 112)
    depths = layer_depths(backbone)
    assert set(depths) == {name for name, _ in backbone.named_parameters()}
    assert depths[first] == 0 and depths[block] == depth and max(depths.values()) == last
    assert {depths[name] for name in depths if name.startswith(("feature", "fc"))} == {last}


def test_groups_have_the_rates_and_decays_of_their_layers(recipe):
    config = load_config(
        recipe,
        [
            "data.path=x",
            "train.run_dir=y",
            "optimizer.layer_decay=0.5",
            "optimizer.decay_vectors=false",
            "optimizer.lr=0.4",
        ],
    ).optimizer
    backbone = build_backbone("timm/test_vit", embedding_dim=16, image_size=32)
    names = {name for name, _ in backbone.named_parameters()}
    found = {name: group for group, members in _parameter_groups(config, backbone).items() for name in members}
    assert len(found) == len(names)
    assert found["feature.0.weight"] == (1.0, config.weight_decay)
    assert found["feature.1.bias"] == (1.0, 0.0)
    assert found["body.blocks.0.mlp.fc1.weight"] == (0.5**6, config.weight_decay)
    assert found["body.pos_embed"] == (0.5**7, 0.0)


def test_a_network_without_blocks_cannot_decay_by_layer():
    with pytest.raises(ConfigError, match="has neither blocks, stages nor layer1"):
        layer_depths(nn.Sequential(nn.Linear(2, 2)))
