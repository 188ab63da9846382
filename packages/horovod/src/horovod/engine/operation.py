"""An operation that a caller has submitted."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from horovod.engine.messages import Request


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
    waiter: threading.Event | None = None
    """Set when the operation is done; created by the first thread that waits."""
    on_done: Callable[[], None] | None = None
    """Called once when the operation is done, by the engine thread: it must not wait."""
    ready: torch.cuda.Event | None = None
    """CUDA event after which the inputs may be read; once the operation is done, after which the outputs may be read."""
