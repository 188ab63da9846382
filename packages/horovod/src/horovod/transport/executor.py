"""Runs the operations that the ranks have agreed on. Only the thread that drives the controller calls it.

groups.py chooses what carries an operation; reductions.py and exchanges.py have one method per kind of operation.
"""

from collections.abc import Callable

import torch

from horovod.engine.kinds import KINDS
from horovod.engine.messages import Request, Response
from horovod.engine.operation import Operation
from horovod.engine.timeline import Timeline
from horovod.transport.exchanges import Exchanges
from horovod.transport.groups import Groups
from horovod.transport.process_set_table import ProcessSetTable
from horovod.transport.reductions import FusionBuffers, Reductions, add_payloads, deliver_payload, small_payload


class Executor:
    """Implements OperationRunner."""

    def __init__(self, rank: int, timeline: Timeline, sets: ProcessSetTable, *, uses_nccl: bool) -> None:
        self._timeline = timeline
        self._sets = sets
        self._buffers = FusionBuffers()
        self._groups = Groups(rank, sets, uses_nccl=uses_nccl)
        exchanges = Exchanges(self._groups)
        reductions = Reductions(timeline, self._groups, exchanges, self._buffers)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # The GPU of the latest operation.
        self._gpu: torch.device | None = None
        self._runners: dict[str, Callable[[Response, list[Operation | None]], None]] = {
            "allreduce": reductions.allreduce,
            "allgather": exchanges.allgather,
            "broadcast": exchanges.broadcast,
            "alltoall": exchanges.alltoall,
            "reducescatter": reductions.reducescatter,
            "barrier": lambda response, operations: None,
            "add_process_set": self._change_sets,
            "remove_process_set": self._change_sets,
        }

    def perform(self, response: Response, operations: list[Operation | None]) -> None:
        """Runs an agreed operation; an entry is None where this rank has joined and contributes zeros."""
        first = response.requests[0]
        run = self._runners[first.kind]
        # An allreduce shows its transport itself: copies into and out of the fusion buffer come before and after it.
        shown = [first.full_name] if KINDS[first.kind].is_collective and first.kind != "allreduce" else []
        with self._timeline.phase(shown, f"{self._groups.transport(first)}_{first.kind.upper()}"):
            if first.device == "cpu":
                run(response, operations)
            else:
                self._on_gpu(lambda: run(response, operations), operations)

    def _on_gpu(self, run: Callable[[], None], operations: list[Operation | None]) -> None:
        """Runs on the executor's own stream, after the streams that wrote the inputs.

        synchronize() makes the caller's stream wait for this one, through `operation.ready`.
        """
        present = [operation for operation in operations if operation is not None]
        if present:
            # A script chooses its GPU after init(), so that it is learned from the tensors.
            self._gpu = present[0].inputs[0].device
        # A rank that has joined sends its zeros from the GPU it used last.
        device = self._gpu or torch.device("cuda", torch.cuda.current_device())
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for operation in present:
                assert operation.ready is not None
                stream.wait_event(operation.ready)
            run()
            done = torch.cuda.Event()
            done.record(stream)
        for operation in present:
            operation.ready = done
            # The allocator must not reuse their memory before this stream has finished with it.
            for tensor in (*operation.inputs, *operation.outputs):
                tensor.record_stream(stream)

    # -- small tensors, which travel with the negotiation -----------------------------------------------------------

    def small_payload(self, operations: list[Operation]) -> bytes:
        return small_payload(operations, len(self._sets.ranks[0]))

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        return add_payloads(request, payloads)

    def deliver_payload(self, operations: list[Operation | None], payload: bytes) -> None:
        deliver_payload(operations, payload, self._buffers)

    def _change_sets(self, response: Response, operations: list[Operation | None]) -> None:
        operation = operations[0]
        number = self._sets.change(response.requests[0])
        if operation is not None:
            operation.result = number
