"""LoRA by peft on a transformer: what is trained, what is exported, and where it is refused."""

import numpy as np
import pytest
import torch
from PIL import Image
from tests.commands import ended_in_this_process
from tests.timm_here import NEEDS_TIMM, import_timm

import megaclass
from megaclass.backbones.configured import configured_layers, freeze
from megaclass.backbones.lora import merged_weights, without_lora, wrapped_weights
from megaclass.config.schema import BackboneConfig
from megaclass_launch.errors import ConfigError

pytestmark = NEEDS_TIMM


@pytest.fixture(autouse=True, scope="module")
def _imported():
    import_timm()


def network(name="timm/test_vit", **settings):
    config = BackboneConfig(name=name, embedding_dim=16, **settings)
    backbone = configured_layers(config, 32)
    freeze(backbone, config)
    return backbone


@pytest.mark.parametrize("name", ["timm/test_vit", "vit_t"])
def test_the_adapters_and_what_is_behind_the_blocks_are_trained(name):
    backbone = network(name, lora=4)
    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    adapters = {name for name in trained if ".lora_" in name}
    prefix = "body." if name.startswith("timm") else ""
    assert f"{prefix}blocks.0.attn.qkv.lora_A.default.weight" in adapters
    assert f"{prefix}blocks.1.mlp.fc2.lora_B.default.weight" in adapters
    assert {name.split(".")[0] for name in trained - adapters} <= {"feature", "norm", "body"}
    assert "feature.0.weight" in trained
    assert not any(".blocks." in f".{name}" for name in trained - adapters)


def test_at_first_it_is_the_plain_network_and_later_the_merged_one():
    torch.manual_seed(0)
    backbone = network(lora=4).eval()
    images = torch.randn(3, 3, 32, 32)
    plain = network().eval()
    plain.load_state_dict(merged_weights(backbone.state_dict()))
    with torch.no_grad():
        assert torch.allclose(plain(images), backbone(images), atol=1e-5)
        for name, parameter in backbone.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
        changed = backbone(images)
        assert not torch.allclose(plain(images), changed, atol=1e-2)
        assert torch.allclose(without_lora(backbone)(images), changed, atol=1e-4)
    assert set(without_lora(backbone).state_dict()) == set(plain.state_dict())


def test_plain_weights_go_under_the_adapters():
    backbone, plain = network(lora=4), network()
    state = wrapped_weights(plain.state_dict(), backbone.state_dict())
    backbone.load_state_dict(state)
    merged = merged_weights(backbone.state_dict())
    assert all(torch.equal(merged[name], weight) for name, weight in plain.state_dict().items())


def test_a_network_without_lora_is_left_alone():
    plain = network()
    assert without_lora(plain) is plain
    assert merged_weights(plain.state_dict()).keys() == plain.state_dict().keys()


def test_what_has_no_linear_layers_in_blocks_is_refused():
    with pytest.raises(ConfigError, match=r"backbone\.lora is 4, but IResNet has no linear layers in `blocks`"):
        network("iresnet18", lora=4)


@pytest.mark.ranks
def test_a_run_starts_with_plain_weights_resumes_and_exports_a_plain_network(tmp_path):
    for label in range(4):
        (tmp_path / f"photos/{label}").mkdir(parents=True)
        for number in range(4):
            pixels = np.random.default_rng([label, number]).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"photos/{label}/{number}.png")
    (tmp_path / "recipe.toml").write_text("")

    def train(run, *more):
        settings = [f"data.path={tmp_path / 'photos'}", f"train.run_dir={tmp_path / run}", "train.nproc=1"]
        settings += ["train.global_batch=8", "train.device=cpu", "backbone.embedding_dim=16", "data.size=32"]
        settings += ["backbone.name=timm/test_vit", "optimizer.name=adamw", "optimizer.lr=0.01", "export.onnx=false"]
        ended = ended_in_this_process(["train", str(tmp_path / "recipe.toml"), *settings, *more])
        assert ended.returncode == 0, ended.stderr
        return tmp_path / run

    images = sorted((tmp_path / "photos").rglob("*.png"))
    plain = train("plain", "train.epochs=1")
    lora = [f"train.init_backbone={plain}", "backbone.lora=2", "train.ema=0.5"]
    tuned = train("tuned", *lora, "train.epochs=2", "train.keep_checkpoints=9")
    before, after = (megaclass.load(run, device="cpu") for run in (plain, tuned))
    assert after.network.state_dict().keys() == before.network.state_dict().keys()
    assert torch.equal(after.network.body.blocks[0].norm1.weight, before.network.body.blocks[0].norm1.weight)
    qkv = [model.network.body.blocks[0].attn.qkv.weight for model in (before, after)]
    assert torch.linalg.matrix_rank(qkv[1] - qkv[0]) == 2
    # The exported file and the checkpoint give the same model.
    wanted = after.embed(images)
    assert megaclass.load(tuned / "model.safetensors", device="cpu").embed(images) == pytest.approx(wanted, abs=1e-5)
    # Resumed from the first epoch, and as the start of another run.
    _, last = sorted((tuned / "checkpoints").glob("step-*"))
    last.rename(tmp_path / "last")
    train("tuned", *lora, "train.epochs=2", "--resume")
    assert megaclass.load(tuned, device="cpu").embed(images) == pytest.approx(wanted, abs=1e-5)
    again = train("again", f"train.init_backbone={tuned}", "train.epochs=0.5", "optimizer.lr=1e-30")
    assert torch.allclose(megaclass.load(again, device="cpu").network.body.blocks[0].attn.qkv.weight, qkv[1], atol=1e-6)
    planned = ["plan", "demo", "backbone.name=timm/test_vit", "backbone.lora=2", "--classes", "9", "--images", "99"]
    ended = ended_in_this_process([*planned, "--json"])
    assert ended.returncode == 0, ended.stderr
