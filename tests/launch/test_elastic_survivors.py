"""What the survivors of an elastic job of hvd do after a failure or a change, with real processes on this machine.

`localhost` and `127.0.0.1` are two hosts.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.launch.conftest import wait_until

# The files next to the script steer it. Steps of 1 MB, so they run over gloo and do not travel with the negotiation.
_SCRIPT = """
import ctypes, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import horovod.torch as hvd
from megaclass_launch.elastic import ElasticWorker

folder = Path(__file__).parent
gloo_broadcast = dist.broadcast
def broadcast(*args, **kwargs):
    if hvd.rank() == 1 and (folder / "hang").exists():
        (folder / "hang").unlink()
        print("hangs", flush=True)
        # In native code, with the interpreter lock released, and whatever becomes of the connections.
        while True:
            ctypes.CDLL(None).sleep(600)
    return gloo_broadcast(*args, **kwargs)
dist.broadcast = broadcast

known = set()
rendezvous = ElasticWorker.rendezvous
def noted(worker, why):
    known.update(sys.modules)
    return rendezvous(worker, why)
ElasticWorker.rendezvous = noted

def after_reset():
    if hvd.size() == 2 and (folder / "hold-reset").exists():
        print("holds", flush=True)
        time.sleep(600)

@hvd.elastic.run
def train(state):
    late = sorted(name for name in set(sys.modules) - known if name.partition(".")[0] not in sys.stdlib_module_names)
    print(f"pid {os.getpid()} rank {hvd.rank()} of {hvd.size()} from step {state.step}; imported {late}", flush=True)
    while not (folder / "stop").exists():
        hvd.broadcast(torch.ones(250_000), 0, name="step")
        state.step += 1
        (folder / "step").write_text(str(state.step))
        state.commit()
        time.sleep(0.02)

if (folder / "slow").exists():
    print("imports", flush=True)
    while (folder / "slow").exists():
        time.sleep(0.02)
hvd.init()
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
state.register_reset_callbacks([after_reset])
train(state)
"""


@pytest.fixture
def job(run, tmp_path):
    """Starts the script with these options."""
    (tmp_path / "script.py").write_text(_SCRIPT)

    def start(*options: str):
        return run.start("--min-np", "1", *options, sys.executable, str(tmp_path / "script.py"))

    return start


@pytest.fixture
def hosts(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("localhost slots=1\n")
    return file


def pid_of(job, rank: int, size: int) -> int:
    return int(re.search(rf"pid (\d+) rank {rank} of {size}", job.out)[1])


def steps(folder: Path) -> int:
    return int((folder / "step").read_text() or 0) if (folder / "step").exists() else 0


def test_a_survivor_hung_in_a_broadcast_is_freed_after_5_s_and_trains_on(job, tmp_path):
    """Its engine thread stays in native code that no closed connection ends."""
    started = job("-np", "3")
    started.says("of 3 from step 0", 3, timeout_s=90)
    hung = pid_of(started, 1, 3)
    (tmp_path / "hang").touch()
    started.says("hangs")
    os.kill(pid_of(started, 0, 3), signal.SIGKILL)
    begun = time.monotonic()
    started.says("generation 2: 2 ranks on localhost:2; before: 3.")
    started.says("generation 2 trains")
    taken_s = time.monotonic() - begun
    assert pid_of(started, 0, 2) == hung
    (tmp_path / "stop").touch()
    assert started.wait() == 0, started.story()
    assert 5 <= taken_s < 15, started.story()


def test_a_script_whose_state_is_lost_ends_with_2_and_does_not_start_again_at_step_0(job, hosts, tmp_path):
    """The only rank with the state dies after a new rank has joined it, and before the state was sent."""
    started = job("--hostfile", str(hosts))
    started.says("rank 0 of 1 from step 0", timeout_s=90)
    old = pid_of(started, 0, 1)
    wait_until(lambda: steps(tmp_path) > 3)
    (tmp_path / "hold-reset").touch()
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    started.says("generation 2: 2 ranks", timeout_s=90)
    started.says("holds")
    os.kill(old, signal.SIGKILL)
    assert started.wait() == 2, started.story()
    assert "No rank of this elastic job holds the state of the training any more" in started.err
    assert started.out.count("from step 0") == 1


def test_ranks_train_on_while_a_new_one_imports_and_then_wait_for_no_import(job, hosts, tmp_path):
    started = job("--hostfile", str(hosts))
    started.says("rank 0 of 1 from step 0", timeout_s=90)
    (tmp_path / "slow").touch()
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    started.says("imports", timeout_s=60)
    first = steps(tmp_path)
    wait_until(lambda: steps(tmp_path) > first + 50)
    assert "generation 2" not in started.err
    (tmp_path / "slow").unlink()
    started.says("rank 1 of 2 from step", timeout_s=60)
    # All that the new rank needs was there when it said that it is ready, up to modules of Python itself.
    [imported] = re.findall(r"rank 1 of 2 from step \d+; imported (\[.*\])", started.out)
    assert imported == "[]"
    (tmp_path / "stop").touch()
    assert started.wait() == 0, started.story()


@pytest.mark.parametrize(
    ("options", "changed", "says"),
    [
        (["--reset-limit", "0"], "localhost slots=2\n", "the ranks have changed 0 times (--reset-limit)"),
        (["--min-np", "2", "--elastic-timeout", "1"], "127.0.0.1 slots=1\n", "2 are needed (--min-np)"),
    ],
    ids=["reset limit", "too few hosts"],
)
def test_a_job_that_no_failure_ends_but_its_limits_ends_with_255(job, hosts, options, changed, says):
    hosts.write_text(f"localhost slots=1\n{'127.0.0.1 slots=1' if '--min-np' in options else ''}\n")
    started = job(*options, "--hostfile", str(hosts))
    started.says("from step 0", 2 if "--min-np" in options else 1, timeout_s=90)
    hosts.write_text(changed)
    assert started.wait(90) == 255, started.story()
    assert "no new generation: " in started.err and says in started.err
