"""Hosts that are added or removed while an elastic job runs: the answers of the discovery. Standard library only."""

from collections.abc import Sequence

from megaclass.launch.driver.outcome import Outcome
from megaclass.launch.elastic.discovery import Discovery
from megaclass.launch.elastic.job import ElasticJob
from megaclass.launch.exit_codes import EXIT_USER_ERROR
from megaclass.launch.hosts import Host


class HostUpdates:
    """Writes the answers of the discovery into the table of hosts, and tells the user what has changed."""

    def __init__(self, discovery: Discovery, job: ElasticJob) -> None:
        self._discovery = discovery
        self._hosts, self._end, self._messages = job.hosts, job.end, job.io.messages

    def take(self) -> None:
        """Takes over the answers that have come."""
        for answer in self._discovery.news():
            if answer.problem:
                self._note_problem(answer.problem)
            else:
                self._update(answer.hosts)

    def _note_problem(self, problem: str) -> None:
        name = self._discovery.name
        if self._hosts.listed:
            # A script may fail for a moment, because a server does not answer, say; the ranks that run need no answer.
            self._messages.say(f"WARNING {name}: {problem}; its last good answer stands.")
        else:
            self._messages.say(f"{name}: {problem}. The job needs hosts to start with.")
            self._end.end(Outcome(exit_code=EXIT_USER_ERROR, may_restart=False))

    def _update(self, hosts: Sequence[Host]) -> None:
        is_first = not self._hosts.listed
        added, removed = self._hosts.update(hosts)
        # In the first answer every host is new; the message about the first generation names them.
        if is_first:
            return
        for host in added:
            self._messages.say(f"{host.name}:{host.slots} was added; new ranks there join at the next commit.")
        for host in removed:
            left = self._hosts.slots(host.name)
            what = f"has {left} slot(s) now" if left else "was removed"
            self._messages.say(f"{host.name} {what}; its ranks that are not needed leave at the next commit.")
