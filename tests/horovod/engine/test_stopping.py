"""The protocol by which the controllers of all ranks end, without threads or sockets."""

from collections import deque

from horovod.engine.control_connection import MessageKind
from horovod.engine.stopping import Stopping


class _Wire:
    """One end of a connection: sending puts messages into a queue."""

    def __init__(self, sender: int, receiver: int, queue: deque[tuple[int, int, MessageKind, bytes]]) -> None:
        self._ends, self._queue = (sender, receiver), queue

    def send(self, kind: MessageKind, content: bytes = b"") -> None:
        self._queue.append((*self._ends, kind, content))


class _Job:
    def __init__(self, num_ranks: int) -> None:
        self._queue: deque[tuple[int, int, MessageKind, bytes]] = deque()
        self.closed: list[list[str]] = [[] for _ in range(num_ranks)]
        peers = [range(1, num_ranks), *([0] for _ in range(1, num_ranks))]
        self.ranks = [
            Stopping(rank, {peer: _Wire(rank, peer, self._queue) for peer in peers[rank]}, self.closed[rank].append)
            for rank in range(num_ranks)
        ]

    def deliver(self, without: int | None = None) -> None:
        """Delivers all messages, except those of and for a rank that is gone."""
        while self._queue:
            sender, receiver, kind, content = self._queue.popleft()
            if without in (sender, receiver):
                continue
            self.ranks[receiver].receive(sender, kind, content)

    def are_over(self) -> list[bool]:
        return [rank.is_over for rank in self.ranks]


def test_a_stop_of_any_rank_closes_all_of_them_with_its_reason():
    job = _Job(3)
    job.ranks[2].announce("rank 2 is done")
    assert job.closed == [[], [], []]
    job.deliver()
    assert job.closed == [["rank 2 is done"]] * 3
    assert job.are_over() == [True] * 3


def test_no_rank_is_over_before_all_have_answered():
    job = _Job(3)
    job.ranks[0].announce("end")
    assert job.are_over() == [False] * 3
    job.ranks[0].receive(1, MessageKind.DRAINED, b"")
    assert job.are_over() == [False] * 3
    job.ranks[0].receive(2, MessageKind.DRAINED, b"")
    assert job.ranks[0].is_over


def test_the_first_reason_stays():
    job = _Job(3)
    job.ranks[1].announce("the cause")
    job.deliver()
    job.ranks[0].announce("a consequence")
    assert [rank.reason for rank in job.ranks] == ["the cause"] * 3


def test_a_lost_rank_ends_the_job_and_is_not_waited_for():
    job = _Job(3)
    job.ranks[0].on_lost(2, "rank 2 is gone")
    job.deliver(without=2)
    assert job.are_over() == [True, True, False]
    assert job.closed == [["rank 2 is gone"], ["rank 2 is gone"], []]


def test_a_rank_lost_while_the_others_drain_keeps_the_first_reason():
    job = _Job(3)
    job.ranks[0].announce("the cause")
    job.ranks[0].on_lost(2, "rank 2 is gone")
    job.deliver(without=2)
    assert job.ranks[0].is_over and job.ranks[1].is_over
    assert job.closed[0] == ["the cause"]


def test_without_rank_0_a_rank_ends_at_once():
    job = _Job(3)
    job.ranks[1].on_lost(0, "rank 0 is gone")
    assert job.ranks[1].is_over and job.closed[1] == ["rank 0 is gone"]


def test_a_job_of_one_rank_has_no_answer_to_wait_for():
    job = _Job(1)
    job.ranks[0].announce("end")
    assert job.are_over() == [True] and job.closed == [["end"]]
