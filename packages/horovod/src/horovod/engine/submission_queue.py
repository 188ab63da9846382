"""The operations that were submitted and not announced yet, and when to announce them. The caller passes the time.

An operation that a thread waits for is announced at once, with everything before it. All others are held back for a moment, in
which more of them may come: ranks that announce the same list of operations in one message agree by comparing two hashes, while
ranks that cut the stream of operations at different places have to match every single operation.

The controller's lock guards everything here: any thread appends, the engine thread takes.
"""

import math

from horovod.engine.operation import Operation

# In cycle times. Submitting a thousand operations takes a few milliseconds.
_HELD_CYCLES = 5


class SubmissionQueue:
    """Operations in the order of their submission."""

    def __init__(self, cycle_time_s: float) -> None:
        self._held_s = _HELD_CYCLES * cycle_time_s
        self.operations: list[Operation] = []
        self.num_together = 0
        """Number of open Controller.together() blocks: their end wakes the engine thread."""
        # Infinite until the engine thread has seen that there are operations: submitting needs no clock. 0: without delay.
        self._due_at = math.inf

    def hurry(self) -> bool:
        """Announces what is in the queue without delay; has no effect on operations that are submitted later.

        Returns whether that changes anything, so the engine thread must be woken.
        """
        changes = bool(self.operations) and self._due_at > 0
        self._due_at = 0.0 if self.operations else math.inf
        return changes

    def due_at(self, now: float) -> float:
        """Returns the time at which the operations are to be announced; infinite if there are none."""
        if self.operations:
            self._due_at = min(self._due_at, now + self._held_s)
        return self._due_at

    def take_if_due(self, now: float) -> list[Operation]:
        """Returns all operations if they are to be announced now, else none."""
        if now < self.due_at(now):
            return []
        operations = self.operations
        self.clear()
        return operations

    def clear(self) -> None:
        """Empties the queue."""
        self.operations, self._due_at = [], math.inf
