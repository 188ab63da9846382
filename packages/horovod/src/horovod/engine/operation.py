"""Operations that callers submitted, from their submission until they are done; and who runs them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from horovod.common.exceptions import DUPLICATE_NAME, HorovodInternalError
from horovod.engine.messages import JOIN, Key, Request, Response


@dataclass(slots=True, eq=False)
class Operation:
    """One rank's part of a collective operation.

    The submitting thread fills `request`, `inputs` and `outputs`; the engine thread writes all other fields,
    `is_done` last; waiting threads read them once `is_done` is True.
    """

    request: Request
    inputs: list[Tensor] = field(default_factory=list)
    """Tensors to send."""
    outputs: list[Tensor] = field(default_factory=list)
    """Tensors that receive the results; empty if their shape is known only after the negotiation."""
    result: Any = None
    """The value that synchronize() returns: a tensor, a tuple of tensors, or a number."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Number of rows of every member, for each tensor of an allgather."""
    error: str = ""
    """Why the operation failed; empty if it succeeded."""
    is_done: bool = False
    # In quotes: threading.Lock is a function, not a class, before Python 3.13.
    waiter: "threading.Lock | None" = None
    """A lock that is held until the operation is done; created by the first thread that waits."""
    on_done: Callable[[], None] | None = None
    """Called once when the operation is done, by the engine thread: it must not wait."""
    ready: torch.cuda.Event | None = None
    """CUDA event after which the inputs may be read; once the operation is done, after which the outputs may be read."""


class OperationRunner(Protocol):
    """Executes operations for the controller, which does not know about tensors. `Executor` implements it."""

    def perform(self, response: Response, operations: list[Operation | None]) -> None:
        """Runs an agreed operation; an entry is None if this rank has joined and contributes zeros."""

    def small_payload(self, operations: list[Operation]) -> bytes:
        """Returns the tensors of a cycle if they are small enough to travel with the announcement, else nothing."""

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        """Combines the payloads of all ranks."""

    def deliver_payload(self, operations: list[Operation | None], payload: bytes) -> None:
        """Copies the combined payload into the outputs."""


class InFlight:
    """Operations by key that are not done yet.

    `lock` is the controller's lock. Any thread adds operations; the engine thread finishes them, and so does a thread that
    closes the controller, possibly while the engine thread still runs one of them: the first to finish an operation decides
    its result.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._operations: dict[Key, Operation] = {}
        self.closed = ""
        """Why no operation is possible any more; empty while operations are possible. Any thread reads it without `lock`."""

    # -- the caller holds `lock` ----------------------------------------------------------------------------------

    def add(self, operation: Operation) -> None:
        """Adds an operation; HorovodInternalError after close(), ValueError if one of the same name is under way."""
        if self.closed:
            raise HorovodInternalError(self.closed)
        # Two operations of one name could not be told apart by the other ranks. Horovod refuses this with the same text.
        if self._operations.setdefault(operation.request.key, operation) is not operation:
            raise ValueError(DUPLICATE_NAME)

    def close(self, reason: str) -> None:
        """Refuses all later operations; fail_all() fails those that are under way. The reason of the first call stays."""
        # The first reason is the cause; later ones follow from it.
        self.closed = self.closed or reason

    def waiter(self, operation: Operation) -> "threading.Lock | None":
        """Returns the lock on which threads wait for the operation; None if it is done."""
        if operation.waiter is None and not operation.is_done:
            operation.waiter = threading.Lock()
            operation.waiter.acquire()
        return operation.waiter

    # -- any thread, without `lock` -------------------------------------------------------------------------------

    def get(self, key: Key) -> Operation | None:
        """Returns the operation; None if this rank has joined, and takes part in it with zeros."""
        return self._operations.get(key)

    def call_when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Calls `call` once the operation is done, or now if it is. The engine thread calls it, so it must not wait."""
        with self._lock:
            if not operation.is_done:
                operation.on_done = call
                return
        call()

    def finish(self, operations: Sequence[Operation | None], error: str) -> None:
        """Marks the operations as done, and lets the threads that wait for them through."""
        finished: list[Operation] = []
        with self._lock:
            for operation in operations:
                # An interrupted wait may have closed the controller, and failed this operation, while it was running.
                if operation is None or operation.is_done:
                    continue
                self._operations.pop(operation.request.key, None)
                # In this order: readers look at `is_done` first, without the lock.
                operation.error = error
                operation.is_done = True
                if operation.waiter is not None:
                    operation.waiter.release()
                finished.append(operation)
        # Without the lock: what is called may submit the next operation.
        for operation in finished:
            if operation.on_done is not None:
                operation.on_done()

    def finish_join(self, last_joined: int) -> None:
        """Finishes this rank's join, if it has announced one: all ranks have joined."""
        join = self.get(JOIN.key)
        if join is not None:
            join.result = last_joined
        self.finish([join], "")

    def fail_all(self) -> None:
        """Fails everything that is under way with the reason of close()."""
        with self._lock:
            operations = list(self._operations.values())
        self.finish(operations, self.closed)
