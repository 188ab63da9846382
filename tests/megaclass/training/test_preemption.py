"""Signals to a run: SIGTERM, SIGUSR1 and SIGHUP save, leave with 75, and it goes on with --resume; a crash leaves its stack."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.commands import ended_in_this_process
from tests.forked import Forked, megaclass_command
from tests.shared_folder import made_once

from megaclass.checkpoint.manifest import check_files, read_manifest
from megaclass.cli.main import main
from megaclass.config.read import load_config
from megaclass.training.rank_main import RankContext, train_in_group
from megaclass.training.run.signals import Stop
from megaclass.training.start.restart import FolderLock, StartMode
from megaclass_launch.events_file import read_events
from megaclass_launch.world import World

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
RECIPE = Path(__file__).parents[3] / "recipes" / "demo.toml"


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Callable[..., list[str]]:
    """command(folder, settings…): arguments that train in the folder, on data that is drawn once for all tests."""
    options = ["--identities", "12", "--images-per-identity", "8", "--size", "32", "--pairs", "40"]

    def draw(folder: Path) -> None:
        assert main(["data", "synth", *options, "--out", str(folder / "data")]) == 0

    data = made_once(tmp_path_factory, "preemption", draw) / "data"

    def words(folder: Path, *more: str) -> list[str]:
        places = [f"data.path={data}", f"train.run_dir={folder / 'run'}"]
        return ["train", str(RECIPE), *TINY, *places, *more]

    return words


# Every flush to the disk takes 1 s, as on a busy network disk; a save has six in a row, which is longer than any grace.
SLOW_DISK = """
import os, time
fsync = os.fsync
def slow(handle):
    time.sleep(1)
    fsync(handle)
os.fsync = slow
"""


def num_rows(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for(is_there: Callable[[], object], is_alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_there():
        assert is_alive(), "the run has ended"
        assert time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.02)


def checkpoints_of(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "checkpoints").glob("step-*"))


def assert_one_whole_checkpoint(folder: Path) -> None:
    (saved,) = checkpoints_of(folder)
    check_files(saved, read_manifest(saved))


def test_one_process_saves_and_leaves_with_75_or_130_and_resumes(tmp_path, command):
    """One run, which each signal stops once; each start but the first resumes."""
    step, mode = 0, []
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)):
        num_wanted = num_rows(tmp_path) + 2
        with Forked(megaclass_command, *command(tmp_path, "train.nproc=1", "train.epochs=300"), *mode) as process:
            wait_for(lambda: num_rows(tmp_path) >= num_wanted, process.is_alive)  # noqa: B023
            os.kill(process.pid, number)
            assert process.wait() == code, (number, process.stderr)
        errors = process.stderr
        assert "--resume continues" in errors and (not mode or f"step {step}" in errors), (number, errors)
        saved = checkpoints_of(tmp_path)[-1]
        before, step, mode = step, int(saved.name.removeprefix("step-")), ["--resume"]
        assert step > before
    epochs = f"train.epochs={(step + 2) / 6}"
    resumed = ended_in_this_process([*command(tmp_path, "train.nproc=1", epochs), "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert f"step {step}" in resumed.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step + 2


def test_a_rank_that_crashes_in_native_code_leaves_its_stack(tmp_path, command):
    """How the launcher names such a rank is shown in tests/launch/test_local.py."""
    with Forked(megaclass_command, *command(tmp_path, "train.nproc=1", "train.epochs=300")) as process:
        wait_for(lambda: num_rows(tmp_path) >= 2, process.is_alive)
        os.kill(process.pid, signal.SIGSEGV)
        assert process.wait() == -signal.SIGSEGV
    assert "Segmentation fault" in process.stderr and "training/loop.py" in process.stderr


def _train_until_rank_1_gets(number: int, arguments: Sequence[str], folder: Path) -> tuple[Stop, str]:
    """On every rank: why the training ended, and the messages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=1)
    config = load_config(Path(arguments[1]), arguments[2:])
    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(0.02):
            if num_rows(folder) >= 2:
                os.kill(os.getpid(), number)
                return

    # Should the training fail in that moment, the signal does not end the rank.
    previous = signal.signal(number, lambda *_: None)
    sender = threading.Thread(target=send)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), ExitStack() as held:
        if rank == 1:
            sender.start()
            held.callback(sender.join)
            held.callback(is_over.set)
        _, _, outcome = train_in_group(
            RankContext(config=config, world=world, mode=StartMode(), lock=FolderLock(held)), torch.device("cpu")
        )
    signal.signal(number, previous)
    return outcome.stop, said.getvalue()


