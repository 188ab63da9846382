"""Training whose disk is full, under `megaclass run`: it goes on, waits with its last save, and does not restart in vain."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.launch.conftest import wait_until
from tests.launch.counted_run import CountedRun


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk):
    """Takes all that is left, whatever is freed meanwhile."""
    with (disk / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def pids_of_rank(run, rank):
    mark = f"RANK={rank}".encode()
    return [pid for pid in run.processes() if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]


def test_a_full_disk_costs_checkpoints_a_restart_waits_for_room_and_so_does_the_last_save(run, tmp_path, disk):
    """6 steps per epoch, each of which is saved: full from step 7 to 19, where a rank is killed, and after 25."""
    counted = CountedRun(tmp_path / "count", run_dir=disk / "run")
    checkpoints = disk / "run" / "checkpoints"
    for step in (7, 19, 25):
        counted.hold(step)
    settings = ("train.epochs=5", "train.checkpoint_epochs=1", "train.keep_checkpoints=1", "train.report_steps=2")
    started = run.start("-np", "2", "--restarts", "1", *counted.train(*settings), env=counted.env)

    # Two checkpoints are missing, and nothing else.
    counted.wait_for(7, started, num_ranks=2)
    wait_until(lambda: [*checkpoints.glob("step-*6")], 60, started.story)
    fill(disk)
    counted.release(7)
    counted.wait_for(19, started, num_ranks=2)
    started.says("training continues", timeout_s=60)
    assert "cannot write the checkpoint" in started.err and "No space left on device" in started.err

    # The restart trains nothing before there is room.
    (victim,) = pids_of_rank(run, 1)
    os.kill(victim, signal.SIGKILL)
    started.says("the restart waits until there is room", timeout_s=120)
    assert "resuming from" not in started.err
    (disk / "ballast").unlink()
    counted.release(19)
    counted.wait_for(25, started, num_ranks=2)
    wait_until(lambda: [*checkpoints.glob("step-*24")], 60, started.story)
    assert "restart 1 of 1" in started.err and "megaclass: resuming from" in started.err

    # Full to the end: the finished run stays in memory until there is room.
    fill(disk)
    counted.release(25)
    started.says("the finished run stays in memory", timeout_s=120)
    (disk / "ballast").unlink()
    assert started.wait(200) == 0, started.story()
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-000000030"]
    rows = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(2, 31, 2)), "rows that the disk refused were written later"


def test_where_one_rank_cannot_write_the_last_save_the_last_words_name_it(run, tmp_path):
    counted = CountedRun(tmp_path / "count", run_dir=tmp_path / "run")
    counted.hold(5)
    started = run.start("-np", "2", *counted.train("train.epochs=1"), env=counted.env)
    counted.wait_for(5, started, num_ranks=2)
    # Rank 1 may open no further files in the last step, so only its part of the checkpoint fails.
    for pid in pids_of_rank(run, 1):
        subprocess.run(["prlimit", f"--pid={pid}", "--nofile=3:3"], check=True)
    counted.release(5)
    assert started.wait(200) == 74, started.story()
    last_words = started.err[started.err.rindex("the first to fail was") :]
    assert "the first to fail was rank 1 on " in last_words, started.story()
    assert "Too many open files" in last_words
