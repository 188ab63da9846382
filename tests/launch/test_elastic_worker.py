"""The worker's side of an elastic job, against the agent's end of its channel."""

import contextlib
import os
import socket
import threading
from dataclasses import asdict

import pytest

from megaclass_launch.elastic import Channel, Dismissed, ElasticWorker, Why
from megaclass_launch.errors import LaunchError
from megaclass_launch.wire.protocol import ProtocolError
from megaclass_launch.world import World


@pytest.fixture
def agent_and_worker(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    agent = Channel(ours)
    yield agent, ElasticWorker(Channel(theirs))
    ours.close()
    theirs.close()


def assignment(generation: int = 3, **more):
    members = [
        {"host": "a", "slot": 0, "previous_rank": 1},
        {"host": "a", "slot": 2, "previous_rank": 3},
        {"host": "b", "slot": 0, "previous_rank": None},
    ]
    return {
        "say": "assignment", "generation": generation, "token": f"token {generation}", "members": members,
        "world": asdict(World(rank=1, size=3, local_rank=1, local_size=2, port=5)),
        "previous_size": 4, "needs_sync": True, "has_progressed": True, "env": {"RANK": "1", "WORLD_SIZE": "3"}, **more,
    }  # fmt: skip


def test_a_worker_learns_its_place_in_the_next_generation(agent_and_worker):
    agent, worker = agent_and_worker
    agent.send(assignment())
    here = worker.rendezvous(Why.START)
    assert agent.receive() == [{"do": "ready", "why": "start", "token": ""}]
    assert (here.generation, here.world.rank, here.world.size, here.previous_rank) == (3, 1, 3, 3)
    assert here.lost_ranks() == (0, 2)
    assert os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "3"
    worker.committed()
    worker.committed()
    worker.failed("rank 2 is gone")
    agent.send(assignment(4))
    worker.rendezvous(Why.FAILED)
    assert agent.receive() == [
        {"do": "committed", "token": "token 3"},
        {"do": "failed", "text": "rank 2 is gone", "token": "token 3"},
        {"do": "ready", "why": "failed", "token": "token 3"},
    ]


def test_a_change_of_hosts_counts_only_in_the_generation_it_was_announced_to(agent_and_worker):
    agent, worker = agent_and_worker
    agent.send(assignment())
    worker.rendezvous(Why.START)
    assert not worker.hosts_changed()
    agent.send({"say": "changed", "token": "token 2"})
    assert not worker.hosts_changed()
    agent.send({"say": "changed", "token": "token 3", "only_removals": True})
    assert worker.hosts_changed() and worker.has_only_removals
    agent.send(assignment(4))
    worker.rendezvous(Why.CHANGED)
    assert not worker.hosts_changed()
    # A change that arrives together with the assignment.
    agent.send(assignment(5))
    agent.send({"say": "changed", "token": "token 5"})
    worker.rendezvous(Why.CHANGED)
    assert worker.hosts_changed() and not worker.has_only_removals


def test_a_dismissed_worker_ends_with_exit_code_0_and_one_without_an_agent_says_so(agent_and_worker):
    agent, worker = agent_and_worker
    agent.send({"say": "dismissed", "why": "host b has left the job"})
    with pytest.raises(Dismissed) as end:
        worker.rendezvous(Why.CHANGED)
    assert (end.value.code, end.value.why) == (0, "host b has left the job")
    with pytest.raises(LaunchError, match=r"waited 0\.01 s for the next generation"):
        worker.rendezvous(Why.CHANGED, timeout_s=0.01)
    agent.close()
    with pytest.raises(LaunchError, match="its agent is gone"):
        worker.rendezvous(Why.CHANGED)


@pytest.mark.parametrize("line", [b"{]\n", b"[1]\n", b"\xff\n", b"[" * 100_000 + b"\n", b"x" * (5 << 20)])
def test_a_line_that_is_no_message_is_refused(line):
    ours, theirs = socket.socketpair()
    reader = Channel(theirs)

    def send() -> None:
        # The reader gives up before it has read all of a line that is too long.
        with contextlib.suppress(BrokenPipeError):
            ours.sendall(line)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(ProtocolError, match=r"is not a message|a line of more than"):
        while True:
            reader.receive()
    reader.close()
    ours.close()
    sender.join()
