"""The recipes for data of the user's own: each trains, resumes, exports and loads, and the data chooses or proposes it."""

import shlex
from pathlib import Path

import pytest
from tests.commands import ended_in_this_process
from tests.megaclass.test_api import draw
from tests.timm_here import NEEDS_TIMM, import_timm

import megaclass
from megaclass.config.read import load_config
from megaclass.training import choose_recipe as chooser
from megaclass.training.choose_recipe import choose_recipe

# Small networks with random weights in place of those of the recipes.
NETWORKS = {
    "own-cpu": [],
    "own-small": ["backbone.name=iresnet18", "backbone.embedding_dim=16"],
    "own-large": ["backbone.name=slim"],
    "own-pretrained": ["backbone.name=timm/test_vit", "backbone.pretrained="],
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=NEEDS_TIMM if name == "own-pretrained" else ()) for name in NETWORKS]
)
def test_each_trains_resumes_exports_and_loads(tmp_path, recipe):
    if recipe == "own-pretrained":
        import_timm()
    draw(tmp_path / "photos", 4, 6)
    run = tmp_path / "run"
    given = [f"data.path={tmp_path / 'photos'}", f"train.run_dir={run}", "data.size=32", "train.global_batch=8"]
    given += ["train.device=cpu", "export.onnx=false", *NETWORKS[recipe]]
    for more in (["train.epochs=1"], ["train.epochs=2", "--resume"]):
        ended = ended_in_this_process(["train", recipe, *given, *more])
        assert ended.returncode == 0, ended.stderr
    photos = sorted((tmp_path / "photos").rglob("*.png"))
    found = megaclass.load(run, device="cpu").classify(photos)
    assert len(found) == 24
    ended = ended_in_this_process(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "out")])
    assert ended.returncode == 0, ended.stderr
    exported = megaclass.load(tmp_path / "out", device="cpu").classify(photos)
    assert [one.guesses[0].name for one in exported] == [one.guesses[0].name for one in found]


def test_few_images_propose_a_pretrained_network_if_timm_is_installed_and_download_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(Path("my photos"), 5, 6)
    monkeypatch.setattr(chooser, "find_spec", lambda name: None)
    assert "own-pretrained" not in choose_recipe("my photos").reason
    monkeypatch.setattr(chooser, "find_spec", lambda name: object())
    chosen = choose_recipe("my photos")
    assert chosen.path.stem == "own-cpu"
    words = shlex.split(chosen.reason.partition("fine-tunes it: ")[2])
    assert words[:3] == ["megaclass", "train", "own-pretrained"]
    config = load_config(Path(words[2]), words[3:])
    assert (config.data.path, config.train.run_dir) == ("my photos", "runs/my photos-pretrained")
    assert config.backbone.pretrained == "hub" and config.optimizer.layer_decay < 1
    assert "own-pretrained" not in choose_recipe("synthetic:600000").reason
