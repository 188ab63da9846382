"""Reading InsightFace's configs without executing them: lines that are read, lines that are refused, and odd files."""

import pytest

from megaclass.insightface.import_config import read_config_file
from megaclass_launch.errors import ConfigError


def values_of(tmp_path, text: str) -> dict[str, object]:
    path = tmp_path / "config.py"
    path.write_text("from easydict import EasyDict as edict\nconfig = edict()\nconfig.num_epoch = 20\n" + text + "\n")
    return {name: line.value for name, line in read_config_file(path).lines.items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30 * 10000", 300000),
        ("config.num_epoch // 10", 2),
        ("config.num_epoch / 8 - 1", 1.5),
        ("-1", -1),
        ("(1.0, 0.5, +0.0)", (1.0, 0.5, 0.0)),
        ("['lfw', 'cfp_fp']", ("lfw", "cfp_fp")),
        ("None", None),
    ],
)
def test_literals_and_arithmetic_are_computed_and_the_last_assignment_counts(tmp_path, text, value):
    assert values_of(tmp_path, f"config.x = 0\nconfig.x = {text}")["x"] == value


@pytest.mark.parametrize(
    "text",
    [
        "if config.num_epoch > 0:\n    config.lr = 1",
        "for i in range(3):\n    config.lr = i",
        "del config.num_epoch",
        "config.update(lr=1)",
        "config['lr'] = 1",
        "config.num_epoch *= 2",
        "config.a.b = 1",
        "config.a, config.b = 1, 2",
        "alias = config",
        "setattr(config, 'lr', 1)",
        "class Body:\n    config.lr = 1",
        "def other():\n    config.lr = 1",
        "def lr_step_func(x=config.update(lr=1)):\n    pass",
        "import os",
        "from configs.ms1mv3_r50 import config",
        "config = load('x')",
        "exec('config.lr = 2')",
    ],
)
def test_any_other_statement_is_refused_with_line_and_text(tmp_path, text):
    with pytest.raises(ConfigError, match=r"expected config = edict\(\) or config\.<name> = ") as caught:
        values_of(tmp_path, text)
    assert "config.py, line 4: " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9 ** 9 ** 9", "neither a literal nor arithmetic"),
        ("10000000000 * 10000000000", "the number is too large"),
        ("1e999", "the number is too large"),
        ("1 // 0", "the value cannot be computed: integer division or modulo by zero"),
        ("8j", "neither a literal nor arithmetic"),
        ("'a' + 'b'", "arithmetic is supported for numbers only"),
        ("'a' * 1000000000", "arithmetic is supported for numbers only"),
        ("[0] * 1000000000", "arithmetic is supported for numbers only"),
        ("b'x'", "neither a literal nor arithmetic"),
        ("__import__('os').getpid()", "neither a literal nor arithmetic"),
        ("other", "neither a literal nor arithmetic"),
        ("config.later", "config.later is not set above this line"),
    ],
)
def test_other_values_are_refused_with_line_and_reason(tmp_path, text, reason):
    with pytest.raises(ConfigError, match=r"config\.py, line 4: ") as caught:
        values_of(tmp_path, f"config.x = {text}")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"config.lr = 0.1\0", "not Python"),
        (b"config.name = '\xff\xfe'", "not Python in UTF-8, .*position 15"),
        (b"config.lr = = 1", "line 1: not Python "),
        (b"config.lr = 1\n  config.x = 2", "line 2: not Python .*unexpected indent"),
        (b"config.lr = 1\nconfig.name = 'open", "line 2: not Python "),
        (b"config.lr = " + b"(" * 5000 + b")" * 5000, "not Python|nested too deeply"),
        (b"config.lr = " + b"-" * 100000 + b"1", "not Python|nested too deeply"),
        (b"config.lr = " + b"+".join([b"1"] * 100000), "nested too deeply|not Python"),
        (b"config.lr = a" + b".a" * 50000, "nested too deeply|not Python"),
        (b"config.lr = " + b"9" * 5000, "not Python"),
        (b"", "holds no lines like"),
        (b"x = 1\n", "line 1: 'x = 1': expected config = edict"),
        (b"\x7fELF\x02\x01\x01", "not Python"),
        (b"config.lr = 1 \x0b\x1b[31m", "not Python"),
    ],
)
def test_an_odd_file_is_refused_in_one_line(tmp_path, data, message):
    path = tmp_path / "config.py"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config_file(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 300


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbfconfig.lr = 0.1\r\n", b"config.lr = 0.1\rconfig.x = 1", b"config.n = '\\d'\nconfig.lr=0.1"]
)
def test_marks_and_line_ends_of_other_systems_are_read(tmp_path, data, recwarn):
    path = tmp_path / "config.py"
    path.write_bytes(data)
    assert read_config_file(path).lines["lr"].value == 0.1
    assert not recwarn.list


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot read .*: Is a directory"):
        read_config_file(tmp_path)
