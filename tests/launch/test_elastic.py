"""Elastic jobs with real processes on this machine: `localhost` and `127.0.0.1` are two hosts."""

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from tests.launch.conftest import wait_until

JOB = [sys.executable, str(Path(__file__).with_name("elastic_job.py"))]

# A worker without torch, quick to start: it trains by sleeping, and fails or ends by files next to it.
_QUICK = """
import os, sys, time
from pathlib import Path
from megaclass_launch.rank_status import own_status
from megaclass_launch.elastic import Why, elastic_worker
folder = Path(__file__).parent
worker, why = elastic_worker(), Why.START
def is_there(name):
    return (folder / name).exists()
while True:
    here = worker.rendezvous(why)
    print(f"generation {here.generation} rank {here.world.rank} of {here.world.size} pid {os.getpid()}", flush=True)
    broken = []
    worker.when_broken(lambda: broken.append(1))
    while True:
        time.sleep(0.02)
        worker.committed()
        if is_there("end"):
            sys.exit(0)
        if is_there(f"hang-{here.world.rank}"):
            (folder / f"hang-{here.world.rank}").unlink()
            own_status().give_stacks("", "no step has finished", "train.hang_after_s")
            own_status().progress(step=1, allowed_s=1.0)
            time.sleep(600)
        if is_there(f"exit-{here.world.rank}"):
            code = int((folder / f"exit-{here.world.rank}").read_text())
            (folder / f"exit-{here.world.rank}").unlink()
            sys.exit(code)
        if has_failed := is_there(f"fail-{here.world.rank}"):
            (folder / f"fail-{here.world.rank}").unlink()
        if has_failed or broken or worker.hosts_changed():
            why = Why.FAILED if has_failed or broken else Why.CHANGED
            break
"""


@pytest.fixture
def hosts(tmp_path):
    """A discovery script that prints the file `hosts`; hosts("localhost:2") writes it."""
    file, script = tmp_path / "hosts", tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {file}\n")
    script.chmod(0o755)

    def write(text: str) -> str:
        new = tmp_path / "hosts.new"
        new.write_text(text)
        new.rename(file)
        return str(script)

    return write


@pytest.fixture
def quick(tmp_path) -> list[str]:
    file = tmp_path / "quick.py"
    file.write_text(_QUICK)
    return [sys.executable, str(file)]


def pid_of(run, rank: int) -> int:
    """The process that had the rank in the last generation that printed it."""
    return int(re.findall(rf"^\[{rank}\]<stdout>:.*pid (\d+)", run.out, re.MULTILINE)[-1])


def pids(run) -> dict[int, int]:
    return {int(rank): int(pid) for pid, rank in re.findall(r"pid (\d+) rank (\d+) of", run.out)}


def test_a_training_survives_killed_workers_and_hosts_that_come_and_go_without_losing_a_sample(run, hosts, tmp_path):
    script, stop = hosts("localhost:2"), tmp_path / "stop"
    options = ("--min-np", "1", "--max-np", "4", "--blacklist-cooldown-range", "1", "2")
    job = run.start(*options, "--host-discovery-script", script, *JOB, "400", "100000", "0.05", str(stop))
    job.says("from epoch 0", 2, timeout_s=90)
    first = pids(job)
    # An added host joins without a restart of the others.
    hosts("localhost:2\n127.0.0.1:1\n")
    job.says("generation 2: 3 ranks on localhost:2, 127.0.0.1:1; before: 2.", timeout_s=90)
    job.says("rank 2 of 3 from epoch", timeout_s=60)
    # Nonsense, then a failing script: the last good answer stands.
    hosts("<html>\n")
    job.says("its last good answer stands", timeout_s=30)
    Path(script).write_text("#!/bin/sh\nexit 7\n")
    job.says("ended with exit code 7; its last good answer stands", timeout_s=30)
    # Rank 0 is killed: its state is on the others, and its slot is filled again.
    os.kill(first[0], signal.SIGKILL)
    job.says(f"rank 0 on localhost (pid {first[0]}) ended with signal SIGKILL; 2 rank(s) continue.", timeout_s=30)
    job.says("generation 3: 2 ranks on localhost:1, 127.0.0.1:1; before: 3.", timeout_s=30)
    job.says("s after the failure.", timeout_s=30)
    job.says("generation 4: 3 ranks on localhost:2, 127.0.0.1:1; before: 2.", timeout_s=90)
    # A removed host leaves at the next commit.
    Path(script).write_text(f"#!/bin/sh\ncat {Path(script).with_name('hosts')}\n")
    hosts("localhost:2\n")
    job.says("127.0.0.1 was removed", timeout_s=30)
    job.says("generation 5: 2 ranks on localhost:2; before: 3.", timeout_s=30)
    job.says(f"pid {first[1]} rank 0 of 2 from epoch", 2, timeout_s=30)
    stop.touch()
    assert job.wait(150) == 0, job.story()
    ends = re.findall(r"end: (\d+) samples lost, (\d+) repeated, \d+ steps, weights (.*)", job.out)
    assert len(ends) == 2 and len(set(ends)) == 1 and ends[0][:2] == ("0", "0"), job.story()
    # The process that was never killed is the same from the first generation to the last.
    survivors = re.findall(rf"pid {first[1]} rank (\d) of (\d)", job.out)
    assert survivors == [("1", "2"), ("1", "3"), ("0", "2"), ("0", "3"), ("0", "2")]


