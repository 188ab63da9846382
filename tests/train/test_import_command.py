"""`megaclass import-config`: one of InsightFace's configs on the command line, a recipe out of it."""

import pytest

from megaclass.cli import main
from megaclass.config import load_config

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
    assert "val_targets was left out: see the *.bin files" in shown.err


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


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["import-config", str(tmp_path / "nothing.py")]) == 2
    assert "nothing.py: No such file" in capsys.readouterr().err
