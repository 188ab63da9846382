"""Signals to a run: SIGTERM, SIGUSR1 and SIGHUP save, leave with 75, and it goes on with --resume; a crash leaves its stack."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import ended_in_this_process

from megaclass.checkpoint.manifest import check_files, read_manifest
from megaclass.cli.main import main

pytestmark = pytest.mark.ranks

TINY = [
    "synth.identities=12",
    "synth.images_per_identity=8",
    "synth.size=32",
    "synth.pairs=40",
    "backbone.embedding_dim=16",
    "train.global_batch=16",
    "train.report_steps=2",
    "train.checkpoint_epochs=1000",
    "export.onnx=false",
]
RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Callable[..., list[str]]:
    """command(folder, settings…): trains in the folder, on data that is drawn once for all tests."""
    data = tmp_path_factory.mktemp("drawn") / "data"
    options = ["--identities", "12", "--images-per-identity", "8", "--size", "32", "--pairs", "40"]
    assert main(["data", "synth", *options, "--out", str(data)]) == 0

    def words(folder: Path, *more: str) -> list[str]:
        places = [f"data.path={data}", f"train.run_dir={folder / 'run'}"]
        return [sys.executable, "-m", "megaclass", "train", str(RECIPE), *TINY, *places, *more]

    return words


def num_rows(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_rows(folder: Path, process: subprocess.Popen[str], num_before: int = 0) -> None:
    for _ in range(2400):
        if num_rows(folder) >= num_before + 2:
            return
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    pytest.fail("no metrics appeared")


def rank_pids(parent: int) -> dict[int, int]:
    """RANK -> pid of the processes of this job that are ranks, wherever in the tree they are."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            variables = dict(part.split(b"=", 1) for part in environment if b"=" in part)
            if variables.get(b"MEGACLASS_TEST_JOB") == str(parent).encode() and b"RANK" in variables:
                found[int(variables[b"RANK"])] = int(entry.name)
    return found


def test_one_process_saves_and_leaves_with_75_or_130_and_resumes(tmp_path, command):
    """One run, which each signal stops once; each start but the first resumes."""
    step, mode = 0, []
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)):
        run = [*command(tmp_path, "train.nproc=1", "train.epochs=300"), *mode]
        num_before = num_rows(tmp_path)
        process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
        wait_for_rows(tmp_path, process, num_before)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        assert "--resume continues" in errors and (not mode or f"step {step}" in errors)
        saved = max((tmp_path / "run" / "checkpoints").glob("step-*"))
        before, step, mode = step, int(saved.name.removeprefix("step-")), ["--resume"]
        assert step > before
    epochs = f"train.epochs={(step + 2) / 6}"
    resumed = ended_in_this_process([*command(tmp_path, "train.nproc=1", epochs)[3:], "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert f"step {step}" in resumed.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step + 2


def sent_to_rank_1(tmp_path, command, number):
    """A run of two ranks after the signal: the process, and what it wrote to stderr."""
    job = str(os.getpid())
    process = subprocess.Popen(
        command(tmp_path, "train.nproc=2", "train.epochs=300"),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MEGACLASS_TEST_JOB": job},
    )
    wait_for_rows(tmp_path, process)
    os.kill(rank_pids(int(job))[1], number)
    return process, process.communicate(timeout=60)[1]


def test_a_rank_that_crashes_in_native_code_leaves_its_stack(tmp_path, command):
    process, errors = sent_to_rank_1(tmp_path, command, signal.SIGSEGV)
    assert process.returncode == 128 + signal.SIGSEGV, errors
    assert "Segmentation fault" in errors and "train/loop.py" in errors
    assert "megaclass: rank 1 on" in errors and "ended with signal SIGSEGV" in errors


def test_a_signal_to_one_rank_makes_all_of_them_leave_together(tmp_path, command):
    process, errors = sent_to_rank_1(tmp_path, command, signal.SIGUSR1)
    assert process.returncode == 75, errors
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_a_second_ctrl_c_leaves_at_once(tmp_path, command):
    # A report far away: what was asked once waits for it.
    run = command(tmp_path, "train.nproc=2", "train.epochs=3000", "train.report_steps=10000")
    process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
    while "training" not in (line := process.stderr.readline()):
        assert line, "the run has ended"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    while "again to leave at once" not in (line := process.stderr.readline()):
        assert line, "the run has ended"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_ctrl_c_saves_in_all_ranks(tmp_path, command):
    process = subprocess.Popen(
        command(tmp_path, "train.nproc=2", "train.epochs=300"), stderr=subprocess.PIPE, text=True
    )
    wait_for_rows(tmp_path, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume continues" in errors, errors
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    check_files(saved, read_manifest(saved))


# Gives the command a terminal of its own, closes it when the curve has begun, and says how the command ended.
_CLOSE_TERMINAL = """
import os, pty, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
os.set_blocking(terminal, False)
def rows():
    try:
        os.read(terminal, 65536)
        return open(sys.argv[1]).read().count("\\n")
    except OSError:
        return open(sys.argv[1]).read().count("\\n") if os.path.exists(sys.argv[1]) else 0
deadline = time.monotonic() + 120
while rows() < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


# One process is sent SIGHUP by another test, too.
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_run_whose_terminal_is_closed_saves_and_leaves_with_75(tmp_path, command, nproc):
    run = command(tmp_path, f"train.nproc={nproc}", "train.epochs=300")
    watched = [sys.executable, "-c", _CLOSE_TERMINAL, str(tmp_path / "run" / "metrics.jsonl"), *run]
    assert subprocess.run(watched, timeout=200, env={**os.environ, "TERM": "xterm"}).returncode == 75
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    check_files(saved, read_manifest(saved))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_sigterm_to_the_parent_of_local_ranks_waits_for_a_save_that_takes_longer_than_any_grace(tmp_path, command):
    train = command(tmp_path, "train.nproc=2", "train.epochs=300")
    # Every fsync takes 1 s, as on a busy network disk; a save has six in a row.
    # -D: this process is the command, the tracer its grandchild.
    slow = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "--seccomp-bpf", "-e", "trace=fsync"]
    slow += ["-e", "inject=fsync:delay_enter=1s"]
    process = subprocess.Popen([*slow, *train], stderr=subprocess.PIPE, text=True)
    wait_for_rows(tmp_path, process)
    process.terminate()
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 75, errors
    assert "--resume continues" in errors and "ended with" not in errors
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    check_files(saved, read_manifest(saved))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_sigterm_during_the_last_save_lets_it_finish_and_says_that_the_rest_is_to_do(tmp_path, command):
    train = command(tmp_path, "train.nproc=1", "train.epochs=1")
    slow = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "--seccomp-bpf", "-e", "trace=fsync"]
    slow += ["-e", "inject=fsync:delay_enter=1s"]
    process = subprocess.Popen([*slow, *train], stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    while not list(checkpoints.glob(".step-*.partial")):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 75 and "saved at step 6, --resume continues" in errors, errors
    (saved,) = checkpoints.glob("step-*")
    check_files(saved, read_manifest(saved))
    assert not (tmp_path / "run" / "summary.json").exists()
