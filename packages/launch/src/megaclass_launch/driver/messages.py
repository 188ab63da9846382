"""The meaning of the agents' messages for the job. Standard library only.

Every message has been checked before it arrives here (wire/agent_messages.py): its fields have the right types, and it is about
workers of the agent that sent it.
"""

import time

from megaclass_launch.driver.agent_pipe import AgentPipe, PipeState
from megaclass_launch.driver.generations import dismiss_agent
from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job import JobState, Order
from megaclass_launch.driver.job_end import ban, end, end_because_of_silence, lose, note_failure, resume
from megaclass_launch.driver.outcome import Outcome, stopped_message
from megaclass_launch.driver.rank_table import WorkerRecord
from megaclass_launch.driver.start import greet
from megaclass_launch.elastic.worker import Why
from megaclass_launch.exit_codes import (
    EXIT_RESUME_ME,
    EXIT_USER_ERROR,
    exit_status,
    how_it_ended,
    is_worth_restarting,
)
from megaclass_launch.wire.agent_messages import RESULT_STREAM
from megaclass_launch.wire.protocol import Message


def on_message(job: JobState, hang_watch: HangWatch, agent: AgentPipe, message: Message, payload: bytes) -> list[Order]:
    """Handles one message of one agent; returns the orders that follow from it."""
    worker = job.ranks.rows[message["rank"]] if "rank" in message else None
    # A worker of an elastic job that has ended, or whose host was lost, may still be named by messages that were on their
    # way. What the children of a rank print after its end is shown in other jobs.
    if worker is not None and worker.code is not None and job.is_elastic:
        return []
    if worker is not None:
        _note_worker(job, agent, worker, message, payload)
    match message["say"]:
        case "hello":
            if problem := greet(job, agent, message):
                _refuse(job, agent, problem)
        case "refuse":
            _refuse(job, agent, f"{agent.name}: {message['why']}")
        case "started":
            job.ranks.note_pids(message["pids"])
            job.messages.detail(f"{agent.name}: started {message['pids']}")
        case "note":
            job.messages.say(f"{agent.name}: {message['text']}")
        case "progress":
            # Agents report on their own, so an older step may come later.
            job.checkpoint_step = max(job.checkpoint_step or 0, message["step"])
        case "spare":
            agent.ports = {"port": message["port"], "store_port": message["store_port"]}
        case "status" | "stacks" | "kept":
            hang_watch.note(agent, message, payload)
        case "done":
            _note_done(job, agent)
    return job.take_orders()


def _note_worker(job: JobState, agent: AgentPipe, worker: WorkerRecord, message: Message, payload: bytes) -> None:
    match message["say"]:
        case "output" if message["stream"] == RESULT_STREAM:
            job.output.put_result(worker.shown_rank, payload)
        case "output":
            job.printed_at = time.monotonic()
            # The last lines of a rank are kept from here on: if it fails, the report quotes them.
            worker.last_lines.add(job.output.put(worker.shown_rank, message["stream"], payload))
        case "exit":
            _note_exit(job, worker, message["pid"], message["code"])
        case "stopped":
            worker.stopped_at = time.monotonic()
            more = " If it stays stopped, it is killed." if job.is_elastic else ""
            job.messages.say(stopped_message(worker.shown_rank, agent.name, message["pid"]) + more)
        case "ready" | "committed" | "failed":
            # The token of a member is that of its generation; a new worker does not know any yet.
            if message["token"] == (job.generation_token if worker.rank is not None else ""):
                _note_state(job, worker, message)


def _note_state(job: JobState, worker: WorkerRecord, message: Message) -> None:
    match message["say"]:
        case "ready":
            job.is_aware = True
            worker.is_ready, worker.why = True, Why(message["why"])
            job.messages.detail(f"{worker.name} is ready ({worker.why})")
        case "failed":
            job.messages.detail(f"{worker.name} left: {message['text']}")
        case "committed":
            job.has_progressed = True
            # The job has made progress since: an earlier failure is not the reason if it ends later.
            if job.disturbed_at is not None and job.generation > job.failed_generation:
                seconds = time.monotonic() - job.disturbed_at
                job.first_failure = job.disturbed_at = None
                job.messages.say(f"generation {job.generation} trains, {seconds:.1f} s after the failure.")


