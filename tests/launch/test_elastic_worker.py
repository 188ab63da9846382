"""The worker's side of an elastic job, against the agent's end of its channel."""

import os
import socket
from dataclasses import asdict

import pytest

from megaclass.errors import LaunchError
from megaclass.launch.elastic.channel import Channel, ChannelError, worker_key
from megaclass.launch.elastic.worker import Dismissed, ElasticWorker, Why
from megaclass.world import World

KEY = worker_key("ab" * 32, 7)


@pytest.fixture
def agent_and_worker(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    agent = Channel(ours, KEY, is_agent=True)
    yield agent, ElasticWorker(Channel(theirs, KEY, is_agent=False))
    ours.close()
    theirs.close()


def assignment(generation: int = 3, **more):
    members = [
        {"worker": 4, "host": "a", "slot": 0, "previous_rank": 1},
        {"worker": 7, "host": "a", "slot": 2, "previous_rank": 3},
        {"worker": 9, "host": "b", "slot": 0, "previous_rank": None},
    ]
    return {
        "say": "assignment", "generation": generation, "token": f"token {generation}", "worker": 7, "members": members,
        "world": asdict(World(rank=1, size=3, local_rank=1, local_size=2, port=5)), "secret": "cd" * 32,
        "previous_size": 4, "needs_sync": True, "env": {"RANK": "1", "WORLD_SIZE": "3"}, **more,
    }  # fmt: skip


def test_a_worker_learns_its_place_in_the_next_generation(agent_and_worker):
    agent, worker = agent_and_worker
    agent.send(assignment())
    here = worker.rendezvous(Why.START)
    assert agent.receive() == [{"do": "ready", "why": "start", "token": ""}]
    assert (here.generation, here.world.rank, here.world.size, here.previous_rank) == (3, 1, 3, 3)
    assert here.lost_ranks() == (0, 2)
    assert os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "3"
    worker.committed(20)
    worker.committed(30)
    worker.failed("rank 2 is gone")
    agent.send(assignment(4))
    worker.rendezvous(Why.FAILED)
    assert agent.receive() == [
        {"do": "committed", "step": 20, "token": "token 3"},
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


def test_a_line_that_the_other_end_did_not_sign_is_refused_before_it_is_parsed(agent_and_worker):
    ours, theirs = socket.socketpair()
    reader = Channel(theirs, KEY, is_agent=False)
    lines = []
    for key, is_agent in ((worker_key("ab" * 32, 8), True), (KEY, False)):
        stranger, copy = socket.socketpair()
        Channel(stranger, key, is_agent=is_agent).send({"say": "changed"})
        lines.append(copy.recv(4096))
    for line in (*lines, b"{]\n", b"0" * 64 + b" {]\n"):
        ours.sendall(line)
        with pytest.raises(ChannelError, match="without a valid signature"):
            reader.receive()
        reader = Channel(theirs, KEY, is_agent=False)
    # A genuine line, sent twice.
    stranger, copy = socket.socketpair()
    Channel(stranger, KEY, is_agent=True).send({"say": "changed"})
    line = copy.recv(4096)
    ours.sendall(line)
    assert reader.receive() == [{"say": "changed"}]
    ours.sendall(line)
    with pytest.raises(ChannelError):
        reader.receive()
