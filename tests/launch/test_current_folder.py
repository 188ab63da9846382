"""Processes that a command starts execute no files of the current folder, which may lie next to downloaded data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ["data.path=synthetic:8x4", "data.size=32", "backbone.name=slim", "train.global_batch=4", "train.device=cpu"]


RUN = """
import horovod

def rank():
    import horovod.torch as hvd
    hvd.init()
    return hvd.rank()

if __name__ == "__main__":
    print(horovod.run(rank, num_proc=2))
"""


@pytest.fixture
def started_in(tmp_path):
    """Runs a command in a folder whose files hide modules of Python, and checks that none of them was executed."""

    def start(*command: str) -> "subprocess.CompletedProcess[str]":
        for name in ("heapq", "queue", "socket", "pickle"):
            (tmp_path / f"{name}.py").write_text(
                "from pathlib import Path\nPath('executed').touch()\nraise SystemExit(99)\n"
            )
        env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert not (tmp_path / "executed").exists(), done.stderr
        return done

    return start


@pytest.mark.ranks
@pytest.mark.parametrize(
    "command",
    [
        ["train", "recipe.toml", *SETTINGS, "train.nproc=2", "train.epochs=1", "export.onnx=false"],
        ["embed", "no-model", "--nproc", "2", ".", "--out", "out.npy"],
        ["evaluate", "no-model", "--nproc", "2"],
        ["check"],
        ["data", "synth", "--identities", "64", "--images-per-identity", "8", "--size", "32", "--out", "drawn"],
    ],
    ids=lambda command: command[0],
)
def test_modules_in_the_current_folder_are_not_imported_by_processes_of_a_command(command, tmp_path, started_in):
    (tmp_path / "recipe.toml").write_text('[data]\npath = "debug"\n[train]\nrun_dir = "run"\n')
    # The installed command, as users type it: unlike `python -m`, it does not look in the current folder itself.
    done = started_in(str(Path(sys.executable).with_name("megaclass")), *command)
    # It came as far as the ranks, and did not end before with a wrong option.
    assert "usage:" not in done.stderr, done.stderr
    assert done.returncode == 0 or command[0] in ("embed", "evaluate", "check"), done.stderr


@pytest.mark.ranks
def test_modules_in_the_current_folder_are_not_imported_by_ranks_of_a_function(tmp_path, started_in):
    script = tmp_path / "programs" / "main.py"
    script.parent.mkdir()
    script.write_text(RUN)
    done = started_in(sys.executable, str(script))
    assert done.stdout == "[0, 1]\n", done.stderr
