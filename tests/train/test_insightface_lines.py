"""Reading Python that sets `config`, without executing it: what is followed, what is refused, and odd files."""

import pytest

from megaclass.errors import ConfigError
from megaclass.insightface.config.lines import read_lines
from megaclass.insightface.config.values import Unreadable


def lines_of(tmp_path, text: str):
    path = tmp_path / "config.py"
    path.write_text(text)
    return read_lines(path)


def values_of(tmp_path, text: str) -> dict[str, object]:
    return {name: line.value for name, line in lines_of(tmp_path, text).values.items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30 * 10000", 300000),
        ("10 ** 9", 10**9),
        ("config.num_epoch // 10", 2),
        ("config['num_epoch'] / 8 - 1", 1.5),
        ("-1", -1),
        ("(1.0, 0.5, +0.0)", (1.0, 0.5, 0.0)),
        ("['lfw'] if num_gpus > 4 else []", ["lfw"]),
        ("0.1 * num_gpus", 0.8),
        ("'a' + 'b'", "ab"),
        ("f'runs/{num_gpus}'", "runs/8"),
        ("max(1, round(2.6), int(4.9))", 4),
        ("not config.num_epoch == 20 and True", False),
        ("None", None),
    ],
)
def test_plain_arithmetic_is_computed(tmp_path, text, value):
    found = values_of(tmp_path, f"num_gpus = 8\nconfig = edict()\nconfig.num_epoch = 20\nconfig.x = {text}\n")
    assert found["x"] == pytest.approx(value) if isinstance(value, float) else found["x"] == value


@pytest.mark.parametrize(
    "text",
    [
        "config['network'] = 'r100'",
        "config.update({'network': 'r100'})",
        "config.update(dict(network='r100'))",
        "config.update(network='r100')",
        "config.update(**{'network': 'r100'})",
        "setattr(config, 'network', 'r100')",
        "config.network: str = 'r100'",
        "config.other = config.network = 'r100'",
        "if config.lr > 0.05:\n    config.network = 'r100'\nelse:\n    config.network = 'r18'",
        "name = 'r1'\nname += '00'\nconfig.network = name",
        "config = edict(network='r100')",
        "config = edict({'network': 'r100'})",
        "if __name__ == '__main__':\n    config.network = 'r18'\nelse:\n    config.network = 'r100'",
    ],
)
def test_every_way_to_set_a_value_is_followed(tmp_path, text):
    assert (
        values_of(tmp_path, f"config = edict()\nconfig.network = 'r50'\nconfig.lr = 0.1\n{text}\n")["network"] == "r100"
    )


