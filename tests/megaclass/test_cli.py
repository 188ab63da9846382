"""The command line: what it prints, how it ends."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megaclass
from megaclass import api
from megaclass.cli.main import main
from megaclass.config.read import load_config
from megaclass_launch.messages import messages_on_stderr

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes" / "demo.toml"


def run(*arguments, cwd=None):
    command = [sys.executable, "-m", "megaclass", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


@pytest.fixture
def outcome(capsys):
    """outcome(*arguments): exit code, standard output, standard error."""

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse's way to end
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.ranks
def test_the_version_is_told():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"megaclass {megaclass.__version__}\n")


def test_recipes_are_listed_with_a_line_each_and_every_one_has_one(outcome):
    code, printed, _ = outcome("recipes")
    named = dict(line.split(maxsplit=1) for line in printed.partition("\n\n")[0].splitlines())
    assert code == 0 and set(named) == {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert "two CPU cores" in named["demo"] and all(len(line) > 20 for line in named.values())


# Completes the last word of a line as bash does, in a folder with one file.
COMPLETE = """
words=("$@"); COMP_WORDS=("${words[@]}"); COMP_CWORD=$((${#words[@]} - 1))
_shtab_megaclass megaclass "${words[COMP_CWORD]}" "${words[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.ranks
def test_bash_completes_commands_options_recipes_and_files_also_of_run(outcome, tmp_path):
    code, script, _ = outcome("completion", "bash")
    assert code == 0
    (tmp_path / "demands.toml").touch()

    def completed(line):
        command = ["bash", "-c", script + COMPLETE, "bash", "megaclass", *line.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path).stdout.split()

    assert completed("tr") == ["train"]
    assert completed("train dem") == ["demo", "demands.toml"]
    assert completed("plan --g") == ["--gpu"]
    assert completed("data inspect d") == ["demands.toml"]
    assert completed("run --host-d") == ["--host-discovery-script"]
    code, script, _ = outcome("completion", "zsh")
    assert code == 0 and "--host-discovery-script" in script and ":_files" in script


@pytest.mark.ranks
def test_a_user_s_mistake_ends_with_2_and_one_line_before_any_process_starts(tmp_path):
    """In a process of its own, with two processes asked for: none of them speaks."""
    done = run("train", str(DEMO), "train.nproc=2", "head.sample_rat=0.1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "megaclass: command line: unknown setting head.sample_rat; did you mean head.sample_rate?\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/no.toml"], "megaclass: There is no configuration file recipes/no.toml. That folder has: demo.toml"),
        ([DEMO, "train.epochs=two"], "megaclass: command line: train.epochs is 'two'; expected a number\n"),
        ([DEMO, "head.sample_rate=7"], "megaclass: head.sample_rate is 7.0; it must be in [0, 1]: 1.0 = all classes"),
        (
            [DEMO, f"data.path={os.fsdecode(b'caf' + bytes([0xE9]))}"],
            r"megaclass: data.path=caf\udce9 is not UTF-8: rename the file or folder",
        ),
        ([DEMO, "epochs=2"], "megaclass: Cannot read the argument 'epochs=2': expected section.key=value"),
        (
            [DEMO, "--resume", "some/path"],
            "megaclass: Cannot read the argument 'some/path': expected section.key=value. To resume from it, write "
            "--resume=some/path.",
        ),
        (
            [DEMO, "--resume", "train.epochs=2", "best"],
            "megaclass: Cannot read the argument 'best': expected section.key=value. To resume from it, write --resume=best.",
        ),
    ],
)
def test_bad_settings_are_told_in_one_line_with_exit_2(outcome, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    code, out, err = outcome("train", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message) and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["trane"], ["train"], ["train", DEMO, "--unknown"], ["data"]])
def test_what_argparse_refuses_ends_with_2_and_shows_the_usage(outcome, arguments):
    code, _, err = outcome(*arguments)
    assert code == 2 and err.startswith("usage: megaclass")


def test_show_config_prints_toml_that_is_the_same_run(outcome, tmp_path):
    code, out, err = outcome("train", DEMO, "train.epochs=2", "--show-config")
    assert (code, err) == (0, "")
    shown = tmp_path / "shown.toml"
    shown.write_text(out, encoding="utf-8")
    assert load_config(shown) == load_config(DEMO, ["train.epochs=2"])


def test_options_and_settings_may_stand_in_any_order(outcome):
    expected = outcome("train", DEMO, "train.epochs=2", "train.seed=3", "--show-config")
    assert outcome("train", "--show-config", DEMO, "train.epochs=2", "train.seed=3") == expected
    assert outcome("train", DEMO, "--show-config", "train.epochs=2", "train.seed=3") == expected
    assert outcome("train", DEMO, "train.epochs=2", "--resume", "train.seed=3", "--show-config") == expected


def test_synth_draws_the_files_users_have_and_leaves_them_the_second_time(outcome, tmp_path):
    arguments = ["data", "synth", "--identities", 3, "--images-per-identity", 2, "--size", 32, "--pairs", 20]
    code, out, _ = outcome(*arguments, "--out", tmp_path / "faces")
    assert (code, out) == (0, f"{tmp_path / 'faces'}: drawn\n")
    assert {path.name for path in (tmp_path / "faces").iterdir()} >= {"train.rec", "train.idx", "property"}
    assert outcome(*arguments, "--out", tmp_path / "faces")[1] == f"{tmp_path / 'faces'}: exists already, unchanged\n"


@pytest.mark.parametrize(("option", "value"), [("--identities", 0), ("--size", 1), ("--seed", -1), ("--pairs", 0)])
def test_synth_refuses_what_it_cannot_draw(outcome, tmp_path, option, value):
    given = {"--identities": 3, "--images-per-identity": 2, "--size": 32, "--pairs": 20, "--out": tmp_path / "faces"}
    given[option] = value
    code, _, err = outcome("data", "synth", *(str(part) for pair in given.items() for part in pair))
    assert code == 2 and "it must lie in" in err and str(value) in err
    assert not (tmp_path / "faces").exists()


@pytest.mark.ranks
def test_settings_are_checked_and_shown_without_paying_for_torch():
    code = f"""
import sys
from megaclass.cli.main import main
assert main(["train", {str(DEMO)!r}, "--show-config"]) == 0
assert main(["train", {str(DEMO)!r}, "train.epochs=-1"]) == 2
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    ("output", "printed"),
    [
        ("quiet", "WARNING megaclass: beware\n"),
        ("normal", "megaclass: hello\nrank 1: here\nWARNING megaclass: beware\n"),
        ("verbose", "DEBUG megaclass: detail\nmegaclass: hello\nrank 1: here\nWARNING megaclass: beware\n"),
    ],
)
def test_messages_of_the_library_are_printed_by_level_and_sender(capsys, output, printed):
    logger = logging.getLogger("megaclass.anything")
    with messages_on_stderr(output):
        logger.debug("detail")
        logger.info("hello")
        logger.info("here", extra={"sender": "rank 1"})
        logger.warning("beware")
    assert capsys.readouterr().err == printed


def test_quiet_prints_the_result_alone_and_excludes_verbose(outcome, tmp_path):
    arguments = ("data", "synth", "--identities", 2, "--images-per-identity", 2, "--size", 16, "--pairs", 20)
    code, out, err = outcome(*arguments, "--out", tmp_path / "faces", "--quiet")
    assert (code, out, err) == (0, f"{tmp_path / 'faces'}: drawn\n", "")
    code, _, err = outcome("data", "inspect", tmp_path / "faces", "--quiet", "--verbose")
    assert code == 2 and "not allowed with argument --quiet" in err


def test_the_demo_is_as_quiet_as_it_was_asked_to_be(outcome, monkeypatch):
    started = []

    def start(recipe, overrides, mode, *, output):
        started.append((str(recipe), overrides, mode.resume, mode.overwrite, output))
        return api.TrainedRun(Path("runs/demo"))

    monkeypatch.setattr(api, "start_training", start)
    assert outcome("demo", "train.nproc=1", "--quiet", "train.seed=3") == (0, "", "")
    assert outcome("demo", "--resume", "train.epochs=9") == (0, "", "")
    assert started == [
        ("demo", ["train.nproc=1", "train.seed=3"], None, True, "quiet"),
        ("demo", ["train.epochs=9"], "auto", False, "normal"),
    ]


def as_program(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Runs the program `megaclass` with another `main`."""
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, sys, threading, time\n"
        "from megaclass.cli import main as module\n"
        "class Loud:\n"
        "    def __del__(self): print('freed')\n"
        "kept = Loud()\n"
        f"def main():\n    {body}\n"
        "module.main = main\n"
        "module.command()\n"
    )
    return subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)


@pytest.mark.ranks
def test_the_program_ends_with_everything_said_and_called_but_nothing_freed(tmp_path):
    ended = as_program(
        tmp_path,
        "atexit.register(print, 'registered')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "    print('said')\n"
        "    return 7",
    )
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (7, ["said", "thread", "registered"], "")


@pytest.mark.ranks
def test_a_program_that_fails_prints_its_error_before_anything_else_ends(tmp_path):
    """Nothing is freed: a process group may wait for the other ranks."""
    ended = as_program(
        tmp_path, "atexit.register(print, 'registered', file=sys.stderr); raise RuntimeError('unforeseen')"
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("RuntimeError: unforeseen\nregistered\n")


@pytest.mark.ranks
def test_output_that_cannot_be_written_is_an_error_also_at_the_very_end(tmp_path):
    ended = as_program(tmp_path, "sys.stdout = open('/dev/full', 'w'); print('lost'); return 0")
    assert ended.returncode == 120 and "No space left on device" in ended.stderr


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'megaclass' has no attribute 'PartialFD'"):
        _ = megaclass.PartialFD
    assert all(getattr(megaclass, name) is not None for name in megaclass.__all__)