def test_too_few_hosts_at_the_start_are_told_before_the_wait_ends(run, tmp_path):
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\nsleep 0.5\necho localhost:1\n")
    script.chmod(0o755)
    job = run.start("--min-np", "2", "--elastic-timeout", "1", "--host-discovery-script", str(script), "true")
    assert job.wait() == 255
    assert "1 rank(s) can run, but 2 are needed (--min-np): waiting for hosts" in job.err


def test_too_few_ranks_end_the_job_after_the_elastic_timeout(run, quick):
    job = run.start("--min-np", "2", "--elastic-timeout", "1", "-H", "localhost:2", *quick)
    job.says("generation 1 rank", 2)
    os.kill(pid_of(job, 1), signal.SIGKILL)
    assert job.wait() == 137
    assert "localhost gets no new ranks (no --blacklist-cooldown-range)" in job.err
    assert (
        "1 rank(s) can run, but 2 are needed (--min-np): waiting for hosts for up to 1 s (--elastic-timeout)" in job.err
    )
    assert "no new generation: 1 rank(s) can run, 2 are needed (--min-np)" in job.err
    assert "the first to fail was rank 1 on localhost" in job.err


def test_a_host_file_is_read_again_and_a_reset_limit_ends_the_job(run, quick, tmp_path):
    file = tmp_path / "hostfile"
    file.write_text("localhost slots=1\n")
    job = run.start("--min-np", "1", "--reset-limit", "1", "--hostfile", str(file), *quick)
    job.says("generation 1 rank 0 of 1")
    file.write_text("localhost slots=2\n")
    job.says("generation 2 rank 1 of 2")
    assert pid_of(job, 0) == int(re.search(r"generation 1 rank 0 of 1 pid (\d+)", job.out)[1])
    (tmp_path / "exit-1").write_text("3")
    assert job.wait() == 3
    assert "no new generation: the ranks have changed 1 times (--reset-limit)" in job.err


def test_exit_code_2_ends_the_job(run, quick, tmp_path):
    """The tests below end with exit code 0, which finishes it."""
    job = run.start("--min-np", "1", "-np", "3", *quick)
    job.says("generation 1 rank", 3)
    (tmp_path / "exit-2").write_text("2")
    assert job.wait() == 2
    assert "ended with exit code 2; the other 2 are being stopped" in job.err


def test_a_rank_that_had_not_finished_when_another_one_ended_with_0_is_named(run, quick, tmp_path):
    job = run.start("--min-np", "1", "-np", "2", *quick)
    job.says("generation 1 rank", 2)
    (tmp_path / "exit-1").write_text("0")
    (tmp_path / "fail-0").touch()
    assert job.wait() == 0
    assert "WARNING rank 0 on localhost had not finished when another rank ended with exit code 0" in job.err


def test_a_program_that_is_not_elastic_ends_with_its_first_rank_that_fails(run, script):
    done = run("--min-np", "1", "-np", "3", *script("meet(); sys.exit(5) if rank == 1 else time.sleep(60)"))
    assert done.code == 5
    assert "rank 1 on localhost" in done.err and "the other 2 are being stopped" in done.err


def test_all_hosts_can_be_replaced_one_generation_after_the_other(run, quick, hosts, tmp_path):
    job = run.start("--min-np", "2", "--host-discovery-script", hosts("localhost:2"), *quick)
    job.says("generation 1 rank", 2)
    old = {pid_of(job, 0), pid_of(job, 1)}
    hosts("127.0.0.1:2\n")
    job.says("generation 3: 2 ranks on 127.0.0.1:2; before: 4.")
    job.says("generation 3 rank", 2)
    assert old.isdisjoint({pid_of(job, 0), pid_of(job, 1)})
    wait_until(lambda: not old & set(run.processes()), what="the end of the old ranks")
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_a_stopped_rank_is_replaced_and_cannot_return(run, quick, tmp_path):
    options = ("--min-np", "1", "-np", "2", "--heartbeat", "2", "--blacklist-cooldown-range", "1", "1")
    job = run.start(*options, *quick)
    job.says("generation 1 rank", 2)
    stopped = pid_of(job, 1)
    os.kill(stopped, signal.SIGSTOP)
    job.says("is stopped: it received SIGSTOP; SIGCONT lets it continue. If it stays stopped, it is killed.")
    job.says("ended with signal SIGKILL; 1 rank(s) continue.")
    job.says("generation 2: 1 rank on localhost:1; before: 2.")
    job.says("generation 3: 2 ranks on localhost:2; before: 1.")
    assert stopped not in run.processes()
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_a_rank_that_hangs_by_its_own_account_is_killed_and_the_others_go_on(run, quick, tmp_path):
    job = run.start("--min-np", "1", "-np", "3", *quick)
    job.says("generation 1 rank", 3)
    hung = pid_of(job, 1)
    (tmp_path / "hang-1").touch()
    job.says("(train.hang_after_s): the ranks leave generation 1, and one that has not left within 20 s is killed.")
    job.says("rank 1 on localhost did not leave generation 1 within 20 s and is killed.")
    job.says(f"rank 1 on localhost (pid {hung}) ended with signal SIGKILL; 2 rank(s) continue.")
    job.says("generation 2: 2 ranks on localhost:2; before: 3.")
    job.says("generation 2 rank", 2)
    (tmp_path / "end").touch()
    assert job.wait() == 0


