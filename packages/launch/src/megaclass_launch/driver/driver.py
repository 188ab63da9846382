"""The driver of `megaclass run`: it starts the ranks on all hosts and shows their output. Standard library only; no torch.

    options -> hosts -> plan -> JobRun (one loop around one JobState) -> exit code
                                  ^--- the next generation after a failure, with --restarts (JobRun.run)

The loop receives what the agents send, decides, and carries out the orders. States of one generation:

    connecting --all hosts said hello--> running --every agent is done or lost--> over
         |                                  |                                      ^
         | a host cannot take part,         | a rank fails, a host is lost,        |
         | or a signal                      | a signal, a hang, stdout closed      |
         +--------------------------------> ending --agents are done, or give up --+

An elastic job forms one generation after the other while it runs (generations.py); other jobs have one per start. Everything
happens in one thread, in `JobRun.run`; only the Screen and the Discovery have threads of their own.

    event                              decision                                       orders
    a message of an agent              `on_message`                                   Tell, Open, Close: `_carry_out`
    an agent is lost                   job_end.py
    a signal, time                     job_end.py, hang_watch.py
    after every event                  start.py:start_together, generations.py:advance
"""

import logging
import resource
import selectors
import threading
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from megaclass_launch.driver import generations, job_end, start
from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState, Process
from megaclass_launch.driver.discovery import Discovery, Source, source_of
from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job import Close, JobState, Open, Order, Tell, WorkerRecord
from megaclass_launch.driver.outcome import SHORT_START_S, Outcome, RestartLimit, headline, stopped_message
from megaclass_launch.driver.output import DriverIo, DriverMessages
from megaclass_launch.driver.ssh import NoRestartError, SshHosts, agent_command
from megaclass_launch.errors import EXIT_TRY_AGAIN, LaunchError
from megaclass_launch.exit_codes import EXIT_RESUME_ME, EXIT_USER_ERROR, exit_status, how_it_ended, is_worth_restarting
from megaclass_launch.hosts import Host
from megaclass_launch.operating_system import readable
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import describe_plan, passed_on, place_ranks
from megaclass_launch.signals import DRIVER_SIGNALS, EndedBySignalError, SignalQueue
from megaclass_launch.wire.agent_messages import RESULT_STREAM
from megaclass_launch.wire.protocol import Message, ProtocolError, Why, beat_interval

_logger = logging.getLogger("megaclass.launch")

# Three pipes, their other ends while ssh or the agent is being started, and those of an orphan killer.
_FILES_PER_HOST = 8
_FILES_PER_RANK = 2
_OWN_FILES = 256
_MAX_ELASTIC_HOSTS = 1024
_TICK_S = 0.25
"""Interval at which an elastic job looks at its deadlines and at new answers of the discovery."""
_LONGEST_BEAT_S = 0.5
"""The checks that depend on the time are made with the heartbeats, and a user may have chosen a limit of minutes for these."""


