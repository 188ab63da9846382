"""Runs the responses that the ranks have agreed on, and tells the threads that wait for their operations.

All ranks receive the same responses in the same order, so that each rank meets the others in each operation. A rank whose
operation fails is no longer in step with them: `on_failure` then ends the job. Only the engine thread calls this.
"""

from collections.abc import Callable

from horovod.engine.in_flight import InFlight
from horovod.engine.messages import Response
from horovod.engine.negotiation import Agreed
from horovod.engine.operation import Operation, OperationRunner
from horovod.engine.timeline import Timeline


class ResponseRunner:
    """Has this rank's part of agreed operations run, one response after the other."""

    def __init__(
        self,
        rank_name: str,
        in_flight: InFlight,
        runner: OperationRunner,
        timeline: Timeline,
        on_failure: Callable[[str], None],
    ) -> None:
        """`rank_name`: this rank and its host, for errors. `on_failure`: called with the error of a failed operation."""
        self._rank_name = rank_name
        self._in_flight = in_flight
        self._runner = runner
        self._timeline = timeline
        self._on_failure = on_failure

    def run(self, agreed: Agreed) -> None:
        """Runs the responses in their order, until the controller is closed."""
        for response in agreed.responses:
            # Asked before each one: a failure, or the end of the job, closes the controller between two of them.
            if self._in_flight.closed:
                return
            if response.last_joined >= 0:
                self._in_flight.finish_join(response.last_joined)
            else:
                self._run_one(response, agreed.payload)

    def _run_one(self, response: Response, payload: bytes) -> None:
        # By key, not by position: this rank may have submitted them in another order, or joined (None).
        operations = [self._in_flight.get(request.key) for request in response.requests]
        # A thousand names are formed only where a trace is written.
        names = [request.full_name for request in response.requests] if self._timeline.is_active else []
        self._timeline.negotiated(names)
        if response.error:
            # The ranks disagree about this operation only: all of them fail it, and the job continues.
            self._in_flight.finish(operations, response.error)
            return
        try:
            with self._timeline.phase(names, response.requests[0].kind.upper()):
                self._execute(response, operations, names, payload)
        except Exception as caught:  # whatever the backend raises, the waiting threads must learn of it
            error = f"{response.requests[0].full_name} on {self._rank_name} failed: {caught}"
            self._in_flight.finish(operations, error)
            # The ranks are no longer in step: no further operation can be trusted.
            self._on_failure(f"{error}.")
            return
        self._in_flight.finish(operations, "")

    def _execute(
        self, response: Response, operations: list[Operation | None], names: list[str], payload: bytes
    ) -> None:
        if not payload:
            self._runner.perform(response, operations)
            return
        # The payload is the result of the one response of this answer: rank 0 has already added the tensors up, as part of
        # the negotiation, and nothing is exchanged.
        with self._timeline.phase(names, "RANK_0_ALLREDUCE"):
            self._runner.deliver_payload(operations, payload)
