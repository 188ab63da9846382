"""Function and results of run() on the launcher's pipes: no port, whole results only, and errors by rank."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.common.exceptions import SHUT_DOWN
from horovod.runner import run_function
from horovod.runner.run_function import _by_rank, run
from megaclass_launch.wire.agent_messages import AgentMessageChecker
from megaclass_launch.wire.call import CALL_FDS, SIZE, AgentCall, CallPipes
from megaclass_launch.wire.protocol import ProtocolError


def _listening_ports(pid: int) -> list[str]:
    """Returns the local addresses on which a process listens, from /proc."""
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ports_above() -> tuple[list[int], list[list[str]]]:
    """Runs on a rank: looks at the launcher and at the process that called run()."""
    launcher = _parent(os.getppid())
    pids = [launcher, _parent(launcher)]
    return pids, [_listening_ports(pid) for pid in pids]


def _environment_and_result(size: int) -> tuple[bool, bytes]:
    return CALL_FDS in os.environ, bytes(size)


@pytest.mark.ranks
def test_neither_the_caller_nor_the_launcher_listens_on_a_port():
    # Earlier tests in this process may have left a port open, such as that of a store.
    before = _listening_ports(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [new] = set(_listening_ports(os.getpid())) - set(before)
        assert new.endswith(f":{port:04X}")
    [(pids, [of_launcher, of_caller])] = run(_ports_above, num_proc=1)
    assert pids[1] == os.getpid()
    assert of_launcher == [] and set(of_caller) <= set(before)


@pytest.mark.ranks
def test_a_result_larger_than_any_pipe_arrives_whole_and_the_pipes_stay_unknown_to_other_processes():
    assert run(_environment_and_result, (5_000_000,), num_proc=2) == [(False, bytes(5_000_000))] * 2


def test_the_launcher_gets_the_options_and_no_secret(monkeypatch):
    seen = []

    def popen(command: list[str], **given: object) -> object:
        seen.append((command, given))
        raise OSError("not started")

    monkeypatch.setattr(run_function.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="not started"):
        run(abs, (1,), num_proc=2, start_timeout=77, ssh_port=2222, ssh_identity_file="key", output_filename="out",
            verbose=True, executable="/other/python")  # fmt: skip
    [(command, given)] = seen
    text = " ".join(command)
    assert "--verbose --start-timeout 77 --ssh-port 2222 --ssh-identity-file key --output-filename out" in text
    assert "--num-proc 2 --hosts localhost:2 /other/python -P -m horovod.runner.run_function_worker" in text
    assert given["env"]["HOROVOD_START_TIMEOUT"] == "77"


def _received(results: dict[int, tuple[bool, object]]) -> dict[int, bytearray]:
    packed = {rank: pickle.dumps((*answer, rank)) for rank, answer in results.items()}
    return {rank: bytearray(SIZE.pack(len(data)) + data) for rank, data in packed.items()}


def test_results_come_by_rank_whatever_the_order_of_the_answers():
    assert _by_rank(_received({2: (True, "c"), 0: (True, "a"), 1: (True, "b")}), 3, 0) == ["a", "b", "c"]


def test_an_elastic_job_returns_what_the_ranks_sent_that_it_ends_with():
    answers = {2: (True, "c"), 0: (False, "was lost"), 1: (True, "b")}
    assert _by_rank(_received(answers), None, 0) == ["b", "c"]
    with pytest.raises(RuntimeError, match="was lost"):
        _by_rank(_received(answers), None, 1)


def test_a_rank_that_fails_is_shown_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"Process name: 1\nExit code: 1\ntraceback of rank 1"):
        _by_rank(_received({0: (True, 1), 1: (False, "traceback of rank 1")}), 2, 1)


def test_a_rank_that_sends_no_result_or_a_part_of_one_is_an_error():
    received = _received({0: (True, 1), 1: (True, 2)})
    del received[1][-1]
    with pytest.raises(RuntimeError, match="Process name: unknown, see the output above\nExit code: 0"):
        _by_rank(received, 2, 0)


def test_of_several_failures_the_one_that_is_no_consequence_is_shown():
    failures = [(0, f"HorovodInternalError: {SHUT_DOWN}"), (2, "KeyError: 'cause'")]
    assert "Process name: 2" in run_function._failed(failures, 1)
    assert "Process name: 0" in run_function._failed(failures[:1], 1)


def test_a_call_that_is_too_large_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(run_function, "MAX_CALL_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1,000 can be sent"):
        run(len, (bytes(2000),))


def test_an_agent_may_send_results_of_its_own_ranks_only_and_only_in_a_job_with_a_function():
    result = {"say": "output", "rank": 1, "stream": "result"}
    assert AgentMessageChecker([1], has_call=True).checked(result, b"x", is_running=True) == result
    with pytest.raises(ProtocolError, match="stream"):
        AgentMessageChecker([1]).checked(result, b"x", is_running=True)
    with pytest.raises(ProtocolError, match="a rank of this host"):
        AgentMessageChecker([0], has_call=True).checked(result, b"x", is_running=True)


@pytest.mark.ranks
def test_a_call_passes_the_driver_and_the_agent_unchanged():
    call = os.urandom(1_200_000)
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"],
        stdin=subprocess.PIPE, stdout=writer,
    ) as source:  # fmt: skip
        os.close(writer)
        assert source.stdin is not None
        source.stdin.write(SIZE.pack(len(call)) + call)
        source.stdin.close()
        pipes = CallPipes((reader, reader))
    os.close(reader)
    agent = AgentCall()
    for message in pipes.messages():
        agent.add(message["data"])
    with agent.pipe() as (env, fds, result_fd):
        assert env == {CALL_FDS: f"{fds[0]},{fds[1]}"}
        assert os.pread(fds[0], 2_000_000, 0) == call
        assert result_fd is not None
    assert os.read(result_fd, 1) == b""
    os.close(result_fd)
