"""Decides that the job hangs, asks all agents for the stacks of their ranks, and prints the verdict. Standard library only.

    watching --a rank is late, or nothing moves for --hang-timeout--> asking --all answered, or ASK_S passed--> verdict
       ^                                                                                                       |
       +----- late by its own account, and no rank waits for another: a report, and the job continues <--------+----> end

A rank is late by its own account: `megaclass train` knows how long a step takes, hvd how long a collective may take. With
--hang-timeout, progress is what any rank prints, a finished step, or a finished collective of hvd.

    field            changed by                              read by
    _progress_at     "status" of any agent                   check: --hang-timeout
    _late            "status" with silent_s                  check
    _is_asking       _ask, _judge                            check, note, finish
    _reports, _kept  "stacks" and "kept" while asking        _judge
    _is_asked_for    check: the user's --hang-timeout        _judge: it ends the job whatever the verdict is
    _said            _judge                                  _judge: the same report is printed once
"""

import time
from collections.abc import Sequence

from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState
from megaclass_launch.driver.job_end import JobEnd
from megaclass_launch.driver.outcome import Outcome, Reason
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.rank_table import RankTable
from megaclass_launch.exit_codes import EXIT_HUNG
from megaclass_launch.hang.record import new_name
from megaclass_launch.hang.stacks import LookClock, RankReport
from megaclass_launch.hang.verdict import (
    HangVerdict,
    describe_groups,
    find_verdict,
    hang_sentence,
    slow_sentence,
    steps_done,
)
from megaclass_launch.placement import Placement
from megaclass_launch.wire.protocol import Message

_ASK_S = 5.0
"""How long the agents may take: their ranks have 2.5 s to answer, and a run folder on a dead disk costs 1.5 s."""


class HangWatch:
    """Watches one start of a job."""

    def __init__(
        self,
        placements: Sequence[Placement],
        pipes: AgentPipes,
        table: RankTable,
        end: JobEnd,
        io: DriverIo,
        hang_timeout_s: float,
    ) -> None:
        self._placements, self._pipes, self._table, self._end = placements, pipes, table, end
        self._messages, self._output = io.messages, io.output
        self._limit_s = hang_timeout_s
        self._progress_at = 0.0
        self._clock = LookClock(time.monotonic())
        self._late: tuple[float, str] | None = None
        self._is_asking, self._asked_at = False, 0.0
        self._is_asked_for, self._said = False, ""
        self._silent_s, self._what = 0.0, ""
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
                if "silent_s" in message:
                    what = "no step has finished" if message.get("is_training") else "a collective has not finished"
                    self._late = (message["silent_s"], what)
            case "stacks":
                # The fields were checked against those of RankReport when the message was decoded.
                fields = {name: value for name, value in message.items() if name != "say"}
                report = RankReport(host=agent.name, stacks=payload.decode(errors="replace"), **fields)
                self._reports[report.rank] = report
                # At once, and not with the next beat: ranks that SIGABRT has ended may be all that the job waits for.
                if self._is_asking and set(self._table.running()) <= self._reports.keys():
                    self._judge()
            case "kept":
                self._kept = message["folder"]

    def check(self, now: float) -> None:
        """To be called about once per second."""
        since = self._clock.since(now)
        if self._is_asking and now - self._asked_at > _ASK_S:
            self._judge()
        # While the screen is full, the ranks wait in their writes: they do not hang.
        if self._end.is_ending or not self._table.has_started or self._pipes.is_paused:
            return
        if self._is_asking:
            return
        if self._late is not None:
            self._ask(now, *self._late)
        elif (
            self._limit_s and (silent_s := now - max(self._table.printed_at, self._progress_at, since)) > self._limit_s
        ):
            self._is_asked_for = True
            # From here on the exit of a rank, which SIGABRT may cause, is no cause any more.
            self._end.decision.decide(Reason.FAULT, Outcome(exit_code=EXIT_HUNG))
            self._ask(now, silent_s, "no rank has printed anything or made progress (--hang-timeout)")

    def finish(self) -> None:
        """Judges by what has arrived if the agents left while they were asked."""
        if self._is_asking:
            self._judge()

    def _ask(self, now: float, silent_s: float, what: str) -> None:
        self._is_asking, self._asked_at = True, now
        self._silent_s, self._what, self._name = silent_s, what, new_name()
        self._late, self._reports, self._kept = None, {}, ""
        self._messages.detail(f"{what} for {silent_s:.0f} s: asking for the stacks of all ranks")
        # All ranks, not only the late one: which rank is missing shows only in comparison.
        self._pipes.send({"do": "stacks", "name": self._name, "may_abort": self._is_asked_for})

    def _judge(self) -> None:
        self._is_asking = False
        # Something else has ended the job meanwhile.
        if self._end.is_ending and not self._is_asked_for:
            return
        # A rank whose agent did not answer counts, too: the missing one is often the culprit.
        reports = [self._reports.get(rank) or self._lost_report(rank) for rank in self._table.running()]
        reports += [report for rank, report in self._reports.items() if rank in self._table.codes]
        verdict = find_verdict(reports)
        # Ranks that are late by their own account may only be slow, and ending them would lose healthy work.
        if not self._is_asked_for and not verdict.may_end:
            if verdict.text != self._said and not self._end.is_ending:
                self._messages.say(slow_sentence(self._silent_s, verdict, what=self._what) + self._where(verdict))
            self._said, self._late = verdict.text, None
            return
        sentence = hang_sentence(self._silent_s, verdict, what=self._what)
        self._end.decision.decide(Reason.FAULT, Outcome(exit_code=EXIT_HUNG))
        self._record(sentence, verdict, steps_done(reports))
        hosts = {self._table.hosts[rank] for rank in verdict.suspects}
        # If every host is suspected, excluding them would leave none for a restart.
        failed = tuple(sorted(hosts)) if len(hosts) < len(self._placements) else ()
        self._end.decision.explain(Outcome(exit_code=EXIT_HUNG, failed_hosts=failed), sentence + self._where(verdict))
        if self._end.decision.reason is Reason.FAULT:
            self._end.end(Outcome(exit_code=EXIT_HUNG, failed_hosts=failed))

    def _record(self, sentence: str, verdict: HangVerdict, step: int | None) -> None:
        """Lets one agent that answers write the verdict: the run folder may not be visible from here."""
        for rank, report in self._reports.items():
            if report.stacks:
                self._output.write_stacks(rank, report.stacks)
        for agent in self._pipes.all:
            ranks = {world.rank for world in agent.placement.worlds}
            if agent.state is PipeState.RUNNING and ranks & self._reports.keys():
                order = {"do": "verdict", "name": self._name, "text": sentence, "ranks": verdict.suspects}
                agent.send({**order, "groups": verdict.groups, "step": step})
                return

    def _where(self, verdict: HangVerdict) -> str:
        if self._kept:
            return f" Stacks: {self._kept}."
        if (folder := self._output.folder) is not None:
            return f" Stacks: {folder}/rank.<n>/stacks."
        # Nowhere to keep them: they are shown, each once.
        return f"\n{describe_groups(verdict)}"

    def _lost_report(self, rank: int) -> RankReport:
        return RankReport(
            rank=rank, host=self._table.hosts[rank], pid=self._table.pids.get(rank, 0), state="lost", step=-1
        )
