"""How rank 0 serves the ranks: answers, payloads and the end of the job, without threads, sockets or tensors."""

from collections import deque

from horovod.common.settings import Settings
from horovod.engine.control_connection import MessageKind
from horovod.engine.messages import JOIN, Request, Sender, packed, short_hash, unpacked_responses
from horovod.engine.rank0 import Rank0
from horovod.engine.timeline import Timeline


class _Payloads:
    """The part of OperationRunner that rank 0 uses."""

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        return b"+".join(payloads)


class _Job:
    """Rank 0 and what it has sent to each rank."""

    def __init__(self, num_ranks: int = 2, **settings) -> None:
        self.sent: list[deque[tuple[MessageKind, bytes, bytes]]] = [deque() for _ in range(num_ranks)]
        self.is_closed = False
        self._lists: dict[bytes, list[Request]] = {}
        self._senders = [Sender(1024) for _ in range(num_ranks)]
        sends = {rank: lambda *message, to=queue: to.append(message) for rank, queue in enumerate(self.sent)}
        hosts, sets = list("abc"[:num_ranks]), {0: tuple(range(num_ranks)), 1: (1,)}
        self.rank0 = Rank0(
            hosts,
            Settings(**settings),
            sets,
            sends,
            lambda: self.is_closed,
            Timeline(),
            _Payloads(),
        )

    def announce(self, rank: int, *requests: Request, payload: bytes = b"") -> int:
        """A rank announces the list; returns the length of its message."""
        content = packed(requests)
        self._lists[short_hash(content)] = list(requests)
        message = self._senders[rank].message(content, short_hash(content), repeats=True)
        self.rank0.receive(rank, MessageKind.REQUESTS, message, payload)
        return len(message)

    def answers(self) -> list[tuple[list, bytes]]:
        """What each rank has been told since the last call: responses, and a payload."""
        found = [queue.popleft() for queue in self.sent if queue]
        assert not any(self.sent)
        return [(unpacked_responses(content, self._lists.__getitem__), payload) for _, content, payload in found]

    def kinds(self) -> list[list[MessageKind]]:
        return [[kind for kind, *_ in queue] for queue in self.sent]


def _request(name: str, count: int = 4) -> Request:
    return Request.of("allreduce", name, 0, ("float32",), ((count,),), 1)


def test_all_ranks_get_one_answer_and_a_list_that_repeats_costs_nine_bytes():
    job = _Job()
    for length in (200, 9):
        assert job.announce(1, _request("x"), _request("y")) <= length
        assert job.answers() == []
        assert job.announce(0, _request("x"), _request("y")) <= length
        (one, two) = job.answers()
        assert one == two
        assert [[request.name for request in response.requests] for response in one[0]] == [["x", "y"]]
        assert len(job.sent) == 2


def test_the_answer_to_a_list_that_all_ranks_announced_does_not_repeat_its_names():
    job = _Job()
    names = [_request(f"a_long_name_of_a_layer.{number}") for number in range(20)]
    for rank in range(2):
        job.announce(rank, *names)
    assert b"a_long_name" not in job.sent[1][0][1]


def test_payloads_of_all_ranks_come_back_combined():
    job = _Job()
    job.announce(1, _request("x"), payload=b"one")
    job.announce(0, _request("x"), payload=b"zero")
    assert [payload for _, payload in job.answers()] == [b"zero+one"] * 2
    job.announce(1, _request("x"), payload=b"one")
    job.announce(0, _request("x"))
    assert [payload for _, payload in job.answers()] == [b""] * 2


def test_a_mismatch_is_an_error_that_all_ranks_get():
    job = _Job()
    job.announce(1, _request("x", 5))
    job.announce(0, _request("x"))
    for responses, _ in job.answers():
        assert responses[0].error.startswith("Mismatched allreduce tensor shapes for 'allreduce.x'")


def test_when_all_ranks_have_joined_all_learn_which_was_the_last():
    job = _Job()
    for rank in (0, 1):
        job.announce(rank, JOIN)
    assert [responses[0].last_joined for responses, _ in job.answers()] == [1, 1]


def test_once_rank_0_is_closed_no_rank_is_told_to_run_anything():
    job = _Job()
    job.is_closed = True
    for rank in (0, 1):
        job.announce(rank, _request("x"))
    assert job.answers() == []


def test_missing_ranks_are_warned_about_and_end_the_job_in_the_end(caplog):
    job = _Job(stall_warning_s=60.0, stall_shutdown_s=300.0)
    job.announce(0, _request("x"))
    job.announce(1, _request("y"))
    begun = job.rank0.next_check()
    job.rank0.check_if_due(begun + 100.0)
    assert caplog.messages[-1].endswith("Missing ranks:\n0 (a): [allreduce.y]\n1 (b): [allreduce.x]")
    assert job.kinds() == [[], []]
    job.rank0.check_if_due(begun + 300.0)
    assert caplog.messages[-1].endswith("Will shutdown.") and job.rank0.reason == caplog.messages[-1]
    assert job.kinds() == [[MessageKind.STOP]] * 2


# ---- the end ----


def test_no_rank_is_over_before_all_have_answered():
    job = _Job(3)
    job.rank0.receive(2, MessageKind.STOP, b"rank 2 is done")
    assert [queue[0] for queue in job.sent] == [(MessageKind.STOP, b"rank 2 is done", b"")] * 3
    for rank in (1, 0):
        job.rank0.receive(rank, MessageKind.DRAINED)
        assert job.kinds() == [[MessageKind.STOP]] * 3
    job.rank0.receive(2, MessageKind.DRAINED)
    assert job.kinds() == [[MessageKind.STOP, MessageKind.END]] * 3


def test_the_first_reason_stays_and_a_lost_rank_is_not_waited_for():
    job = _Job(3)
    job.rank0.receive(1, MessageKind.STOP, b"the cause")
    job.rank0.on_lost(2, "a consequence")
    for rank in (0, 1):
        job.rank0.receive(rank, MessageKind.DRAINED)
    assert job.rank0.reason == "the cause"
    assert job.kinds() == [[MessageKind.STOP, MessageKind.END]] * 3


def test_a_lost_rank_ends_the_job():
    job = _Job(2)
    job.rank0.on_lost(1, "rank 1 is gone")
    assert job.sent[0][0] == (MessageKind.STOP, b"rank 1 is gone", b"")
    job.rank0.receive(0, MessageKind.DRAINED)
    assert job.kinds()[0] == [MessageKind.STOP, MessageKind.END]
