"""`megaclass import-config`: one of InsightFace's configs on the command line, a recipe out of it."""

import json

import pytest
from tests.commands import ended_in_this_process

from megaclass.cli.main import main
from megaclass.config.read import load_config

CONFIG = """
from easydict import EasyDict as edict
config = edict()
config.margin_list = (1.0, 0.0, 0.4)
config.network = "r100"
config.embedding_size = 512
config.sample_rate = 0.2
config.batch_size = 128
config.lr = 0.1
config.rec = "/data/webface42m"
config.num_epoch = 20
config.val_targets = ["lfw"]
"""


@pytest.fixture
def published(tmp_path):
    path = tmp_path / "wf42m_pfc02_r100.py"
    path.write_text(CONFIG)
    return path


def test_the_recipe_is_printed_and_remarks_stand_apart_from_it(published, tmp_path, capsys):
    assert main(["import-config", str(published), "--gpus", "4"]) == 0
    shown = capsys.readouterr()
    (tmp_path / "recipe.toml").write_text(shown.out)
    recipe = load_config(tmp_path / "recipe.toml")
    assert (recipe.backbone.name, recipe.head.margin, recipe.head.sample_rate) == ("iresnet100", "cosface", 0.2)
    assert (recipe.train.global_batch, recipe.train.nproc) == (512, 4)
    assert recipe.train.evaluate_sets == ("lfw",)
    assert (
        "megaclass: " in shown.err
        and "the learning rate decays with power 1, as in the current train_v2.py" in shown.err
    )
    assert "# - the learning rate decays with power 1, as in the current train_v2.py" in shown.out


def test_the_older_curve_is_given_by_an_option(published, tmp_path, capsys):
    assert main(["import-config", str(published), "--lr-power", "2"]) == 0
    shown = capsys.readouterr()
    (tmp_path / "recipe.toml").write_text(shown.out)
    assert load_config(tmp_path / "recipe.toml").optimizer.power == 2.0
    assert "# - the learning rate decays with power 2, as in InsightFace's earlier scheduler" in shown.out


def test_the_recipe_is_written_as_a_new_file_and_never_over_another(published, tmp_path, capsys):
    out = tmp_path / "recipe.toml"
    assert main(["import-config", str(published), "--out", str(out)]) == 0
    assert load_config(out).train.global_batch == 1024
    assert f"megaclass train {out}" in capsys.readouterr().err
    assert main(["import-config", str(published), "--out", str(out)]) == 2
    assert f"Cannot write the recipe {out}: File exists." in capsys.readouterr().err


@pytest.mark.parametrize("gpus", ["0", "-1", "4096"])
def test_an_impossible_number_of_gpus_is_refused(published, capsys, gpus):
    assert main(["import-config", str(published), "--gpus", gpus]) == 2
    assert "megaclass: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [b"config.lr = \xff", b"config.lr = 1\0", b"config.lr = (" * 3000, b"config.lr = " + b"+".join([b"1"] * 99999)],
)
def test_an_odd_file_is_one_line_on_the_screen(tmp_path, capsys, data):
    (tmp_path / "odd.py").write_bytes(data)
    assert main(["import-config", str(tmp_path / "odd.py")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1


@pytest.mark.parametrize("network", ["mbf", "vit_t"])
@pytest.mark.ranks
def test_an_imported_recipe_shows_its_settings_and_trains(published, tmp_path, capsys, network):
    published.write_text(CONFIG.replace("r100", network))
    recipe = tmp_path / "recipe.toml"
    assert main(["import-config", str(published), "--out", str(recipe)]) == 0
    assert main(["train", str(recipe), "--show-config"]) == 0
    assert f'name = "{load_config(recipe).backbone.name}"' in capsys.readouterr().out
    small = [
        "data.path=synthetic:40x16@32",
        "train.global_batch=8",
        "train.epochs=1",
        "train.nproc=1",
        "train.device=cpu",
        "train.evaluate_sets=[]",
    ]
    small += ["backbone.embedding_dim=32", "export.onnx=false", f"train.run_dir={tmp_path / 'run'}"]
    done = ended_in_this_process(["train", str(recipe), *small])
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["import-config", str(tmp_path / "nothing.py")]) == 2
    assert "nothing.py: No such file" in capsys.readouterr().err
