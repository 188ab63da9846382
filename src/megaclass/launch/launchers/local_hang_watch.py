"""Looks for hangs of the ranks that `megaclass train` started on this machine, where no agent and no driver is between."""

import time
from collections.abc import Mapping
from pathlib import Path

from megaclass.distributed.rank_status import StatusPage
from megaclass.launch.agent.supervisor import Supervisor
from megaclass.launch.hang.look_clock import LookClock
from megaclass.launch.hang.record import keep_stacks, keep_verdict, new_name
from megaclass.launch.hang.sentence import hang_sentence, slow_sentence, steps_done
from megaclass.launch.hang.stacks import WatchedRank, collect, latest_late_s
from megaclass.launch.hang.verdict import find_verdict


class LocalHangWatch:
    """Reads the pages of the ranks about once per second; nothing is asked of them until one is late."""

    def __init__(self, supervisor: Supervisor, pages: Mapping[int, StatusPage], host: str) -> None:
        self._supervisor, self._pages, self._host = supervisor, pages, host
        self._clock = LookClock(time.monotonic())
        self._said = ""

    def look(self, now: float) -> tuple[str, bool]:
        """Returns a message, empty while no rank is late or if it was returned before, and whether to end the job.

        If a rank is late, it collects and keeps the stacks of all.
        """
        running = [WatchedRank(w.rank, w.pid, self._pages[w.rank]) for w in self._supervisor.running()]
        since = self._clock.since(now)
        rank, _ = latest_late_s({watched.rank: watched.page for watched in running}, now, since=since)
        if rank < 0:
            return "", False
        silent_s = now - self._pages[rank].read().progress_at
        reports = collect(running, self._host)
        verdict = find_verdict(reports)
        is_new, self._said = verdict.text != self._said, verdict.text
        # If the job continues, the next report comes when the rank has been late as long again.
        self._clock.restart(time.monotonic())
        if not verdict.may_end and not is_new:
            return "", False
        sentence = (hang_sentence if verdict.may_end else slow_sentence)(silent_s, verdict)
        name, where = new_name(), ""
        folder = next((Path(found) for page in self._pages.values() if (found := page.read().folder)), None)
        if folder is not None:
            kept = keep_stacks(folder, name, reports)
            where = f" Stacks: {kept}." if kept else ""
            if verdict.may_end:
                keep_verdict(folder, name, sentence, verdict, steps_done(reports))
        return f"{sentence}{where}", verdict.may_end
