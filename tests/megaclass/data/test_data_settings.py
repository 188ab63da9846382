"""The settings `data.*` as a run uses them."""

import io
import json
import re

import pytest
from PIL import Image

from megaclass.cli.main import main
from megaclass.config.read import load_config, to_toml
from megaclass.config.schema import DataConfig
from megaclass.data.sources.open_source import open_source
from megaclass.inference import ImageTreatment, load
from megaclass_launch.errors import ConfigError


@pytest.mark.ranks
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
    (copy,) = (tmp_path / "ram").glob("*/*/0")
    assert f"one folder per identity at {copy}: 33 images of 8 classes, 112 × 112" in said
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
        {"size": 4},
        {"size": (112, 5000)},
        {"size": -1},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ConfigError, match=r"data\.\w+ is "):
        DataConfig(**{"path": "x", **settings})


@pytest.mark.parametrize(
    ("text", "size"), [("112", 112), ("[112, 96]", (112, 96)), ("0", 0)], ids=["square", "rectangle", "as the data"]
)
def test_a_size_is_one_number_or_two_and_survives_the_file(tmp_path, text, size):
    (tmp_path / "a.toml").write_text('[data]\npath = "x"\n[train]\nrun_dir = "y"\n')
    config = load_config(tmp_path / "a.toml", [f"data.size={text}", "data.fit=pad"])
    assert config.data.size == size
    (tmp_path / "b.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "b.toml") == config


def test_a_size_that_is_none_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('[data]\npath = "x"\n[train]\nrun_dir = "y"\n')
    with pytest.raises(ConfigError, match=r"data\.size is 'big'; expected a whole number or a list like \[112, 96\]"):
        load_config(tmp_path / "a.toml", ["data.size=big"])


@pytest.fixture
def mixed(tmp_path):
    """Faces of two sizes, one of them no square, and a .bin of them."""
    source = open_source("debug")
    for number in range(32):
        identity = tmp_path / "faces" / f"{number % 8}"
        identity.mkdir(parents=True, exist_ok=True)
        image = Image.open(io.BytesIO(source.read(number)))
        image.resize((48, 32) if number % 4 == 3 else (32, 32)).save(identity / f"{number}.png")
    assert (
        main(["data", "pairs", str(tmp_path / "faces"), "--pairs", "20", "--out", str(tmp_path / "faces/a.bin")]) == 0
    )
    return tmp_path / "faces"


def train(folder, run, *settings):
    return main(
        [
            "train",
            "recipes/demo.toml",
            f"data.path={folder}",
            f"train.run_dir={run}",
            "synth.identities=0",
            "train.global_batch=8",
            "train.epochs=2",
            "train.nproc=1",
            "backbone.embedding_dim=8",
            "export.onnx=false",
            *settings,
        ]
    )


@pytest.mark.ranks
def test_a_run_on_rectangles_is_trained_resumed_evaluated_and_embedded_alike(mixed, tmp_path, capfd):
    run = tmp_path / "run"
    settings = ["data.size=[32, 48]", "data.fit=pad", "data.mirror=false"]
    assert train(mixed, run, *settings) == 0
    said = capfd.readouterr().err
    line = (
        "the model takes images of 48 × 32 (width × height) pixels, from data.size; 24 of all 32 images have another size "
        "and are fitted"
    )
    assert f"{line} (data.fit=pad), 24 of these get black borders." in said
    assert "48 of 64 images had another size and were fitted to 48 × 32 (data.fit = pad)" in said
    evaluated = json.loads((run / "evaluation.json").read_text())["sets"]["a"]
    assert evaluated.get("error") is None

    for path in (run, run / "model.safetensors"):
        model = load(path)
        assert (model.image_size, model.treatment) == ((32, 48), ImageTreatment(fit="pad", mirror=False))
    assert main(["evaluate", str(run), "--on", str(mixed / "a.bin"), "--device", "cpu", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["a"]["accuracy"] == evaluated["accuracy"]
    assert json.loads(printed.out)["a"]["xnorm"] == pytest.approx(evaluated["xnorm"], rel=1e-4)
    assert "images (from image 0 of" in printed.err and "had another size and were fitted to 48 × 32" in printed.err

    assert train(mixed, run, *settings, "train.epochs=3", "--resume") == 0
    assert train(mixed, run, *settings, "train.epochs=4", "data.fit=crop", "--resume") == 2
    assert "data.fit was pad, is crop" in capfd.readouterr().err

    assert main(["embed", str(run), str(mixed), "--out", str(tmp_path / "e.npy"), "--device", "cpu"]) == 0
    assert "32 × 8" in capfd.readouterr().out


@pytest.mark.ranks
def test_the_size_of_the_first_image_is_said_and_a_rectangle_must_be_asked_for(mixed, tmp_path, capfd):
    assert train(mixed, tmp_path / "run") == 0
    said = capfd.readouterr().err
    line = "the model takes images of 32 × 32 pixels, the size of the first image; data.size sets another; 8 of all "
    assert f"{line}32 images have another size and are fitted (data.fit=squash), 8 of these are distorted." in said
    (mixed / "0" / "0.png").write_bytes((mixed / "3" / "3.png").read_bytes())
    assert train(mixed, tmp_path / "other") == 2
    assert (
        "have 48 × 32 (width × height) pixels, which is not a square. Set the input size: data.size=112 with"
        in capfd.readouterr().err
    )
    Image.new("RGB", (41, 27)).save(mixed / "0" / "0.png")
    assert train(mixed, tmp_path / "other") == 2
    [proposed] = re.findall(r"or (data\.size=\S+), height first", capfd.readouterr().err)
    assert proposed == "data.size=[32,48]" and train(mixed, tmp_path / "other", proposed) == 0
