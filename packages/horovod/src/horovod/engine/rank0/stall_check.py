"""Looks for pending operations that wait too long, or that can never become ready. The caller passes the time.

crossed    ranks use one name for different operations, so each waits for the others: an error after CROSSED_S
stalled    some ranks have not announced it: a warning per interval, in the end a reason to stop the job
"""

import itertools

from horovod.common.settings import Settings
from horovod.engine.messages import Key
from horovod.engine.rank0.pending_table import Pending, PendingTable, rank_name

# Two ranks that use one name for different operations, one for an allreduce and one for an allgather, have this long to submit
# the other operation as well, as different threads may do. After that it is an error.
CROSSED_S = 0.5


class StallCheck:
    """Checks rank 0's table of pending operations."""

    def __init__(self, table: PendingTable, hosts: list[str], settings: Settings) -> None:
        self._table = table
        self._hosts = hosts
        self._warn_s, self._end_s = settings.stall_warning_s, settings.stall_shutdown_s

    def times(self) -> list[float]:
        """Returns the time at which each pending operation must be looked at next."""
        return [self._next_look(pending) for pending in self._table.pending.values()]

    def _next_look(self, pending: Pending) -> float:
        if not pending.was_compared:
            return pending.changed + CROSSED_S
        if not self._warn_s:
            return float("inf")
        # Each further interval warns again: whoever looks at the log late still finds it near the end.
        warning = pending.since + self._warn_s * (pending.num_warnings + 1)
        return min(warning, pending.since + self._end_s) if self._end_s >= self._warn_s else warning

    def fail_crossed(self, now: float) -> None:
        """Fails operations of one name that block each other."""
        for keys in self._crossed(now):
            # Before the first one leaves the table: the text names all of them.
            error = self._crossed_text(keys)
            for key in keys:
                self._table.fail(key, error)

    def overdue(self, now: float) -> tuple[str, str]:
        """Returns a warning about operations that wait for long, and a reason to end the job; mostly empty."""
        warn_s, end_s = self._warn_s, self._end_s
        stalled, ended = [], []
        for key, pending in self._table.pending.items():
            lag = now - pending.since
            if warn_s and lag >= warn_s * (pending.num_warnings + 1):
                # Not + 1: after a pause of the engine thread, the intervals that passed meanwhile count as warned.
                pending.num_warnings = int(lag / warn_s)
                stalled.append(key)
            if warn_s and end_s >= warn_s and lag >= end_s:
                ended.append(key)
        warning = self._stall_text(stalled, warn_s) if stalled else ""
        reason = f"{self._stall_text(ended, end_s)}\nWill shutdown." if ended else ""
        return warning, reason

    def _crossed(self, now: float) -> list[list[Key]]:
        """Returns groups of operations of one name that block each other: they differ in kind or in process set."""
        by_name: dict[str, list[Key]] = {}
        for key, pending in self._table.pending.items():
            pending.was_compared |= now - pending.changed >= CROSSED_S
            if pending.was_compared:
                by_name.setdefault(key[2], []).append(key)
        return [keys for keys in by_name.values() if len(keys) > 1 and self._is_crossed(keys)]

    def _is_crossed(self, keys: list[Key]) -> bool:
        # A rank that has announced none of them yet may still complete one.
        present = set(self._table.joined).union(*(self._table.pending[key].requests for key in keys))
        if any(rank not in present for key in keys for rank in self._table.members(key[0])):
            return False
        # Two operations block each other if of the ranks that belong to both, some wait in the first and others in the second.
        for one, two in itertools.combinations(keys, 2):
            both = set(self._table.members(one[0])) & set(self._table.members(two[0]))
            in_one, in_two = (
                set(self._table.pending[one].requests) & both,
                set(self._table.pending[two].requests) & both,
            )
            if in_one - in_two and in_two - in_one:
                return True
        return False

    def _crossed_text(self, keys: list[Key]) -> str:
        in_sets = len({key[0] for key in keys}) > 1
        sides = []
        for key in keys:
            where = f" on process set {key[0]} {list(self._table.members(key[0]))}" if in_sets else ""
            sides.append(f"{rank_name(min(self._table.pending[key].requests), self._hosts)} did an {key[1]}{where}")
        what = "operations" if len({key[1] for key in keys}) > 1 else "process sets"
        return f"Mismatched {what} for the name {keys[0][2]!r}: {', but '.join(sides)}."

    def _stall_text(self, stalled: list[Key], limit_s: float) -> str:
        # By rank: the reader looks for the rank that is stuck, not for the operations that wait.
        missing: dict[int, list[str]] = {}
        for key in stalled:
            for rank in self._table.missing(key):
                missing.setdefault(rank, []).append(f"{key[1]}.{key[2]}")
        lines = [
            f"One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
            f"waiting for remainder of ranks for more than {limit_s:g} seconds. This may indicate that different ranks "
            f"are trying to submit different tensors or that only subset of ranks is submitting tensors, which will "
            f"cause deadlock. ",
            "Missing ranks:",
        ]
        for rank, names in sorted(missing.items()):
            shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
            lines.append(f"{rank} ({self._hosts[rank]}): [{shown}]")
        return "\n".join(lines)