def run(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs the job on the hosts and returns its exit code (launch/exit_codes.py). hosts: empty with a discovery script."""
    if options.is_elastic:
        source = source_of(options.host_discovery_script, options.hostfile, hosts, options.slots_per_host)
        if options.is_dry_run:
            _print_elastic_plan(options, source)
            return 0
        # Hosts may still be added: for the names of output files and the limit of open files, a guess is enough.
        num_ranks = options.max_processes or sum(host.slots for host in hosts) or options.min_ranks
        return run_job(options, SshHosts(options, [], num_ranks), _MAX_ELASTIC_HOSTS, num_ranks, source)
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    if options.min_processes is not None and options.min_processes > num_processes:
        raise LaunchError(
            f"--min-np {options.min_processes} is more than the {num_processes} processes to start with: "
            f"lower it, or raise -np."
        )
    placed = place_ranks(hosts, num_processes)
    here = [host.name for host in placed if host.is_local]
    if len(here) > 1:
        _logger.warning(
            f"{' and '.join(here)} are this machine: taken for {len(here)} hosts, whose ranks share its cores, and its GPUs "
            f"where they choose them by local rank.",
            extra={"sender": options.program},
        )
    if options.is_dry_run:
        print(_plan(options, placed))
        return 0
    # Not started before this line: everything above can be wrong without a trace on any host.
    return run_job(options, SshHosts(options, hosts, num_processes), len(placed), num_processes)


def run_job(
    options: RunOptions, hosts: "JobHosts", num_hosts: int, num_ranks: int, source: Source | None = None
) -> int:
    """Runs a job and returns its exit code. source: of the hosts of an elastic job."""
    _raise_file_limit(_FILES_PER_HOST * num_hosts + _FILES_PER_RANK * num_ranks, is_guess=options.is_elastic)
    with SignalQueue(DRIVER_SIGNALS) as signals:
        io = DriverIo.open(options, num_ranks, signals)
        # Also closed after a LaunchError: what was printed before it must reach the screen.
        outcome = Outcome(exit_code=0)
        try:
            outcome = JobRun(options, hosts, io, source).run()
        except EndedBySignalError as signal:
            outcome = Outcome(exit_code=exit_status(-signal.args[0]), may_restart=False)
        finally:
            io.close(is_patient=outcome.may_restart)
    return outcome.exit_code


def _print_elastic_plan(options: RunOptions, source: Source) -> None:
    now = source.ask(threading.Event())
    print(f"elastic: at least {options.min_ranks} ranks; hosts from {source.name}; with the hosts of this moment:")
    print(_plan(options, place_ranks(now, min(options.max_ranks, sum(host.slots for host in now)))))


def _plan(options: RunOptions, placed: Sequence[Host]) -> str:
    return describe_plan(
        placed,
        [agent_command(host, options) for host in placed],
        command=options.command,
        workdir=options.workdir,
        given=options.given_env,
        passed=passed_on(),
    )


def _raise_file_limit(num_files: int, *, is_guess: bool) -> None:
    """Raises the soft limit of open files: three pipes per host and two files per rank may exceed the usual 1,024.

    is_guess: the hosts are not known yet; a lower hard limit then does not refuse the job.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + _OWN_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        if not is_guess:
            raise LaunchError(
                f"This many hosts and ranks need {wanted} open files; the limit is {hard} (`ulimit -Hn`)."
            )
        wanted = hard
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ---- hosts ----


class JobHosts(Protocol):
    """The hosts of a job: which of them a generation uses, and the way in which their agents are started."""

    def placed(self, signals: SignalQueue) -> list[Host]:
        """Returns the hosts of the next generation, with as many slots as ranks are to be started there."""
        ...

    def start_agent(self, host: Host, messages: DriverMessages) -> Process: ...

    def exclude(self, failed: Collection[str]) -> bool:
        """Leaves failed hosts out from now on; returns whether that changed anything. NoRestartError if too few are left."""
        ...

    def describe(self) -> str:
        """Returns the ranks and hosts of the next generation, for a message."""
        ...


# ---- the loop ----


class JobRun:
    """Runs the generations of one job. source: of the hosts of an elastic job."""

    def __init__(self, options: RunOptions, hosts: JobHosts, io: DriverIo, source: Source | None) -> None:
        self._hosts = hosts
        self._discovery = Discovery(source) if source is not None else None
        self._job = JobState(options, io, hosts.placed(io.signals) if source is None else None)
        self._beat_interval_s = min(_LONGEST_BEAT_S, beat_interval(options.heartbeat_s))

    def run(self) -> Outcome:
        """Runs generations until one succeeds, or none may follow.

        outcome -> exit code 0, or one that must not be repeated ------> return
           ^          otherwise: exclude failed hosts; give up after 3 starts without progress
           +-- the next generation <-- pause, longer after each short start <--+
        """
        job, messages, limit = self._job, self._job.messages, RestartLimit()
        # Generations of an elastic job need no restart, and have a limit of their own.
        num_restarts = 0 if job.is_elastic else job.options.restarts
        while True:
            begun = time.monotonic()
            outcome = self._run_generation()
            seconds = time.monotonic() - begun
            limit.note(seconds, has_started=job.ranks.has_started, step=job.checkpoint_step)
            # Order of the reasons: success, an outcome that repeats itself, no restart left, too few hosts, no progress.
            if outcome.exit_code == 0 or not outcome.may_restart or job.restart == num_restarts:
                return outcome
            # The hosts first: with other hosts the count of starts without progress begins again.
            try:
                if self._hosts.exclude(outcome.failed_hosts):
                    limit.forget()
            except NoRestartError as reason:
                messages.say(f"no restart: {reason}")
                return outcome
            if (why := limit.why_not_again()) is not None:
                messages.say(why)
                return outcome
            self._pause(limit)
            # The ranks read this number in MEGACLASS_RESTART, and may continue a run instead of starting as told.
            restart = job.restart + 1
            messages.say(f"restart {restart} of {num_restarts}: {self._hosts.describe()}.")
            job.begin(restart, self._hosts.placed(job.io.signals))

    def _pause(self, limit: RestartLimit) -> None:
        """Waits before a restart."""
        pause_s, signals = limit.pause_s(), self._job.io.signals
        ends_at = time.monotonic() + pause_s
        if pause_s > 1:
            short = f"{limit.num_short} starts ended within {SHORT_START_S:g} s"
            self._job.messages.say(f"{short}: the next one in {pause_s:.0f} s.")
        while (left_s := ends_at - time.monotonic()) > 0:
            # Not a plain sleep: Ctrl-C must end the pause, and with it the job.
            readable([signals], left_s)
            signals.raise_if_ended()

    def _run_generation(self) -> Outcome:
        """Starts the ranks, and waits until nothing of them is left."""
        job = self._job
        self._pipes = AgentPipes(job.opened, self._on_message, job.io)
        self._hang_watch = HangWatch(job)
        self._orphan_killers = job_end.OrphanKillers(job.options)
        self._beat_due_at = 0.0
        selector = self._pipes.selector
        selector.register(job.io.signals, selectors.EVENT_READ, self._on_signals)
        if job.io.call is not None:
            selector.register(job.io.call.caller_fd, selectors.EVENT_READ, self._on_caller_gone)
        try:
            if not job.is_elastic:
                start.connect(job)
            self._carry_out(job.take_orders())
            while not self._is_over():
                now = time.monotonic()
                # Agents that do not report the end in time are abandoned, so the driver always ends.
                if now >= job.give_up_at:
                    job_end.abandon_unfinished(job)
                    self._carry_out(job.take_orders())
                    break
                if now >= self._beat_due_at:
                    self._beat(now)
                self._decide(now)
                self._carry_out(job.take_orders())
                # Not again at once: the orders may have ended the job.
                if not self._is_over():
                    self._pipes.handle_events(self._next_event_at(now))
            self._hang_watch.finish()
        finally:
            self._close()
        return job.decision.outcome

    def _is_over(self) -> bool:
        # Not by the agents alone: before the first host of an elastic job is known, and while all are lost, there are none.
        job = self._job
        may_end = job.is_closing or job.is_ending if job.is_elastic else not job.is_starting
        return may_end and not job.unfinished()

    def _next_event_at(self, now: float) -> float:
        job = self._job
        until = min(self._beat_due_at, job.give_up_at, job.start_deadline)
        return min(until, job.hosts.next_return(now), now + _TICK_S) if job.is_elastic else until

    def _decide(self, now: float) -> None:
        """Does what follows from the state of the job, whatever has changed it."""
        job = self._job
        if self._discovery is not None:
            generations.update_hosts(job, self._discovery.name, self._discovery.news())
            generations.advance(job, now)
        elif job.is_starting:
            start.start_together(job, now)

    # ---- orders ----

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Tell(agent, message):
                    if not agent.is_over:
                        agent.send(message)
                case Open():
                    self._open(order)
                case Close(agent, kills_orphans):
                    if kills_orphans:
                        self._orphan_killers.start(agent)
                    self._pipes.stop_listening(agent)
                    if agent.state is PipeState.LOST:
                        agent.close()

    def _open(self, order: Open) -> None:
        """Starts an agent and sends it the job."""
        job, host = self._job, order.host
        process = self._hosts.start_agent(host, job.messages)
        # Two host names may be one machine, where no agent may end another's ranks.
        run_id = f"{job.run_id}-{len(job.opened) + 1}"
        agent = AgentPipe(host, process, token=job.token, run_id=run_id, checker=start.checker_for(job, host))
        self._pipes.add(agent)
        job.agents[host.name] = agent
        agent.send(start.agent_job(job, host, run_id))

    # ---- events ----

    def _on_message(self, agent: AgentPipe) -> None:
        job = self._job
        try:
            messages = agent.read()
            if messages is None:
                job_end.note_end_of_stream(job, agent, job_end.why_ended(agent, job.options))
            for message, payload in messages or ():
                self._carry_out(on_message(job, self._hang_watch, agent, message, payload))
                if agent.is_over:
                    break
        except ProtocolError as error:
            job_end.lose(job, agent, f"sent something that no agent of this version sends: {error}")
        self._carry_out(job.take_orders())

    def _on_signals(self) -> None:
        job_end.on_signals(self._job, self._job.io.signals.taken())
        self._carry_out(self._job.take_orders())

    def _on_caller_gone(self) -> None:
        job = self._job
        assert job.io.call is not None
        self._pipes.selector.unregister(job.io.call.caller_fd)
        job.messages.say("the process that asked for this job has ended; ending the ranks.")
        job_end.end(job, Outcome(exit_code=EXIT_USER_ERROR, may_restart=False))

    def _beat(self, now: float) -> None:
        """Sends the heartbeats and checks everything that depends on the time, at least once per second."""
        job = self._job
        job.is_paused = self._pipes.is_paused
        self._beat_due_at = now + self._beat_interval_s
        for agent in job.unfinished():
            # Unsent messages prove that the driver lives, and an agent that does not read cannot make the queue grow.
            if not agent.has_unsent:
                agent.send({"do": "beat"})
            # While the driver does not read, it cannot tell which agents are silent.
            silent_s = now - agent.heard_at
            if agent.state is PipeState.RUNNING and silent_s > job.silence_s and not job.is_paused:
                job_end.lose(job, agent, job_end.why_silent(silent_s), code=EXIT_TRY_AGAIN, is_reachable=False)
        job_end.lose_late(job, now)
        if job.is_elastic:
            generations.kill_stopped(job, now, job.silence_s)
        job_end.end_if_late(job, now)
        self._hang_watch.check(now)
        # While the job ends, ranks leave at different times for a good reason; in an elastic job they are dismissed.
        if not job.is_elastic and not job.is_ending and (sentence := job.ranks.name_early_leaver()) is not None:
            job.messages.say(sentence)
        job_end.end_if_unread(job)

    def _close(self) -> None:
        job = self._job
        if self._discovery is not None:
            self._discovery.close()
        self._pipes.close()
        self._orphan_killers.wait()
        for worker in job.ranks.rows:
            if worker.code is None or not job.is_elastic:
                job.output.finish(worker.shown_rank)
        # Last, below what the other ranks printed while they were being stopped.
        if job.decision.report:
            job.messages.say(job.decision.report)


# ---- the meaning of the agents' messages ----
#
# Every message has been checked before it arrives here (wire/agent_messages.py): its fields have the right types, and it
# is about workers of the agent that sent it.


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
            if problem := start.greet(job, agent, message):
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
        job_end.resume(job, worker.name)
        return
    if not job.is_elastic and job_end.end_because_of_silence(job, worker.name, code):
        return
    # Exit code 2 is a mistake of the user's, which a restart would repeat.
    may_restart = is_worth_restarting(code) and not job.is_elastic
    outcome = Outcome(exit_code=exit_status(code) or 1, failed_hosts=(worker.host,), may_restart=may_restart)
    report = job.ranks.failure_report_of(worker) + job.output.where(worker.shown_rank)
    if _may_continue_without(job, code, is_member=is_member):
        num_left = len(job.ranks.members() if job.generation else job.ranks.staying())
        ended = f"{worker.name} (pid {pid}) ended with {how_it_ended(code)}"
        job.messages.say(f"{ended}; {num_left} rank(s) continue. {job_end.ban(job, worker.host)}")
        job_end.note_failure(job, outcome, report)
        return
    # At once, before the other ranks print their own errors about the one that is gone.
    job.messages.say(headline(worker.shown_rank, worker.host, pid, code, len(job.ranks.alive)))
    if not job.is_elastic and job.restart < job.options.restarts and not may_restart:
        job.messages.say(f"exit code {code} means that something has to be fixed first: no restart.")
    job_end.end(job, outcome, report=report)


def _may_continue_without(job: JobState, code: int, *, is_member: bool) -> bool:
    """Returns whether an elastic job continues with the other ranks after one has ended with this exit code."""
    # Exit code 2: something has to be fixed first. On a host that was about to join a job that runs well, it has to be
    # fixed there. A program that is not elastic ends with its first rank that fails.
    is_fault = code == EXIT_USER_ERROR and (is_member or not job.has_progressed)
    return job.is_elastic and not is_fault and not job.is_finishing and bool(job.is_aware or job.generation)


def _refuse(job: JobState, agent: AgentPipe, why: str) -> None:
    if job.is_elastic:
        is_in_use = job.agents.get(agent.name) is agent
        generations.dismiss_agent(job, agent)
        # Its workers count as ended: it ends those that it has started, and never reports the others.
        if is_in_use:
            job_end.lose_host(job, agent.name, why, EXIT_USER_ERROR)
    elif agent.state is PipeState.STARTING:
        # It has answered, so the start does not wait for it any longer.
        agent.state = PipeState.READY
        job.problems.append((agent.name, why))
    else:
        job.messages.say(why)
        job_end.end(job, Outcome(exit_code=EXIT_USER_ERROR, failed_hosts=(agent.name,)))


def _note_done(job: JobState, agent: AgentPipe) -> None:
    is_in_use = job.agents.get(agent.name) is agent and agent.state is PipeState.RUNNING
    left = job.ranks.on_host(agent.name) if is_in_use else []
    # A host that leaves without having reported its ranks' ends must not turn a failure into a success.
    if left and not job.is_ending:
        job_end.lose(job, agent, f"says that it is done, but not how {left[0].name.partition(' on ')[0]} ended")
    else:
        job.finish(agent)
