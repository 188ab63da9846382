"""Looks for hangs of the ranks that `megaclass train` started on this machine, where no agent and no driver is between."""

from collections.abc import Mapping
from pathlib import Path

from megaclass.distributed.rank_status import StatusPage
from megaclass.launch.agent.supervisor import Supervisor
from megaclass.launch.hang.record import keep_stacks, keep_verdict, new_name
from megaclass.launch.hang.sentence import hang_sentence, steps_done
from megaclass.launch.hang.stacks import WatchedRank, collect, latest_late_s
from megaclass.launch.hang.verdict import find_verdict


class LocalHangWatch:
    """Reads the pages of the ranks about once per second; nothing is asked of them until one is late."""

    def __init__(self, supervisor: Supervisor, pages: Mapping[int, StatusPage], host: str) -> None:
        self._supervisor, self._pages, self._host = supervisor, pages, host

    def verdict(self, now: float) -> str | None:
        """Returns None while no rank is late; otherwise collects the stacks, keeps them, and returns the message."""
        running = [WatchedRank(w.rank, w.pid, self._pages[w.rank]) for w in self._supervisor.running()]
        rank, _ = latest_late_s({watched.rank: watched.page for watched in running}, now)
        if rank < 0:
            return None
        status = self._pages[rank].read()
        reports = collect(running, self._host)
        verdict = find_verdict(reports)
        sentence = hang_sentence(now - status.progress_at, verdict)
        name, where = new_name(), ""
        folder = next((Path(found) for page in self._pages.values() if (found := page.read().folder)), None)
        if folder is not None:
            kept = keep_stacks(folder, name, reports)
            keep_verdict(folder, name, sentence, verdict, steps_done(reports))
            where = f" Stacks: {kept}." if kept else ""
        return f"{sentence}{where}"