def test_the_last_of_several_assignments_counts_and_a_value_can_be_changed_in_place(tmp_path):
    found = values_of(
        tmp_path, "config = edict()\nconfig.lr = 1.0\nconfig.lr = 0.1\nconfig.lr *= 4\nconfig['lr'] += 1\n"
    )
    assert found == {"lr": pytest.approx(1.4)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("if os.environ['X']:\n    config.lr = 1", "the condition cannot be computed"),
        ("for i in range(3):\n    config.lr = i", "this kind of statement is not executed"),
        ("while True:\n    config.lr = 1", "this kind of statement is not executed"),
        ("try:\n    import x\nexcept ImportError:\n    config.lr = 1", "this kind of statement is not executed"),
        ("with open('x') as f:\n    config.lr = 1", "this kind of statement is not executed"),
        ("del config.lr", "this kind of statement is not executed"),
        ("config.pop('lr')", r"config\.pop\(\) is not executed"),
        ("config.update(other)", "expected edict\\(\\) or a dict literal"),
        ("config.update({key: 1})", "expected text for all keys"),
        ("config.a.b = 1", r"expected config\.<name> = <value>"),
        ("config.a, config.b = 1, 2", r"expected config\.<name> = <value>"),
        ("alias = config\nalias.lr = 1", r"expected config\.<name> = <value>"),
        ("change(config)", "could change config"),
        ("targets = ['lfw']\ntargets.append('x')", "could change targets"),
        ("def change():\n    config.lr = 1\nchange()", "could change change"),
        ("ignored = config.update(lr=1)", "could change config"),
        ("config.notes = config.pop('lr')", "could change config"),
        ("targets = []\nconfig.val_targets = targets\ntargets += ['x']", "only numbers and text"),
        ("alias = config\nalias |= {'lr': 1}", "only numbers and text"),
        ("class Body:\n    config.lr = 1", "could change config"),
        ("@change(config)\ndef f():\n    pass", "could change config"),
        ("def f(x=config.update(lr=1)):\n    pass", "could change config"),
        ("x: config.update(lr=1) = 3", "could change config"),
        ("from configs.ms1mv3_r50 import config", "settings of other files are not read"),
        ("from configs.ms1mv3_r50 import *", "settings of other files are not read"),
        ("config = load('x')", r"expected edict\(\) or a dict literal"),
        ("config = [1]", r"expected edict\(\) or a dict literal"),
        ("(config).lr = 1\nexec('config.lr = 2', {'config': config})", "could change config"),
        ("exec('config.lr = 2')", r"exec\(\) could change config"),
        ("globals()['config'].update(lr=2)", r"globals\(\) could change config"),
        ("config.notes = eval('config.pop(0)')", r"eval\(\) could change config"),
        ("name = locals()['config'].setdefault('lr', 2)", r"locals\(\) could change config"),
    ],
)
def test_what_could_change_the_config_and_is_not_understood_is_refused_with_line_and_text(tmp_path, text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        lines_of(tmp_path, f"config = edict()\nconfig.lr = 0.1\n{text}\n")
    assert "config.py, line " in str(caught.value) and "\n" not in str(caught.value)


def test_what_changes_nothing_is_named_and_not_executed(tmp_path):
    found = lines_of(
        tmp_path,
        "'''A docstring.'''\nimport os, warnings\nfrom configs.base import config\nconfig.lr = 0.1\n"
        "open('was-here', 'w')\nwarnings.filterwarnings('ignore')\nprint(config.lr)\ndef unused():\n    return 1\n"
        "if config.lr > 1:\n    config.lr = 7\n",
    )
    assert found.remarks == [
        "line 5 was not executed: open('was-here', 'w')",
        "line 6 was not executed: warnings.filterwarnings('ignore')",
        "line 7 was not executed: print(config.lr)",
        "line 8 was not executed: def unused():",
        "line 11 was skipped: the condition in line 10 is False: if config.lr > 1:",
    ]
    assert found.values["lr"].value == 0.1
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9 ** 9 ** 9", "the exponent is above 64"),
        ("10 ** 60", "the number is too large"),
        ("1e999", "the number is too large"),
        ("9" * 4000, "the number is too large"),
        ("1 // 0", "the value cannot be computed: integer division or modulo by zero"),
        ("(-8) ** 0.5", "a value of type complex is not a setting"),
        ("'a' * 1000000000", "arithmetic is supported for numbers only"),
        ("[0] * 1000000000", "arithmetic is supported for numbers only"),
        ("b'x'", "a value of type bytes is not a setting"),
        ("__import__('os').getpid()", "neither a literal nor arithmetic"),
        ("other", "other is not a value of this file"),
        ("config.later", "config.later is not set above this line"),
        ("lambda: 1", "neither a literal nor arithmetic"),
        ("1 < 'a'", "the value cannot be computed"),
        ("'%s' % 1", "arithmetic is supported for numbers only"),
        ("f'{1:09999999999d}'", "format specifications in text are not supported"),
    ],
)
def test_what_only_executing_would_give_stays_unread_with_the_reason(tmp_path, text, reason):
    value = values_of(tmp_path, f"config = edict()\nconfig.x = {text}\n")["x"]
    assert isinstance(value, Unreadable)
    assert reason in value.reason


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"config.lr = 0.1\0", "holds null bytes"),
        (b"config.name = '\xff\xfe'", "is not UTF-8: byte 15 is 0xff"),
        (b"config.lr = = 1", "line 1: not Python: "),
        (b"config.lr = 1\n  config.x = 2", "line 2: not Python: unexpected indent"),
        (b"config.lr = 1\nconfig.name = 'open", "line 2: not Python: "),
        (b"config.lr = " + b"(" * 5000 + b")" * 5000, "not Python|nested too deeply"),
        (b"config.lr = " + b"-" * 100000 + b"1", "not Python|nested too deeply"),
        (b"config.lr = " + b"+".join([b"1"] * 100000), "nested too deeply|not Python"),
        (b"config.lr = a" + b".a" * 50000, "nested too deeply|not Python"),
        (
            b"if 1:\n" * 1 + b"".join(b" " * i + b"if 1:\n" for i in range(1, 99)) + b" " * 99 + b"pass",
            "holds no lines",
        ),
        (b"config.lr = " + b"9" * 5000, "not Python"),
        (b"#" * (1 << 21), "is larger than 1,048,576 bytes"),
        (b"", "holds no lines like"),
        (b"x = 1\n", "holds no lines like"),
        (b"\x7fELF\x02\x01\x01", "not Python"),
        (b"config.lr = 1 \x0b\x1b[31m", "not Python"),
    ],
)
def test_an_odd_file_is_refused_in_one_line(tmp_path, data, message):
    path = tmp_path / "config.py"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_lines(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 300


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbfconfig.lr = 0.1\r\n", b"config.lr = 0.1\rconfig.x = 1", b"config.n = '\\d'\nconfig.lr=0.1"]
)
def test_marks_and_line_ends_of_other_systems_are_read(tmp_path, data, recwarn):
    path = tmp_path / "config.py"
    path.write_bytes(data)
    assert read_lines(path).values["lr"].value == 0.1
    assert not recwarn.list


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot read .*: Is a directory"):
        read_lines(tmp_path)
