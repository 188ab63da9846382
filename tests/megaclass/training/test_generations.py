"""How a process lives through the generations of an elastic training, as far as that needs no second process."""

import threading
from types import SimpleNamespace

import pytest
import torch

from megaclass.training import commits as commits_module
from megaclass.training import generations
from megaclass.training.commits import Commits, HeldCommit
from megaclass.training.generations import joined_group
from megaclass_launch.elastic import Assignment, Member
from megaclass_launch.errors import ConnectionLostError
from megaclass_launch.world import World

CPU = torch.device("cpu")


def assignment(*, generation: int = 1, size: int = 1, has_progressed: bool = False) -> Assignment:
    members = tuple(Member(host="h", slot=rank, previous_rank=None) for rank in range(size))
    world = World(rank=0, size=size, local_size=size)
    return Assignment(
        generation=generation, token="t", world=world, members=members, previous_size=0,
        needs_sync=True, has_progressed=has_progressed,
    )  # fmt: skip


class Worker:
    """Stands for the elastic worker: the test says when a member is lost."""

    def __init__(self) -> None:
        self.has_removals = self.is_lost = False
        self.end = lambda: None

    def when_broken(self, end) -> None:
        self.end = end

    def is_broken(self) -> bool:
        return self.is_lost

    def hosts_changed(self) -> bool:
        return False


@pytest.mark.parametrize("hangs", [False, True])
def test_nccl_is_aborted_before_its_connections_end_which_an_abort_that_hangs_does_not_prevent(monkeypatch, hangs):
    """NCCL whose connection ends first reports an error to torch's watchdog, which prints pages and used to sleep."""
    events, may_end = [], threading.Event()

    def abort() -> None:
        events.append("abort")
        if hangs:
            may_end.wait()

    class Connections:
        def note_sockets(self) -> None:
            events.append("joined")

        def end(self) -> None:
            events.append("end")

    monkeypatch.setattr(generations, "abort_nccl", abort)
    monkeypatch.setattr(generations, "OwnConnections", Connections)
    monkeypatch.setattr(generations, "_ABORT_S", 0.2)
    worker = Worker()
    with joined_group(worker, assignment(), "cpu") as device:
        assert device == CPU
        worker.end()
    may_end.set()
    assert events == ["joined", "abort", "end"]


def test_a_member_that_is_lost_while_the_group_is_formed_is_noticed_before_the_first_step():
    worker = Worker()
    worker.is_lost = True
    with pytest.raises(ConnectionLostError, match="lost while the group was being formed"):
        joined_group(worker, assignment(), "cpu").__enter__()


def test_a_commit_counts_only_if_the_exchange_after_it_was_not_aborted(monkeypatch):
    """An operation of NCCL that is aborted raises nothing: its result is what was in that memory before."""
    commits = Commits(Worker(), interval=5)
    answers = []

    def gather(block, group):
        # By default what two ranks say that agree.
        return torch.stack([block, block]) if not answers else answers.pop()

    monkeypatch.setattr(commits_module, "gather_blocks", gather)
    monkeypatch.setattr(Commits, "_take", lambda self, place, model, step, device: _filled(self, place, step))
    assert commits.join(assignment(size=2), CPU) is None
    commits.commit(None, 5, CPU)
    # Of an earlier generation, of an earlier step, and never written.
    for stale in ([[9, 10, 0, 0]] * 2, [[1, 5, 0, 0]] * 2, [[1, 10, 0, 0], [-7, 3, 3, 3]]):
        answers.append(torch.tensor(stale))
        with pytest.raises((ConnectionLostError, AssertionError)):
            commits.commit(None, 10, CPU)
        plan = commits.join(assignment(size=2), CPU)
        assert plan is not None and plan.step == 5


def _filled(commits: Commits, place, step: int) -> HeldCommit:
    place.held = commits_module.NO_COMMIT
    return HeldCommit(1, step, 4, 0, 4, 0, 0)


@pytest.mark.parametrize("has_progressed", [False, True])
def test_a_generation_without_a_commit_is_that_of_a_lost_state_only_if_the_job_has_made_progress(
    monkeypatch, has_progressed
):
    monkeypatch.setattr(commits_module, "gather_blocks", lambda block, group: torch.stack([block, block]))
    commits = Commits(Worker(), interval=5)
    assert commits.join(assignment(size=2, has_progressed=has_progressed), CPU) is None
    assert commits.is_state_lost == commits.has_begun == has_progressed


def test_an_error_over_nccl_waits_for_the_news_of_a_lost_rank(monkeypatch):
    """A loss that is not a number may be what an aborted exchange has left in memory; over gloo it is this rank's own error."""
    asked = []
    worker = SimpleNamespace(is_broken=lambda timeout_s: asked.append(timeout_s))
    for is_on_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_on_gpu=is_on_gpu: is_on_gpu)
        generations._is_by_loss(worker, generations.UserError("the loss is nan"))
    assert asked == [0.0, 5.0]