_TRAINS = """
import os, sys, threading, time
from pathlib import Path
has_started = threading.Event()

def print_while_starting():
    while not has_started.wait(1):
        print("starting", flush=True)

threading.Thread(target=print_while_starting, daemon=True).start()
import torch
import horovod.torch as hvd
folder = Path(__file__).parent

@hvd.elastic.run
def train(state):
    has_started.set()
    print(f"rank {hvd.rank()} of {hvd.size()} pid {os.getpid()} port {os.environ['MASTER_PORT']}", flush=True)
    while not state.is_stopped:
        if (file := folder / f"hang-{hvd.rank()}").exists():
            file.unlink()
            time.sleep(600)
        hvd.allreduce(torch.ones(3), name="gradient")
        state.is_stopped = hvd.broadcast_object((folder / "end").exists(), 0)
        time.sleep(0.02)
        state.commit()

hvd.init()
train(hvd.elastic.TorchState(torch.nn.Linear(1, 1), is_stopped=False))
"""


@pytest.fixture
def trains(tmp_path) -> list[str]:
    """An elastic program of hvd that trains until the file `end` appears."""
    file = tmp_path / "trains.py"
    file.write_text(_TRAINS)
    return [sys.executable, str(file)]


def test_with_a_hang_timeout_the_verdict_names_the_rank_and_the_others_go_on(run, trains, tmp_path):
    logs = tmp_path / "logs"
    job = run.start("--min-np", "1", "-np", "3", "--hang-timeout", "10", "--output-filename", str(logs), *trains)
    job.says("of 3 pid", 3, timeout_s=90)
    hung = pid_of(job, 1)
    (tmp_path / "hang-1").touch()
    job.says("the ranks leave generation 1, and one that has not left within 20 s is killed.", timeout_s=60)
    where = r"rank 1 \(localhost\): in \S+/trains\.py:\d+ \(train\)"
    verdict = rf"generation 1 hangs\. {where}; the other 2 ranks wait for it in allreduce of gradient\."
    assert re.search(verdict, job.err), job.story()
    # The driver's own watch, or the report of a rank that waits: whichever looks first.
    what = r"(a collective has not finished|no rank has printed anything or made progress \(--hang-timeout\))"
    assert re.search(rf"{what} for \d+ s: the ranks leave generation 1", job.err), job.story()
    job.says(f"rank 1 on localhost (pid {hung}) ended with signal SIGKILL; 2 rank(s) continue.", timeout_s=60)
    job.says("generation 2: 2 ranks on localhost:2; before: 3.", timeout_s=60)
    job.says("generation 2 trains", timeout_s=60)
    assert "in train" in (logs / "rank.1" / "stacks").read_text()
    (tmp_path / "end").touch()
    assert job.wait() == 0, job.story()


def test_a_chosen_port_is_that_of_every_generation(run, trains, tmp_path):
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    options = ("--min-np", "1", "-np", "3", "--master-port", str(port), "--blacklist-cooldown-range", "1", "1")
    job = run.start(*options, *trains)
    job.says("of 3 pid", 3, timeout_s=90)
    # Rank 0 leaves, and another process listens at the port; then one that does not listen leaves.
    os.kill(pid_of(job, 0), signal.SIGKILL)
    job.says("generation 3: 3 ranks on localhost:3; before: 2.", timeout_s=90)
    job.says("rank 2 of 3 pid", 2, timeout_s=60)
    os.kill(pid_of(job, 2), signal.SIGKILL)
    job.says("generation 4: 2 ranks on localhost:2; before: 3.", timeout_s=60)
    (tmp_path / "end").touch()
    assert job.wait(90) == 0, job.story()
    assert set(re.findall(r"pid \d+ port (\d+)", job.out)) == {str(port)}, job.story()


def test_a_chosen_port_that_is_in_use_refuses_the_host(run, quick):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--min-np", "1", "-np", "2", "--master-port", str(port), *quick)
    assert done.code == 2, done.story()
    assert f"Port {port} is in use on " in done.err and "leave --master-port out" in done.err, done.story()


def test_ctrl_c_ends_an_elastic_job(run, quick):
    job = run.start("--min-np", "1", "-np", "2", *quick)
    job.says("generation 1 rank", 2)
    job.send(signal.SIGINT)
    assert job.wait() == 130
    run.seconds_until_nothing_is_left()