def test_a_signal_to_one_rank_makes_all_of_them_leave_together(run_ranks, tmp_path, command):
    arguments = command(tmp_path, "train.nproc=2", "train.epochs=300", "train.device=cpu")
    outcomes = run_ranks(2, _train_until_rank_1_gets, int(signal.SIGUSR1), arguments, tmp_path)
    assert [stop for stop, _ in outcomes] == [Stop.ASKED] * 2, outcomes
    assert_one_whole_checkpoint(tmp_path)


def test_a_second_ctrl_c_leaves_at_once(tmp_path, command):
    # A report far away: what was asked once waits for it.
    run = command(tmp_path, "train.nproc=2", "train.epochs=3000", "train.report_steps=10000")
    with Forked(megaclass_command, *run) as process:
        wait_for(lambda: read_events(tmp_path / "run")[0], process.is_alive)
        os.kill(process.pid, signal.SIGINT)
        wait_for(lambda: "again to leave at once" in process.stderr, process.is_alive)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, process.stderr
    assert not checkpoints_of(tmp_path)


def test_ctrl_c_saves_in_all_ranks(tmp_path, command):
    run = command(tmp_path, "train.nproc=2", "train.epochs=300")
    with Forked(megaclass_command, *run) as process:
        wait_for(lambda: num_rows(tmp_path) >= 2, process.is_alive)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 130 and "--resume continues" in process.stderr, process.stderr
    assert_one_whole_checkpoint(tmp_path)


# Gives the command a terminal of its own and closes it when the curve has begun. When the first file of the checkpoint is
# there, it sends SIGTERM, as a system that shuts down does. Exits like the command.
_CLOSE_TERMINAL = """
import glob, os, pty, signal, sys, time
run_dir, command = sys.argv[1], sys.argv[2:]
pid, terminal = pty.fork()
if pid == 0:
    os.execv(command[0], command)
os.set_blocking(terminal, False)
def rows():
    try:
        os.read(terminal, 65536)
    except OSError:
        pass
    return open(run_dir + "/metrics.jsonl").read().count("\\n") if os.path.exists(run_dir + "/metrics.jsonl") else 0
deadline = time.monotonic() + 120
while rows() < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
os.close(terminal)
while not glob.glob(run_dir + "/checkpoints/.step-*.partial") and time.monotonic() < deadline:
    time.sleep(0.05)
os.kill(pid, signal.SIGTERM)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


# One process is sent SIGHUP by another test, too.
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_after_a_closed_terminal_and_sigterm_a_save_takes_longer_than_any_grace_and_the_run_leaves_with_75(
    tmp_path, command, nproc
):
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    run = command(tmp_path, f"train.nproc={nproc}", "train.epochs=300")
    watched = [sys.executable, "-c", _CLOSE_TERMINAL, str(tmp_path / "run"), sys.executable, "-m", "megaclass", *run]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": path}
    assert subprocess.run(watched, timeout=200, env=environment).returncode == 75
    assert_one_whole_checkpoint(tmp_path)


def _train_on_a_slow_disk(*arguments: str) -> None:
    exec(SLOW_DISK, {})
    megaclass_command(*arguments)


def test_sigterm_during_the_last_save_lets_it_finish_and_says_that_the_rest_is_to_do(tmp_path, command):
    with Forked(_train_on_a_slow_disk, *command(tmp_path, "train.nproc=1", "train.epochs=1")) as process:
        checkpoints = tmp_path / "run" / "checkpoints"
        wait_for(lambda: list(checkpoints.glob(".step-*.partial")), process.is_alive)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 75, process.stderr
    assert "saved at step 6, --resume continues" in process.stderr
    assert_one_whole_checkpoint(tmp_path)
    assert not (tmp_path / "run" / "summary.json").exists()
