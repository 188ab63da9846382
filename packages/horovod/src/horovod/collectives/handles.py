"""From a call to a handle: checks that need no other rank, then the queue of the controller; and back.

enqueue() describes the call as a Request, submits it to the controller and returns a handle, which `job.handles` maps to
the Operation. synchronize() waits for the Operation and forgets the handle.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set, members_of
from horovod.engine.job import current
from horovod.engine.kinds import KINDS, REDUCTIONS, Average, Sum
from horovod.engine.messages import JOIN, Request, terms_of
from horovod.engine.operation import Operation
from horovod.transport.arithmetic import DTYPES, empty_result

__all__ = ["barrier", "join", "poll", "synchronize"]

_STRIDED = torch.strided


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Returns the op; `average` is the deprecated argument that `op` replaced."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return op
    if average is not None:
        text = "Parameter `average` has been replaced with `op` and will be removed in v1.0"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average


def groups_of_options(op: int, gradient_predivide_factor: float, num_groups: int, groups: Any, stacklevel: int) -> Any:
    """Returns `groups` after the checks that the optimizers of all frameworks make; `num_groups` is its deprecated name."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=stacklevel + 1,
        )
    return num_groups if groups is None and num_groups != 0 else groups


def checked_op(op: int) -> int:
    """Returns the op, or raises ValueError if there is none of that number."""
    if op not in range(len(REDUCTIONS)):
        raise ValueError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product.")
    return op


class ReductionOptions(NamedTuple):
    """How tensors are combined: what all reductions have in common."""

    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set
    wire: str = ""
    """Name of the wire format; empty: the dtype of the tensor."""
    keeps_error: bool = True
    """True if the rounding error of a compressed tensor is added to the next tensor of the same name."""


_NO_REDUCTION = ReductionOptions(op=-1)


def enqueue(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    reduction: ReductionOptions | None = None,
    root: int = -1,
    splits: tuple[int, ...] = (),
    is_grouped: bool = False,
) -> int:
    """Submits an operation and returns its handle. `in_place`: the tensors receive the results."""
    job = current.running()
    number = process_set.process_set_id
    if number != 0:
        checked_members(kind, process_set)
    op, prescale, postscale, _, wire, keeps_error = reduction or _NO_REDUCTION
    inputs: list[Tensor] = []
    dtypes: list[str] = []
    shapes: list[torch.Size] = []
    for tensor in tensors:
        dtypes.append(check_tensor(kind, tensor))
        shapes.append(tensor.shape)
        # Use `.data`: as in Horovod, writing a result is not recorded by autograd.
        inputs.append(tensor.data)
    # By position: terms_of() is a cache, and keyword arguments would make its keys slower. As floats: 1 and 1.0 are one key,
    # but their hashes for the other ranks would differ.
    terms = terms_of(
        kind,
        number,
        tuple(dtypes),
        tuple(shapes),
        op,
        root,
        float(prescale),
        float(postscale),
        splits,
        "cpu" if not inputs or inputs[0].is_cpu else inputs[0].device.type,
        wire,
        bool(wire) and keeps_error and name is not None,
        is_grouped,
        name is not None,
    )
    request = Request(job.next_name("noname", number) if name is None else str(name), terms)
    operation = Operation(request, inputs)
    if in_place or KINDS[kind].keeps_shapes:
        # In place: the same objects, by which the executor knows that there is nothing to copy.
        operation.outputs = inputs if in_place else [empty_result(tensor) for tensor in inputs]
        results = tensors if in_place else operation.outputs
        operation.result = tuple(results) if is_grouped else results[0]
    if terms.device == "cuda":
        # The executor's stream waits for this event: kernels that write the inputs may still be running.
        operation.ready = torch.cuda.Event()
        operation.ready.record(torch.cuda.current_stream(inputs[0].device))
    # A refused operation (a duplicate name, a job that has ended) raises here and leaves no handle.
    job.controller.submit(operation)
    handle = next(job.handle_numbers)
    job.handles[handle] = operation
    return handle


