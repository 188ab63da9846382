"""Training whose disk is full for a while, under `megaclass run`: it goes on, and where it cannot, a restart is allowed."""

import json
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


def test_a_full_disk_costs_checkpoints_or_the_run_which_may_be_restarted_and_the_last_words_name_the_rank(
    run, tmp_path, disk
):
    """6 steps per epoch, each of which is saved: full from step 7 to 19, full from step 25 on, and then rank 1 alone fails."""
    counted = CountedRun(tmp_path / "count", run_dir=disk / "run")
    checkpoints = disk / "run" / "checkpoints"
    for step in (7, 19, 25):
        counted.hold(step)
    settings = ("train.epochs=5", "train.checkpoint_epochs=1", "train.keep_checkpoints=1", "train.report_steps=2")
    started = run.start("-np", "2", "--restarts", "1", *counted.train(*settings), env=counted.env)

    # Full for a while: two checkpoints are missing, and nothing else.
    counted.wait_for(7, started, num_ranks=2)
    wait_until(lambda: [*checkpoints.glob("step-*6")], 60, started.story)
    fill(disk)
    counted.release(7)
    counted.wait_for(19, started, num_ranks=2)
    started.says("training continues", timeout_s=60)
    (disk / "ballast").unlink()
    counted.release(19)
    counted.wait_for(25, started, num_ranks=2)
    wait_until(lambda: [*checkpoints.glob("step-*24")], 60, started.story)
    assert "cannot write the checkpoint" in started.err and "No space left on device" in started.err

    # Full to the end: after the last step, the last save is tried four times.
    counted.hold(29)
    fill(disk)
    counted.release(25)
    counted.wait_for(29, started, num_ranks=2)
    counted.release(29)
    started.says("the save is repeated in ", timeout_s=60)
    # All ranks have done the last step: the next start holds before it.
    counted.hold(29)
    started.says("ended with exit code 74", timeout_s=120)
    (disk / "ballast").unlink()

    # Rank 1 may open no further files in the last step, so that only its part of the checkpoint fails.
    counted.wait_for(29, started, num_ranks=4)
    assert "restart 1 of 1" in started.err and "megaclass: resuming from" in started.err
    ranks = [pid for pid in run.processes() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    for pid in ranks:
        subprocess.run(["prlimit", f"--pid={pid}", "--nofile=3:3"], check=True)
    counted.release(29)
    assert started.wait(200) == 74, started.story()
    last_words = started.err[started.err.rindex("the first to fail was") :]
    assert "the first to fail was rank 1 on " in last_words, started.story()
    assert "Too many open files" in last_words
    rows = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(2, 31, 2)), "rows that the disk refused were written later"
