"""The lock of a run folder: waited for where the one before is dying, done without where there is none."""

import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import pytest

from megaclass.errors import CheckpointError
from megaclass.training.model.distil import CACHE_FILES
from megaclass.training.run.folder import RunFolder

_LOCK = "import sys, pathlib; from megaclass.training.run.folder import RunFolder; "
_LOCK += "RunFolder(pathlib.Path(sys.argv[1])).locked().__enter__(); print('in')"


def locked_where_flock_says(error, folder):
    strace = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=flock",
        "-e",
        f"inject=flock:error={error}",
    ]
    return subprocess.run(
        [*strace, sys.executable, "-c", _LOCK, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_file_system_without_locks_is_warned_about_and_any_other_fault_of_it_is_an_error(tmp_path):
    done = locked_where_flock_says("ENOSYS", tmp_path)
    assert done.stdout == "in\n" and f"the file system of {tmp_path} has no locks (Function not impl" in done.stderr
    done = locked_where_flock_says("EIO", tmp_path)
    assert done.stdout == "" and f"CheckpointError: Cannot lock the run folder {tmp_path}: Input/output" in done.stderr


def test_a_lock_that_is_let_go_of_in_time_is_waited_for_and_one_that_is_not_is_refused(tmp_path, capsys):
    run = RunFolder(tmp_path)
    with ExitStack() as other:
        other.enter_context(run.locked())
        for patience_s in (0.0, 0.3):
            with pytest.raises(CheckpointError, match="Another job is running in"), run.locked(patience_s):
                pass
        capsys.readouterr()
        threading.Timer(0.5, other.pop_all().close).start()
        with run.locked(60):
            assert capsys.readouterr().err.count(f"still holds {tmp_path}: waiting up to 60 s") == 1


@pytest.mark.parametrize("name", [".lock", ".config.toml.tmp", "metrics.jsonl", ".metrics.jsonl.tmp"])
def test_a_link_in_a_foreign_run_folder_has_no_other_file_written(tmp_path, name):
    """A run folder that came from elsewhere may hold links to the user's own files."""
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    (run.path / name).symlink_to(precious)
    with suppress(CheckpointError), run.locked():
        run.set_taken(True)
        run.write_config("[train]\n")
        run.append_metrics({"step": 1})
        run.forget_metrics_after(0)
    assert precious.read_text() == "mine"


def test_clearing_a_run_removes_all_that_runs_write_and_keeps_what_is_named_and_foreign(tmp_path):
    for name in ("config.toml", "subcentres.tsv", "teacher.npy", "teacher.json", "notes.txt"):
        (tmp_path / name).touch()
    run = RunFolder(tmp_path)
    run.clear(but=CACHE_FILES)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", *CACHE_FILES} and not run.holds_a_run()
    run.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_clearing_a_run_removes_a_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious.txt").write_text("mine")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    (run.path / "evaluation").symlink_to(tmp_path / "elsewhere")
    run.clear()
    assert not (run.path / "evaluation").exists()
    assert (tmp_path / "elsewhere" / "precious.txt").read_text() == "mine"


def test_a_run_that_was_killed_says_how_to_resume_it_or_that_it_must_begin_again(tmp_path):
    run = RunFolder(tmp_path)
    run.write_config("[train]\n")
    with pytest.raises(CheckpointError, match="ended before its first checkpoint, so start it again with --overwrite"):
        run.check_free()
    for step in (40, 120):
        (run.checkpoints / f"step-{step:09d}").mkdir(parents=True)
    with pytest.raises(CheckpointError) as error:
        run.check_free(["megaclass", "train", "my recipe.toml", "train.nproc=2"])
    assert (
        "continue it with --resume (from step 120: megaclass train 'my recipe.toml' train.nproc=2 --resume), "
        "replace it with --overwrite" in str(error.value)
    )
