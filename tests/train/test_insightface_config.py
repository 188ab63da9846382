import pytest

from megaclass.config import load_config, to_toml
from megaclass.errors import ConfigError
from megaclass.train.insightface_config import import_config

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


def test_a_published_config_becomes_a_recipe_with_the_same_settings(tmp_path):
    path = tmp_path / "ms1mv3_r50.py"
    path.write_text(MS1MV3_R50)
    config, remarks = import_config(path, num_gpus=8)
    assert config.backbone.name == "iresnet50"
    assert config.backbone.embedding_dim == 512
    assert (config.head.margin, config.head.margin_size, config.head.sample_rate) == ("arcface", 0.5, 1.0)
    assert (config.train.global_batch, config.train.epochs, config.train.nproc) == (1024, 20.0, 8)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (0.1, 5e-4)
    assert config.data.path == "/train_tmp/ms1m-retinaface-t1"
    assert "val_targets was left out: see the *.bin files beside the data, all of which are evaluated on" in remarks
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config))
    assert load_config(recipe) == config


def test_the_file_is_read_not_run(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(MS1MV3_R50 + "\nopen('was-here', 'w')\nconfig.lr = 0.1 * 4\n")
    with pytest.raises(ConfigError, match=r"lr = 0\.1 \* 4 is computed"):
        import_config(path, num_gpus=8)
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.margin_list = (1.2, 0.4, 0.1)", "combines margins"),
        ("config.margin_list = 3", "expected three numbers"),
        ("config.sample_rate = 3.0", r"head\.sample_rate is 3\.0"),
        ("config.optimizer = 'lion'", "expected sgd or adamw"),
        ("config.gradient_acc = 0.5", "expected a whole number"),
    ],
)
def test_what_cannot_be_said_in_a_recipe_is_refused(tmp_path, line, message):
    path = tmp_path / "config.py"
    path.write_text(MS1MV3_R50 + line + "\n")
    with pytest.raises(ConfigError, match=message):
        import_config(path, num_gpus=8)


def test_one_optimizer_moves_both_and_accumulated_batches_count_as_one(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("config.gradient_acc = 4\nconfig.optimizer = 'adamw'\n" + MS1MV3_R50.replace("edict()", "0"))
    config, remarks = import_config(path, num_gpus=8)
    assert (config.optimizer.name, config.head.optimizer) == ("adamw", "adamw")
    assert (config.train.global_batch, config.train.accumulate) == (4096, 4)
    assert any("gradient_acc = 4 became train.accumulate" in remark for remark in remarks)


def test_unknown_lines_are_remarked_on_not_dropped_in_silence(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(MS1MV3_R50 + "config.gradient_acc = 1\nconfig.novelty = 'x'\n")
    _, remarks = import_config(path, num_gpus=8)
    assert any("novelty = 'x'" in remark for remark in remarks)


def test_a_file_without_a_config_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="holds no lines like"):
        import_config(path, num_gpus=8)
