"""Decides that the job hangs, asks all agents for the stacks of their ranks, and prints the verdict. Standard library only.

    watching --a rank is late, or nothing moves for --hang-timeout--> asking --all answered, or ASK_S passed--> verdict
       ^                                                                                                       |
       +--- the step that was late has finished meanwhile: nothing <-------------------------------------------+
       +--- late by its own limit, and no rank waits for another: a report, and the job continues <------------+
       +--- elastic: the ranks leave the generation, and those that do not are killed <------------------------+----> end

A rank itself reports that it is late, because it knows how long its step or its collective may take, and gives the words for
the message. With --hang-timeout, progress is what any rank prints, a finished step, or a finished collective.

In an elastic job the watch looks at the members of the generation that trains: ranks that wait for others at the rendezvous
do not hang. Before the first generation it treats the job as one that is not elastic.

    field            changed by                              read by
    _progress_at     "status" of any agent                   check: --hang-timeout
    _late            "status" with silent_s                  check
    _asked           _ask: rank by worker; _judge            check, note, finish
    _reports, _kept  "stacks" and "kept" while asking        _judge
    _is_asked_for    check: the user's --hang-timeout        _judge: it ends the job whatever the verdict is
    _said            _judge                                  _judge: the same report is printed once
"""

import time

from megaclass_launch.driver.agent_pipe import AgentPipe, PipeState
from megaclass_launch.driver.job import JobState, WorkerRecord
from megaclass_launch.driver.job_end import end, note_failure
from megaclass_launch.driver.outcome import Outcome, Reason
from megaclass_launch.exit_codes import EXIT_HUNG
from megaclass_launch.hang.record import new_name
from megaclass_launch.hang.stacks import RankReport, has_passed
from megaclass_launch.hang.verdict import (
    HangVerdict,
    describe_groups,
    find_verdict,
    hang_sentence,
    slow_sentence,
    steps_done,
)
from megaclass_launch.rank_status import LookClock
from megaclass_launch.wire.protocol import Message

_NO_COLLECTIVE = "a collective has not finished"
_ASK_S = 5.0
"""How long the agents may take: their ranks have 2.5 s to answer, and a run folder on a dead disk costs 1.5 s."""
_SETTLED_S = 5.0
"""Late ranks are ignored for this long after the start of a generation; first steps can take minutes."""


