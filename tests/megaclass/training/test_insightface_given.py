"""Typed access to the settings of one of InsightFace's configs, and the number of GPUs that its name states."""

import pytest

from megaclass.insightface.import_config import ConfigFile, published_gpus, read_config_file
from megaclass_launch.errors import ConfigError


def given(tmp_path, *lines: str, name: str = "config") -> ConfigFile:
    path = tmp_path / f"{name}.py"
    path.write_text("\n".join(["config = edict()", *lines, ""]))
    return read_config_file(path)


def test_values_are_those_of_the_file_and_else_those_of_base_py(tmp_path):
    settings = given(tmp_path, "config.lr = 1", "config.fp16 = True", "config.batch_size = 64.0")
    assert (settings.number("lr"), settings.value("fp16"), settings.integer("batch_size")) == (1.0, True, 64)
    assert (settings.text("network"), settings.number("momentum"), settings.value("dali_aug")) == ("r50", 0.9, None)
    assert "lr" in settings.lines and "momentum" not in settings.lines


@pytest.mark.parametrize(
    ("line", "read", "expected"),
    [
        ("config.lr = True", lambda settings: settings.number("lr"), "expected a number."),
        (
            "config.seed = -1",
            lambda settings: settings.integer("seed", least=0),
            "expected a whole number of at least 0.",
        ),
        (
            "config.seed = 1.5",
            lambda settings: settings.integer("seed", least=0),
            "expected a whole number of at least 0.",
        ),
        ("config.network = ''", lambda settings: settings.text("network"), "expected text."),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_line(tmp_path, line, read, expected):
    with pytest.raises(ConfigError) as caught:
        read(given(tmp_path, "config.momentum = 0.9", line))
    assert str(caught.value) == f"{tmp_path / 'config.py'}, line 3: {line!r}: {expected}"


@pytest.mark.parametrize(
    ("file_name", "asked", "expected", "remark"),
    [
        ("ms1mv3_r50", None, 8, "does not say how many GPUs were used: 8 were assumed"),
        ("wf42m_r50_32gpus", None, 32, "the name of the file says 32 GPUs: import again"),
        ("ms1mv3_r50_onegpu", None, 1, "the name of the file says 1 GPUs: import again"),
        ("wf42m_pfc02_vit_bs8k", None, 64, "the name of the file says 64 GPUs: import again"),
        ("wf42m_r50_32gpus", 4, 4, "says 32 GPUs: but --gpus is 4"),
        ("wf42m_r50_8gpus_bs4k", None, 8, "says a batch of 4096, but batch_size 128 on 8 GPUs is 1024"),
        ("wf42m_r50_0gpus", None, 8, "8 were assumed"),
    ],
)
def test_the_number_of_gpus_is_the_one_asked_for_or_the_one_in_the_name(tmp_path, file_name, asked, expected, remark):
    settings = given(tmp_path, "config.batch_size = 128", name=file_name)
    assert published_gpus(asked, settings) == expected
    assert remark in "\n".join(settings.remarks)


def test_without_a_name_that_says_otherwise_a_given_number_needs_no_remark(tmp_path):
    settings = given(tmp_path, "config.batch_size = 128", name="ms1mv3_r50")
    assert published_gpus(4, settings) == 4
    assert settings.remarks == []
