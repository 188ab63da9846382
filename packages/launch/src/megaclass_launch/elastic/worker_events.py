"""The meaning of the agents' messages for an elastic job: states of workers, failures, lines on the terminal.

Every message has been checked before it arrives here (messages.py). Standard library only.
"""

import time
from collections.abc import Mapping, Sequence

from megaclass_launch.driver.agent_pipe import AgentPipe, PipeState
from megaclass_launch.driver.failure_report import stopped_message
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.elastic.generation import WorkerRecord, listed
from megaclass_launch.elastic.job import ElasticJob
from megaclass_launch.elastic.worker import Why
from megaclass_launch.exit_codes import EXIT_HOST_LOST, EXIT_RESUME_ME, EXIT_USER_ERROR, exit_status, how_it_ended
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World

_SETTLED_S = 5.0
"""Late ranks are ignored for this long after the start of a generation; first steps can take minutes."""


class WorkerEvents:
    """Follows the workers by the agents' messages. ElasticRun and Generations read the public fields and decide."""

    def __init__(self, job: ElasticJob) -> None:
        self.is_aware = False
        """True once a worker has come to the rendezvous: the program is an elastic one."""
        self.has_progressed = False
        """True once a worker has reported a commit."""
        self.is_finishing = False
        """True once a member has ended with exit code 0."""
        self.first_failure: tuple[Outcome, str] | None = None
        """Outcome and report of the first failure since the last commit; decides the exit code if the job ends by it."""
        self.hung_s: float | None = None
        """Seconds since a rank's last step, if they exceed the limit that the rank itself reported (train.hang_after_s)."""
        self._published_at = 0.0
        self._table, self._agents, self._hosts, self._end = job.table, job.agents, job.hosts, job.end
        self._output, self._messages = job.io.output, job.io.messages
        self._generation = 0
        self._disturbed_at: float | None = None
        """Time of the first failure since the last commit."""
        self._failed_generation = 0
        """Generation of the last failure: a commit of the same one may have been on its way before it failed."""

    def handle(self, agent: AgentPipe, message: Message, payload: bytes, token: str) -> None:
        """Handles one message of one agent. token: of the current generation; empty before the first one."""
        kind = message["say"]
        # A worker that has ended, or whose host was lost, may still be named by messages that were on their way.
        worker = self._table.alive.get(message["rank"]) if "rank" in message else None
        if kind == "output" and worker is not None:
            self._table.note_lines(worker.number, self._output.put(worker.shown_rank, message["stream"], payload))
        elif kind == "exit" and worker is not None:
            self._note_exit(worker, message["pid"], message["code"])
        elif kind in ("ready", "committed", "failed") and worker is not None:
            # The token of a member is that of its generation; a new worker does not know any yet.
            if message["token"] == (token if worker.rank is not None else ""):
                self._note_state(worker, message)
        elif kind == "stopped" and worker is not None:
            worker.stopped_at = time.monotonic()
            text = stopped_message(worker.shown_rank, agent.name, message["pid"])
            self._messages.say(f"{text} If it stays stopped, it is killed.")
        elif kind == "started":
            self._table.pids |= message["pids"]
        elif kind == "hello":
            if problem := self._agents.greet(agent, message):
                self._refuse(agent, problem)
        elif kind == "status":
            # A report of the generation before may still be on its way.
            is_settled = time.monotonic() - self._published_at > _SETTLED_S
            if "silent_s" in message and self._generation and is_settled:
                self.hung_s = message["silent_s"]
        elif kind == "spare":
            self._agents.note_ports(agent, message)
        elif kind == "refuse":
            self._refuse(agent, f"{agent.name}: {message['why']}")
        elif kind == "note":
            self._messages.say(f"{agent.name}: {message['text']}")
        elif kind == "done":
            self._note_done(agent)

    def note_generation(
        self, number: int, members: Sequence[WorkerRecord], worlds: Mapping[int, World], previous_size: int
    ) -> None:
        """Takes over the ranks of a generation that was published."""
        # What the ranks have printed without a line end belongs to their old numbers.
        self.flush()
        for member in members:
            member.rank = member.shown_rank = worlds[member.number].rank
            member.is_ready = False
        change = f"; before: {previous_size}" if previous_size else ""
        ranks = f"{len(members)} rank{'s' if len(members) > 1 else ''}"
        self._messages.say(f"generation {number}: {ranks} on {listed(members)}{change}.")
        self._generation = number
        self.hung_s = None
        self._published_at = time.monotonic()

    def note_lost_host(self, name: str, why: str, code: int = EXIT_HOST_LOST) -> None:
        """Notes that a host's agent is gone, and all its workers with it. code: of the job, if it ends because of that."""
        lost = self._table.on_host(name)
        for worker in lost:
            self._output.finish(worker.shown_rank)
            # As if by SIGKILL: what still runs there is ended by the orphan killers of its host.
            self._table.remove(worker.number, self._table.pids.get(worker.number, 0), -9)
        if self._end.is_ending:
            return
        # Ranks that were leaving anyway do not count as lost.
        num_members = sum(worker.rank is not None and not worker.is_leaving for worker in lost)
        with_it = f" with {num_members} rank(s)" if num_members else ""
        self._messages.say(f"{why.rstrip('.')}{with_it}. {self._ban(name)}")
        self._note_failure(Outcome(exit_code=code, may_restart=False), f"{why.rstrip('.')}.")

    def end_after_failure(self) -> None:
        """Ends a job that cannot continue: its first failure decides the exit code."""
        # Without any failure it ran out of hosts, because the discovery has removed them.
        outcome, report = self.first_failure or (Outcome(exit_code=EXIT_HOST_LOST, may_restart=False), "")
        self._end.end(outcome, report=report)

    def flush(self) -> None:
        """Shows what the ranks have printed without a line end."""
        for worker in self._table.alive.values():
            self._table.note_lines(worker.number, self._output.finish(worker.shown_rank))

    # ---- workers ----

    def _note_state(self, worker: WorkerRecord, message: Message) -> None:
        match message["say"]:
            case "ready":
                self.is_aware = True
                worker.is_ready, worker.why = True, Why(message["why"])
                self._messages.detail(f"rank {worker.shown_rank} on {worker.host} is ready ({worker.why})")
            case "failed":
                self._messages.detail(f"rank {worker.shown_rank} on {worker.host} left: {message['text']}")
            case "committed":
                self.has_progressed = True
                # The job has made progress since: an earlier failure is not the reason if it ends later.
                if self._disturbed_at is not None and self._generation > self._failed_generation:
                    self.first_failure = None
                    seconds = time.monotonic() - self._disturbed_at
                    self._disturbed_at = None
                    self._messages.say(f"generation {self._generation} trains, {seconds:.1f} s after the failure.")

    def _note_exit(self, worker: WorkerRecord, pid: int, code: int) -> None:
        self._table.note_lines(worker.number, self._output.finish(worker.shown_rank))
        self._table.remove(worker.number, pid, code)
        who = f"rank {worker.shown_rank} on {worker.host}"
        if worker.is_leaving or self._end.is_ending:
            self._messages.detail(f"{who} (pid {pid}) has left with {how_it_ended(code)}")
            return
        # Before the first generation every worker counts: one of a program that is not elastic never comes to the rendezvous.
        is_member = worker.rank is not None or not self._generation
        if code == 0 and is_member:
            self.is_finishing = True
            return
        if code == EXIT_RESUME_ME:
            self._end.resume(who)
            return
        report = self._table.report_of(worker, code) + self._output.where(worker.shown_rank)
        outcome = Outcome(exit_code=exit_status(code) or 1, failed_hosts=(worker.host,), may_restart=False)
        ended = f"{who} (pid {pid}) ended with {how_it_ended(code)}"
        is_fault = code == EXIT_USER_ERROR and (is_member or not self.has_progressed)
        if is_fault or self.is_finishing or not (self.is_aware or self._generation):
            # Exit code 2: something has to be fixed first. On a host that was about to join a job that runs well, it has to be
            # fixed there. A program that is not elastic ends with its first rank that fails.
            self._messages.say(f"{ended}; the other {len(self._table.alive)} are being stopped.")
            self._end.end(outcome, report=report)
            return
        num_left = len(self._table.members()) if self._generation else len(self._table.staying())
        self._messages.say(f"{ended}; {num_left} rank(s) continue. {self._ban(worker.host)}")
        self._note_failure(outcome, report)

    def _note_failure(self, outcome: Outcome, report: str) -> None:
        self.first_failure = self.first_failure or (outcome, report)
        self._disturbed_at = self._disturbed_at or time.monotonic()
        self._failed_generation = self._generation

    def _ban(self, name: str) -> str:
        pause_s = self._hosts.ban(name, time.monotonic())
        if pause_s == float("inf"):
            return f"{name} gets no new ranks (no --blacklist-cooldown-range)."
        return f"{name} gets no new ranks for {pause_s:.0f} s."

    # ---- agents ----

    def _refuse(self, agent: AgentPipe, why: str) -> None:
        self._messages.say(f"{why.rstrip('.')}. {self._ban(agent.name)}")
        self._note_failure(Outcome(exit_code=EXIT_USER_ERROR, may_restart=False), "")
        self._agents.end(agent)

    def _note_done(self, agent: AgentPipe) -> None:
        left = self._table.on_host(agent.name) if self._agents.by_host.get(agent.name) is agent else []
        # A host that leaves without having reported its workers' ends must not turn a failure into a success.
        if left and not self._end.is_ending:
            self._agents.lose(agent, is_reachable=True)
            self.note_lost_host(agent.name, f"{agent.name} says that it is done, but not how its ranks ended")
            return
        self._agents.forget(agent)
        self._agents.finish(agent, PipeState.DONE)