class HangWatch:
    """Watches one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._limit_s = job.options.hang_timeout_s
        self._progress_at = 0.0
        self._clock = LookClock(time.monotonic())
        self._late: tuple[float, str, str] | None = None
        self._asked: dict[int, WorkerRecord] = {}
        self._asked_at = 0.0
        self._generation = 0
        """The generation that was asked; the verdict does not concern a later one."""
        self._is_asked_for, self._said = False, ""
        self._silent_s, self._what, self._setting = 0.0, "", ""
        self._name = ""
        self._reports: dict[int, RankReport] = {}
        self._kept: str = ""

    def note(self, agent: AgentPipe, message: Message, payload: bytes) -> None:
        """Handles "status", "stacks" and "kept"."""
        now = time.monotonic()
        match message["say"]:
            case "status":
                # Not in the future, whatever a host says: it could keep a job that hangs alive.
                self._progress_at = max(self._progress_at, now - max(0.0, message["idle_s"]))
                # A report of the generation before may still be on its way.
                current = self._job.current
                if "silent_s" in message and (current is None or now - current.published_at > _SETTLED_S):
                    what = message.get("missing") or _NO_COLLECTIVE
                    self._late = (message["silent_s"], what, message.get("setting", ""))
            case "stacks" if message["rank"] in self._asked:
                # The fields were checked against those of RankReport when the message was decoded.
                fields = {name: value for name, value in message.items() if name not in ("say", "rank")}
                number, rank = message["rank"], self._asked[message["rank"]].shown_rank
                stacks = payload.decode(errors="replace")
                self._reports[number] = RankReport(rank=rank, host=agent.name, stacks=stacks, **fields)
                # At once, and not with the next beat: ranks that SIGABRT has ended may be all that the job waits for.
                if all(number in self._reports for number, worker in self._asked.items() if worker.code is None):
                    self._judge()
            case "kept":
                self._kept = message["folder"]

    def check(self, now: float) -> None:
        """To be called about once per second."""
        job = self._job
        since = self._clock.since(now)
        if self._asked and now - self._asked_at > _ASK_S:
            self._judge()
        # While the screen is full, the ranks wait in their writes: they do not hang.
        if not job.ranks.has_started or job.is_paused or self._asked:
            return
        # Ranks that save, because one has left with exit code 75, have a limit of their own.
        if job.decision.reason is not Reason.NONE:
            return
        if not self._watched():
            return
        if job.current is not None:
            if job.current.is_broken(job.ranks.members()) or job.is_finishing:
                self._late = None
                return
            since = max(since, job.current.published_at)
        if self._late is not None:
            self._ask(now, *self._late)
        elif self._limit_s and (silent_s := now - max(job.printed_at, self._progress_at, since)) > self._limit_s:
            self._is_asked_for = True
            if job.current is None:
                # From here on the exit of a rank, which SIGABRT may cause, does not count as a cause.
                job.decision.decide(Reason.FAULT, Outcome(exit_code=EXIT_HUNG))
            self._ask(now, silent_s, "no rank has printed anything or made progress (--hang-timeout)")

    def finish(self) -> None:
        """Judges by what has arrived if the agents left while they were asked."""
        if self._asked:
            self._judge()

    def _ask(self, now: float, silent_s: float, what: str, setting: str = "") -> None:
        job = self._job
        self._asked_at, self._generation = now, job.generation
        # All ranks, not only the late one: which rank is missing shows only in comparison.
        self._asked = {worker.number: worker for worker in self._watched()}
        self._silent_s, self._what, self._setting, self._name = silent_s, what, setting, new_name()
        self._late, self._reports, self._kept = None, {}, ""
        job.messages.detail(f"{what} for {silent_s:.0f} s: asking for the stacks of all ranks")
        # SIGABRT would end ranks that may continue in the next generation.
        may_abort = self._is_asked_for and job.current is None
        ranks = {str(number): worker.shown_rank for number, worker in self._asked.items()}
        job.tell_all({"do": "stacks", "name": self._name, "may_abort": may_abort, "ranks": ranks})

    def _watched(self) -> list[WorkerRecord]:
        return self._job.ranks.members() if self._job.current is not None else self._job.ranks.staying()

    def _judge(self) -> None:
        job, asked = self._job, self._asked
        is_asked_for, self._asked, self._is_asked_for = self._is_asked_for, {}, False
        # Something else has ended the job or the generation meanwhile.
        if (job.is_ending and not is_asked_for) or self._generation != job.generation:
            return
        # A rank whose agent did not answer also counts: the missing one is often the culprit.
        reports = [
            self._reports.get(worker.number) or _lost_report(worker)
            for worker in asked.values()
            if worker.code is None or worker.number in self._reports
        ]
        if not is_asked_for and has_passed(reports):
            job.messages.detail(f"{self._what}: it has finished meanwhile")
            return
        verdict = find_verdict(reports)
        if job.current is not None:
            self._end_generation(verdict, reports)
            return
        # Ranks that report themselves late may only be slow, and ending them would lose healthy work.
        if not is_asked_for and not verdict.may_end:
            if verdict.text != self._said and not job.is_ending:
                job.messages.say(slow_sentence(self._silent_s, verdict, what=self._what) + self._where(verdict))
            self._said, self._late = verdict.text, None
            return
        sentence = hang_sentence(self._silent_s, verdict, what=self._what)
        job.decision.decide(Reason.FAULT, Outcome(exit_code=EXIT_HUNG))
        self._record(sentence, verdict, reports)
        hosts = {worker.host for worker in asked.values() if worker.shown_rank in verdict.suspects}
        # If every host is suspected, excluding them would leave none for a restart.
        failed = tuple(sorted(hosts)) if len(hosts) < len(job.hosts.listed) else ()
        job.decision.explain(Outcome(exit_code=EXIT_HUNG, failed_hosts=failed), sentence + self._where(verdict))
        if job.decision.reason is Reason.FAULT:
            end(job, Outcome(exit_code=EXIT_HUNG, failed_hosts=failed))

    def _end_generation(self, verdict: HangVerdict, reports: list[RankReport]) -> None:
        """Lets the ranks of an elastic job leave the generation that hangs; see generations.py."""
        job = self._job
        assert job.current is not None
        sentence = f"generation {job.generation} hangs. {verdict.text}."
        self._record(sentence, verdict, reports)
        job.messages.say(sentence + self._where(verdict))
        # If the job cannot continue without the ranks that hang, it ends because of this.
        note_failure(job, Outcome(exit_code=EXIT_HUNG, may_restart=False), sentence)
        limit = f" ({self._setting})" if self._setting else ""
        job.current.hung = f"{self._what} for {self._silent_s:.0f} s{limit}"

    def _record(self, sentence: str, verdict: HangVerdict, reports: list[RankReport]) -> None:
        """Lets one agent that answers write the verdict: the run folder may not be visible from here."""
        job = self._job
        for report in reports:
            if report.stacks:
                job.output.write_stacks(report.rank, report.stacks)
        hosts = {report.host for report in self._reports.values()}
        for agent in job.agents.values():
            if agent.state is PipeState.RUNNING and agent.name in hosts:
                order = {"do": "verdict", "name": self._name, "text": sentence, "ranks": verdict.suspects}
                job.tell(agent, {**order, "groups": describe_groups(verdict), "step": steps_done(reports)})
                return

    def _where(self, verdict: HangVerdict) -> str:
        if self._kept:
            return f" Stacks: {self._kept}."
        if (folder := self._job.output.folder) is not None:
            return f" Stacks: {folder}/rank.<n>/stacks."
        # Nowhere to keep them: they are shown, each once.
        return f"\n{describe_groups(verdict)}"


def _lost_report(worker: WorkerRecord) -> RankReport:
    return RankReport(rank=worker.shown_rank, host=worker.host, pid=worker.pid, state="lost", step=-1)
