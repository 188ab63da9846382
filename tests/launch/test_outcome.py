"""The outcome of a job, the limit of its restarts and the table of launchers."""

import importlib
import inspect
import time
from types import SimpleNamespace

import pytest

from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job import JobState
from megaclass_launch.driver.job_end import resume
from megaclass_launch.driver.outcome import RESUME_ME, Outcome, OutcomeDecision, Reason, RestartLimit
from megaclass_launch.hosts import Host
from megaclass_launch.launchers import LAUNCHERS
from megaclass_launch.options import parse_options
from megaclass_launch.signals import InterruptLadder

FAILED = Outcome(exit_code=9, failed_hosts=("h1",))
OTHER = Outcome(exit_code=1)
INTERRUPTED = Outcome(exit_code=130, may_restart=False)
TERMINATED = Outcome(exit_code=143, may_restart=False)


@pytest.mark.parametrize(
    ("reasons", "final"),
    [
        ([], Outcome(exit_code=0)),
        ([(Reason.FAULT, FAILED), (Reason.FAULT, OTHER)], FAILED),
        ([(Reason.RESUME, RESUME_ME)], RESUME_ME),
        ([(Reason.RESUME, RESUME_ME), (Reason.FAULT, FAILED)], FAILED),
        ([(Reason.FAULT, FAILED), (Reason.RESUME, RESUME_ME)], FAILED),
        ([(Reason.FAULT, FAILED), (Reason.SIGNAL, INTERRUPTED)], INTERRUPTED),
        ([(Reason.SIGNAL, INTERRUPTED), (Reason.FAULT, FAILED)], INTERRUPTED),
        ([(Reason.SIGNAL, INTERRUPTED), (Reason.SIGNAL, TERMINATED)], TERMINATED),
    ],
)
def test_the_strongest_reason_counts_of_faults_the_first_and_of_signals_the_last(reasons, final):
    decision = OutcomeDecision()
    for reason, outcome in reasons:
        decision.decide(reason, outcome)
    assert decision.outcome == final


def test_a_rank_that_can_be_resumed_does_not_end_the_others():
    decision = OutcomeDecision()
    assert decision.decide(Reason.RESUME, RESUME_ME) and not decision.decide(Reason.RESUME, RESUME_ME)
    assert not decision.is_ending
    assert decision.decide(Reason.FAULT, FAILED) and decision.is_ending


def test_an_interrupt_keeps_the_report_about_the_first_fault():
    decision = OutcomeDecision()
    decision.decide(Reason.FAULT, FAILED, "rank 1 failed")
    decision.decide(Reason.FAULT, OTHER, "rank 2 failed")
    decision.decide(Reason.SIGNAL, INTERRUPTED)
    assert decision.report == "rank 1 failed"


def test_pauses_grow_with_short_starts_and_end_with_a_checkpoint():
    limit = RestartLimit()
    pauses = []
    for _ in range(8):
        limit.note(1.0, has_started=False, step=None)
        pauses.append(limit.pause_s())
    assert pauses == [0, 1, 3, 7, 15, 31, 60, 60]
    limit.note(1.0, has_started=True, step=5)
    assert limit.pause_s() == 0 and limit.why_not_again() is None


def test_ctrl_c_asks_then_insists_then_kills():
    ladder = InterruptLadder()
    assert [ladder.climb().name for _ in range(4)] == ["SIGINT", "SIGTERM", "SIGKILL", "SIGKILL"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_in_the_table_is_a_module_with_the_same_function(name):
    module = importlib.import_module(f"megaclass_launch.launchers.{name}")
    assert [*inspect.signature(module.launch).parameters] == ["options", "hosts"]


def test_rank_0_is_on_the_first_host_of_a_restart_in_whatever_order_the_hosts_come():
    """Ray chooses the nodes anew for each start."""
    a, b = Host(name="a", slots=1), Host(name="b", slots=1)
    io = SimpleNamespace(messages=None, output=None)
    job = JobState(parse_options(["-np", "2", "--restarts", "1", "true"]), io, [a, b])
    job.begin(1, [b, a])
    assert list(job.hosts.listed) == [worker.host for worker in job.ranks.rows] == ["b", "a"]


def test_ranks_that_save_after_one_has_left_to_be_resumed_are_not_taken_for_a_hang():
    messages = SimpleNamespace(say=lambda text: None, detail=lambda text: None)
    io = SimpleNamespace(messages=messages, output=None)
    options = parse_options(["-np", "2", "--hang-timeout", "30", "true"])
    job = JobState(options, io, [Host(name="a", slots=2, is_local=True)])
    job.ranks.has_started, job.printed_at = True, 0.0
    watch = HangWatch(job)
    resume(job, "rank 1 on a")
    watch.check(time.monotonic())
    assert job.take_orders() == [] and job.decision.outcome == RESUME_ME
