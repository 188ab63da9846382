"""Ranks that a command starts do not execute files of the current folder, which may lie next to downloaded data."""

import os
import subprocess
import sys

import pytest

SETTINGS = ["data.path=synthetic:8x4", "data.size=32", "backbone.name=slim", "train.global_batch=4", "train.device=cpu"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "command",
    [
        ["train", "recipe.toml", *SETTINGS, "train.nproc=2", "train.epochs=1", "export.onnx=false"],
        ["embed", "no-model", "--nproc", "2", ".", "--out", "out.npy"],
        ["evaluate", "no-model", "--nproc", "2"],
        ["check"],
    ],
    ids=lambda command: command[0],
)
def test_modules_in_the_current_folder_are_not_imported_by_ranks(command, tmp_path):
    (tmp_path / "recipe.toml").write_text('[data]\npath = "debug"\n[train]\nrun_dir = "run"\n')
    for name in ("heapq", "queue"):
        (tmp_path / f"{name}.py").write_text(
            "from pathlib import Path\nPath('executed').touch()\nraise SystemExit(99)\n"
        )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "megaclass", *command],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert not (tmp_path / "executed").exists(), done.stderr
    # It came as far as the ranks, and did not end before with a wrong option.
    assert "usage:" not in done.stderr, done.stderr
    assert done.returncode == 0 or command[0] in ("embed", "evaluate", "check"), done.stderr
