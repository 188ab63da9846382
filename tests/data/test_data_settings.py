"""The settings `data.*` as a run uses them."""

import pytest

from megaclass.cli import main
from megaclass.config import DataConfig
from megaclass.data.source import open_source
from megaclass.errors import ConfigError


def test_a_run_takes_any_source_with_every_setting(tmp_path, capfd):
    source = open_source("debug")
    for number in range(32):
        identity = tmp_path / "faces" / f"{number % 8}"
        identity.mkdir(parents=True, exist_ok=True)
        (identity / f"{number}.jpg").write_bytes(source.read(number))
    (tmp_path / "faces" / "3" / "bad.jpg").write_bytes(b"damaged")
    settings = [
        f"data.path={tmp_path / 'faces'}",
        f"data.stage={tmp_path / 'ram'}",
        "data.augment=crop:1,low_resolution,blur,colour,grey,occlusion,jpeg",
        "data.order=classes",
        "data.images_per_class=2",
        "data.max_bad_fraction=0.5",
        "data.threads=2",
        "synth.identities=0",
        "train.global_batch=8",
        "train.epochs=3",
        "train.nproc=1",
        f"train.run_dir={tmp_path / 'run'}",
        "backbone.embedding_dim=8",
        "export.onnx=false",
    ]
    assert main(["train", "recipes/demo.toml", *settings]) == 0
    said = capfd.readouterr().err
    assert f"one folder an identity at {tmp_path / 'ram' / '0'}: 33 images of 8 classes, 112 × 112" in said
    assert "skipped a bad image" in said and "3/bad.jpg" in said
    assert "images could not be read and were replaced, 1 different ones" in said


@pytest.mark.parametrize(
    "settings",
    [
        {"images_per_class": 4},
        {"images_per_class": 0},
        {"keep_last": True, "order": "classes"},
        {"max_bad_fraction": 1.5},
        {"threads": 0},
        {"path": ""},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ConfigError, match=r"data\.\w+ is "):
        DataConfig(**{"path": "x", **settings})
