"""run(): a function on every rank, here and on other hosts; its results, its errors, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
from tests.horovod.jobs import error_of
from tests.launch.conftest import MARK, Bed, Run, bed, bed_of_the_session, environment, marked, wait_until  # noqa: F401 (fixtures)

import horovod
import horovod.torch as hvd


def _sum_of_ranks(offset: int, *, factor: int = 1) -> tuple[int, int]:
    hvd.init()
    return hvd.rank(), int(hvd.allreduce(torch.tensor(hvd.rank() + offset), op=hvd.Sum)) * factor


def _fails_on_rank_1() -> None:
    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("no such thing")
    hvd.barrier()


def _place(offset: int, *, factor: int = 1) -> tuple[int, ...]:
    total = _sum_of_ranks(offset, factor=factor)[1]
    return hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total


@pytest.mark.ranks
def test_two_names_of_this_machine_are_two_hosts_that_may_have_more_slots_than_there_are_processes(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\n127.0.0.1 slots=3\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        places = horovod.run(
            _place, (10,), {"factor": 2}, np=3, hostfile=str(hostfile), output_filename=str(tmp_path / "out")
        )
    assert places == [(0, 0, 1, 0, 2, 66), (1, 0, 2, 1, 2, 66), (2, 1, 2, 0, 1, 66)]
    assert "np is deprecated, use num_proc instead" in [str(warning.message) for warning in caught]


@pytest.mark.ranks
def test_the_error_tells_of_the_rank_that_failed_first():
    with pytest.raises(RuntimeError, match="one or more processes exited with non-zero status") as caught:
        horovod.run(_fails_on_rank_1, num_proc=2)
    assert "Process name: 1\n" in str(caught.value)
    assert "ValueError: no such thing" in str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"hosts": "localhost:1", "hostfile": "hosts"}, "ValueError", "hosts and hostfile only allow one"),
        ({"use_gloo": True, "use_mpi": True}, "ValueError", "use_gloo and use_mpi only allow one"),
        ({"use_mpi": True}, "ValueError", "MPI support has not been built"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "ValueError", "needs more slots than there are"),
        ({"hosts": "localhost"}, "ValueError", "expected <name>:<slots>"),
        ({"num_proc": 0}, "ValueError", "at least 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(given, error, text):
    name, said = error_of(lambda: horovod.run(_sum_of_ranks, (1,), **given))
    assert name == error
    assert text in said


def test_a_function_that_cannot_travel_says_so():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        horovod.run(lambda: lock)


_ELASTIC_SCRIPT = """
import os, sys
import horovod
import horovod.torch as hvd
import torch

def work(word):
    hvd.init()
    state = hvd.elastic.ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 5:
            if state.step == 2 and hvd.size() == 3 and hvd.rank() == 1:
                os._exit(3)
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
            state.step += 1
            state.commit()
        return hvd.rank(), total, word

    return train(state)

if __name__ == "__main__":
    print(horovod.run(work, ("hello",), min_num_proc=2, max_num_proc=3, reset_limit=2, **eval(sys.argv[1])))
"""


@pytest.mark.ranks
def test_an_elastic_job_returns_the_results_of_the_ranks_that_it_ends_with(tmp_path):
    script, hosts = tmp_path / "script.py", tmp_path / "hosts.sh"
    script.write_text(_ELASTIC_SCRIPT)
    hosts.write_text("#!/bin/sh\necho localhost:3\n")
    hosts.chmod(0o755)
    # A host whose process has failed is not used for new ones, but the processes that are left keep running.
    for given in ({"hosts": "localhost:3"}, {"host_discovery_script": str(hosts)}):
        command = [sys.executable, str(script), repr(given)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
        assert done.stdout.splitlines()[-1:] == ["[(0, 2.0, 'hello'), (1, 2.0, 'hello')]"], done.stderr


_MAIN_SCRIPT = """
import os, sys, time, torch
import horovod
import horovod.torch as hvd

def whose(word):
    hvd.init()
    where = os.uname().nodename
    return hvd.rank(), hvd.local_rank(), hvd.cross_rank(), where, word, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

def sleeps():
    hvd.init()
    print("asleep", flush=True)
    time.sleep(300)

if __name__ == "__main__":
    if sys.argv[1] == "sleeps":
        horovod.run(sleeps, num_proc=2)
    for hosts in sys.argv[2:] or [None]:
        print(horovod.run(whose, ("hello",), num_proc=int(sys.argv[1]), hosts=hosts), flush=True)
"""


@pytest.fixture
def main_script(tmp_path: Path) -> str:
    """A script whose own functions are run: they are not found by importing a module."""
    file = tmp_path / "main_script.py"
    file.write_text(textwrap.dedent(_MAIN_SCRIPT))
    return str(file)


@pytest.mark.ranks
def test_functions_of_the_main_script_travel(main_script):
    done = subprocess.run(
        [sys.executable, main_script, "2"], env=environment(), capture_output=True, text=True, timeout=150, check=True
    )
    name = os.uname().nodename
    assert done.stdout == f"{[(0, 0, 0, name, 'hello', 2.0), (1, 1, 0, name, 'hello', 2.0)]}\n"


@pytest.mark.ranks
def test_when_the_caller_is_killed_its_ranks_end(main_script):
    mark = os.urandom(8).hex()
    caller = Run([sys.executable, main_script, "sleeps"], {**environment(), MARK: mark}, is_wrapped=False)
    try:
        caller.says("asleep", times=2, timeout_s=150.0)
        caller.send(signal.SIGKILL)
        wait_until(lambda: not marked(mark), what="the end of the launcher and the ranks")
    finally:
        caller.process.kill()


def test_a_function_runs_on_other_hosts(bed: Bed, main_script, tmp_path):  # noqa: F811
    # ssh finds its configuration by the user's home, which all hosts of the bed share.
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {bed.folder / "ssh_config"} "$@"\n')
    wrapper.chmod(0o755)
    env = environment()
    env["PATH"] = f"{wrapper.parent}:{env['PATH']}"
    # The second job cannot start.
    command = bed.inside("h1", sys.executable, main_script, "3", "h1:2,h2:1", "nowhere:3")
    run = Run(command, env, is_wrapped=True)
    bed.runs.append(run)
    assert run.wait(timeout_s=150.0) == 1, run.story()
    expected = [(0, 0, 0, "h1"), (1, 1, 0, "h1"), (2, 0, 1, "h2")]
    assert f"{[(*place, 'hello', 3.0) for place in expected]}\n" in run.out
    assert "nowhere: its name cannot be resolved" in run.err
    assert "RuntimeError: Horovod detected that one or more processes exited with non-zero status" in run.err