def group_of(tensors: Iterable[Tensor], if_empty: type[Exception] = IndexError) -> list[Tensor]:
    """Returns the tensors of a grouped operation, which may come from a generator.

    An empty group raises the error that Horovod raises there: IndexError, or ValueError if tensors are compressed.
    """
    tensors = list(tensors)
    if not tensors:
        raise if_empty("A grouped operation needs at least one tensor.")
    if len({tensor.device for tensor in tensors}) > 1:
        raise HorovodInternalError("Tensors in list must be on same device.")
    return tensors


def check_tensor(kind: str, tensor: Tensor) -> str:
    """Returns the name of the dtype; ValueError, in Horovod's words, if this kind of operation cannot take the tensor."""
    dtype = tensor.dtype
    if tensor.layout is not _STRIDED:
        raise ValueError(
            f"Tensor type {tensor.type()} is not supported by {kind}: it is sparse. Pass it to sparse_allreduce_async(), or "
            f"convert it with to_dense()."
        )
    if dtype not in DTYPES or (dtype is torch.bool and KINDS[kind].is_arithmetic):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return DTYPES[dtype]


def checked_members(kind: str, process_set: ProcessSet) -> tuple[int, ...]:
    """Returns the ranks of the set; ValueError, in Horovod's words, unless it exists and this rank is a member."""
    job = current.running()
    members = members_of(process_set, job)
    if members is None:
        raise ValueError(
            f"{kind.capitalize()}: Process set provided does not exist, or has not been registered. ({process_set})"
        )
    if job.meeting.rank not in members:
        raise ValueError(
            f"{kind.capitalize()}: Rank {job.meeting.rank} is not a member of the provided process set. ({process_set})"
        )
    return members


def poll(handle: int) -> bool:
    """Returns True once the operation has completed, so synchronize() returns at once."""
    operation = current.job.handles.get(handle) if current.job is not None else None
    if operation is None:
        raise ValueError(f"Handle {handle!r} was not created or has been cleared.")
    return bool(operation.is_done)


_result = attrgetter("result")


def waited(start: Callable[..., int], *args: Any, pick: Callable[[Operation], Any] = _result, **kwargs: Any) -> Any:
    """Starts an operation by start(*args, **kwargs) and waits for it; returns its result, or `pick(operation)`."""
    # Together: the engine thread is woken once, when there is no more to wait for. Without a job, start() raises the error.
    with current.job.controller.together() if current.job is not None else contextlib.nullcontext():
        handle = start(*args, **kwargs)
    return fetch(handle, pick)


def synchronize(handle: int) -> Any:
    """Waits for the operation and returns its result: a tensor or a tuple of tensors; None for an unknown handle."""
    return fetch(handle, _result)


def fetch(handle: int, pick: Callable[[Operation], Any]) -> Any:
    """Waits for the operation and returns `pick(operation)`; None for an unknown handle."""
    job = current.job
    operation = job.handles.get(handle) if job is not None else None
    if job is None or operation is None:
        return None
    # When many handles are waited for in turn, most are done by the time the first one is.
    if not operation.is_done or operation.error:
        try:
            job.wait(operation)
        except HorovodInternalError:
            job.handles.pop(handle, None)
            raise
    job.handles.pop(handle, None)
    if operation.ready is not None:
        # `ready` now marks the end of the operation on the executor's stream; the caller's stream waits for it.
        stream = torch.cuda.current_stream(operation.inputs[0].device)
        stream.wait_event(operation.ready)
        for tensor in operation.outputs:
            # The outputs were allocated on the controller's stream. This keeps the allocator from reusing their memory
            # before the caller's stream has read them.
            tensor.record_stream(stream)
    return pick(operation)


def join(device: int = -1) -> int:
    """Declares that this rank has no more data: until all ranks have joined, it contributes zeros to their allreduces.

    Returns the rank that joined last. `device` is accepted for compatibility with Horovod: the zeros are allocated on the
    device type of the other ranks' tensors.
    """
    job = current.running()
    operation = Operation(JOIN)
    job.controller.submit(operation)
    job.wait(operation)
    job.restart_names()
    return int(operation.result)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the process set have called it."""
    # Each barrier has its own name, so a rank that is one barrier behind cannot meet the wrong one.
    name = current.running().next_name("barrier", process_set.process_set_id)
    waited(enqueue, "barrier", [], name, process_set)
