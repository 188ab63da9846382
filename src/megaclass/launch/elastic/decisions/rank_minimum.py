"""The wait for enough ranks, and its end after --elastic-timeout. Standard library only."""

from collections.abc import Callable

from megaclass.launch.elastic.job import ElasticJob


class RankMinimum:
    """Decides whether there are enough ranks for a generation; if there are too few for too long, the job is given up.

    give_up: ends the job.
    """

    def __init__(self, job: ElasticJob, give_up: Callable[[], None]) -> None:
        self._hosts, self._agents, self._messages = job.hosts, job.agents, job.io.messages
        self._limit_s = job.options.elastic_timeout_s
        self._give_up = give_up
        self._short_since: float | None = None
        """Time since which there are too few ranks."""
        self._has_told_user = False

    def is_met(self, num_ranks: int, num_needed: int, now: float) -> bool:
        """Returns whether there are enough ranks; to be called again and again while there are not."""
        if num_ranks >= num_needed:
            # The next shortage has the whole time again, and a message of its own.
            self._short_since, self._has_told_user = None, False
            return True
        # The time counts from the first moment, although the user is told later: a host that never connects uses it up, too.
        self._short_since = self._short_since or now
        # No message while hosts are still being found or connected to: at every start there are too few for a moment.
        if not self._hosts.listed or self._agents.is_any_starting():
            return False
        if not self._has_told_user:
            self._has_told_user = True
            self._messages.say(
                f"{num_ranks} rank(s) can run, but {num_needed} are needed (--min-np): waiting for hosts for up to "
                f"{self._limit_s:g} s (--elastic-timeout)."
            )
        if now - self._short_since > self._limit_s:
            self._messages.say(
                f"no new generation: {num_ranks} rank(s) can run, {num_needed} are needed (--min-np), and no host was "
                f"added within {self._limit_s:g} s (--elastic-timeout)."
            )
            self._give_up()
        return False