def _note_exit(job: JobState, worker: WorkerRecord, pid: int, code: int) -> None:
    # The rest of its last line first, so the report about its end contains it.
    job.show_rest(worker)
    job.ranks.note_exit(worker, pid, code)
    # Once the ranks were told to end, their exit codes say nothing about the cause.
    if worker.is_leaving or job.is_ending:
        job.messages.detail(f"{worker.name} (pid {pid}) has left with {how_it_ended(code)}")
        return
    # Before the first generation every worker counts: one of a program that is not elastic never comes to the rendezvous.
    is_member = worker.rank is not None or not job.generation
    if code == 0 and is_member:
        job.is_finishing = job.is_elastic
        return
    if code == EXIT_RESUME_ME:
        resume(job, worker.name)
        return
    if not job.is_elastic and end_because_of_silence(job, worker.name, code):
        return
    # Exit code 2 is a mistake of the user's, which a restart would repeat.
    may_restart = is_worth_restarting(code) and not job.is_elastic
    outcome = Outcome(exit_code=exit_status(code) or 1, failed_hosts=(worker.host,), may_restart=may_restart)
    report = job.ranks.failure_report_of(worker) + job.output.where(worker.shown_rank)
    if _may_continue_without(job, code, is_member=is_member):
        num_left = len(job.ranks.members() if job.generation else job.ranks.staying())
        ended = f"{worker.name} (pid {pid}) ended with {how_it_ended(code)}"
        job.messages.say(f"{ended}; {num_left} rank(s) continue. {ban(job, worker.host)}")
        note_failure(job, outcome, report)
        return
    # At once, before the other ranks print their own errors about the one that is gone.
    job.messages.say(job.ranks.headline_of(worker))
    if not job.is_elastic and job.restart < job.options.restarts and not may_restart:
        job.messages.say(f"exit code {code} means that something has to be fixed first: no restart.")
    end(job, outcome, report=report)


def _may_continue_without(job: JobState, code: int, *, is_member: bool) -> bool:
    """Returns whether an elastic job continues with the other ranks after one has ended with this exit code."""
    # Exit code 2: something has to be fixed first. On a host that was about to join a job that runs well, it has to be
    # fixed there. A program that is not elastic ends with its first rank that fails.
    is_fault = code == EXIT_USER_ERROR and (is_member or not job.has_progressed)
    return job.is_elastic and not is_fault and not job.is_finishing and bool(job.is_aware or job.generation)


def _refuse(job: JobState, agent: AgentPipe, why: str) -> None:
    if job.is_elastic:
        job.messages.say(f"{why.rstrip('.')}. {ban(job, agent.name)}")
        note_failure(job, Outcome(exit_code=EXIT_USER_ERROR, may_restart=False), "")
        dismiss_agent(job, agent)
    elif agent.state is PipeState.STARTING:
        # It has answered, so the start does not wait for it any longer.
        agent.state = PipeState.READY
        job.problems.append((agent.name, why))
    else:
        job.messages.say(why)
        end(job, Outcome(exit_code=EXIT_USER_ERROR, failed_hosts=(agent.name,)))


def _note_done(job: JobState, agent: AgentPipe) -> None:
    is_in_use = job.agents.get(agent.name) is agent and agent.state is PipeState.RUNNING
    left = job.ranks.on_host(agent.name) if is_in_use else []
    # A host that leaves without having reported its ranks' ends must not turn a failure into a success.
    if left and not job.is_ending:
        lose(job, agent, f"says that it is done, but not how {left[0].name.partition(' on ')[0]} ended")
    else:
        job.finish(agent)
