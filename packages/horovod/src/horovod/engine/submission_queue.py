"""The operations that were submitted and not announced yet, and when to announce them. The caller passes the time.

An operation that a thread waits for is announced at once, with everything before it. All others are held back until the
submissions pause: ranks that announce the same list of operations in one message agree by comparing two hashes, while ranks
that cut the stream of operations at different places have to match every single operation.

The engine thread looks at the queue now and then. Submissions have paused if the queue was the same at two looks, one cycle
time apart, and the second look was on time. A late look proves nothing: the engine thread had to wait for the interpreter,
which the submitting thread holds, or for a core, which that thread may lack as well. Submitting needs no clock for this.

            first look           the queue has grown            a punctual look, no growth
    idle  ------------->  open  --------------------->  open  ------------------------------>  announced (idle)
                                                              is_urgent, or held for too long

The controller's lock guards everything here: any thread appends, the engine thread takes.
"""

from horovod.engine.operation import Operation

# Operations that no thread waits for are held back for at most this many cycle times while more of them keep coming. Small
# ones are held back longer: ranks cut the stream of operations at different places, and each cut costs a round trip.
_MOST_CYCLES = 5
_MOST_CYCLES_OF_LITTLE = 40
_WORTH_STARTING_BYTES = 1024 * 1024
# A look counts only if it is not later than this. It is less than the 5 ms that Python lets a thread keep the interpreter, and
# more than the rounding of timeouts to milliseconds.
_LATE_S = 0.002


class SubmissionQueue:
    """Operations in the order of their submission."""

    def __init__(self, cycle_time_s: float) -> None:
        self._cycle_s = cycle_time_s
        self.operations: list[Operation] = []
        self.num_bytes = 0
        self.is_urgent = False
        """True if a thread waits, so the queue is announced without delay."""
        self.num_together = 0
        """Number of open Controller.together() blocks: their end wakes the engine thread."""
        # What the engine thread saw at its looks: the length of the queue, since when it has that length, and the first look.
        self._num_seen = 0
        self._seen_at = 0.0
        self._opened_at = 0.0

    def hurry(self) -> bool:
        """Announces what is in the queue without delay; has no effect on operations that are submitted later.

        Returns whether that changes anything, so the engine thread must be woken.
        """
        changes = bool(self.operations) and not self.is_urgent
        self.is_urgent = self.is_urgent or changes
        return changes

    def next_look(self, now: float) -> float | None:
        """Returns the time at which the engine thread must call take_if_due(); None: the queue is empty."""
        if not self.operations:
            return None
        if self.is_urgent or not self._num_seen:
            return now
        return min(self._seen_at + self._cycle_s, self._limit())

    def take_if_due(self, now: float) -> list[Operation]:
        """Returns all operations if they are to be announced now, else none. Each call is a look."""
        if not self.operations or not (self.is_urgent or self._has_paused(now) or now >= self._limit()):
            return []
        operations = self.operations
        self.clear()
        return operations

    def clear(self) -> None:
        """Empties the queue."""
        self.operations, self.num_bytes, self.is_urgent, self._num_seen = [], 0, False, 0

    def _has_paused(self, now: float) -> bool:
        count = len(self.operations)
        if not self._num_seen:
            self._opened_at = now
        if count != self._num_seen:
            self._num_seen, self._seen_at = count, now
            return not self._cycle_s
        waited_s = now - self._seen_at
        if waited_s > self._cycle_s + _LATE_S:
            self._seen_at = now
            return False
        return waited_s >= self._cycle_s

    def _limit(self) -> float:
        """Returns the time at which the queue is announced although more operations keep coming."""
        # An early start gains nothing if the whole queue travels in less time than it took to submit it.
        most_cycles = _MOST_CYCLES if self.num_bytes >= _WORTH_STARTING_BYTES else _MOST_CYCLES_OF_LITTLE
        return self._opened_at + most_cycles * self._cycle_s
