"""From a call to a handle: checks that need nobody else, then the queue of the controller."""

import warnings
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megaclass.hvd.basics import Job, _basics
from megaclass.hvd.collectives.ops import Adasum, Average, Max, Min, Product, Sum
from megaclass.hvd.engine.controller import Operation
from megaclass.hvd.engine.messages import Request, terms_of
from megaclass.hvd.exceptions import HorovodInternalError
from megaclass.hvd.process_sets import ProcessSet, global_process_set
from megaclass.hvd.transport.executor import DTYPES

__all__ = ["barrier", "join", "poll", "synchronize"]

_REDUCTIONS = {Average, Sum, Adasum, Min, Max, Product}

_STRIDED = torch.strided


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """`op` from the argument that came before it."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return op
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    return Average


def checked_op(op: int) -> int:
    if op not in _REDUCTIONS:
        raise ValueError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product.")
    return op


def enqueue(
    kind: str,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    op: int = -1,
    root: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: tuple[int, ...] = (),
    wire: str = "",
    keeps_error: bool = False,
    is_grouped: bool = False,
    is_urgent: bool = False,
) -> int:
    """A handle for synchronize(). `outputs`: where results go; None where their shape is not known yet."""
    job: Job = _basics.job()
    number = process_set.process_set_id
    if number != 0:
        _check_membership(kind, job, process_set)
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    # Memory, not variables: writing a result is no step of autograd's, as it is none in Horovod.
    if len(tensors) == 1:
        # By far the most common, often a thousand times in a row: no list is built for it.
        check_tensor(kind, tensors[0])
        first = tensors[0].data
        inputs = [first]
        dtypes, shapes = (DTYPES[first.dtype],), (first.shape,)
    else:
        for tensor in tensors:
            check_tensor(kind, tensor)
        inputs = [tensor.data for tensor in tensors]
        dtypes, shapes = tuple([DTYPES[tensor.dtype] for tensor in inputs]), tuple([tensor.shape for tensor in inputs])
    terms = terms_of(
        kind,
        number,
        dtypes,
        shapes,
        op,
        root,
        float(prescale),
        float(postscale),
        splits,
        "cpu" if not inputs or inputs[0].is_cpu else inputs[0].device.type,
        wire,
        keeps_error and name is not None,
        is_grouped,
        name is not None,
    )
    operation = Operation(Request.under(job.next_name(number) if name is None else str(name), terms), inputs)
    if outputs is tensors:
        operation.outputs = inputs
        operation.result = tuple(outputs) if is_grouped else outputs[0]
    elif outputs is not None:
        operation.outputs = [
            given if out is tensor else out.data for given, tensor, out in zip(inputs, tensors, outputs, strict=True)
        ]
        operation.result = tuple(outputs) if is_grouped else (outputs[0] if outputs else None)
    if inputs and inputs[0].is_cuda:
        operation.ready = torch.cuda.Event()
        operation.ready.record(torch.cuda.current_stream(inputs[0].device))
    job.controller.submit(operation, is_urgent=is_urgent)
    handle = job.next_handle()
    job.handles[handle] = operation
    return handle


def group_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of a grouped operation, which may come from a generator; ValueError for none of them."""
    tensors = list(tensors)
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")
    if len({tensor.device for tensor in tensors}) > 1:
        raise HorovodInternalError("Tensors in list must be on same device.")
    return tensors


def check_tensor(kind: str, tensor: Tensor) -> None:
    dtype = tensor.dtype
    is_known = tensor.layout is _STRIDED and dtype in DTYPES
    if not is_known or (dtype is torch.bool and kind in ("allreduce", "reducescatter")):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def _check_membership(kind: str, job: Job, process_set: ProcessSet) -> None:
    number = process_set.process_set_id
    if number is None or number not in job.process_sets:
        raise ValueError(
            f"{kind.capitalize()}: Process set provided does not exist, or has not been registered. ({process_set})"
        )
    if job.meeting.rank not in job.process_sets[number]:
        raise ValueError(
            f"{kind.capitalize()}: Rank {job.meeting.rank} is not a member of the provided process set. ({process_set})"
        )


def poll(handle: int) -> bool:
    """Whether the operation has completed, so that synchronize() returns at once."""
    operation = _basics.job().handles.get(handle)
    if operation is None:
        raise ValueError(f"Handle {handle!r} was not created or has been cleared.")
    return bool(operation.is_done)


def synchronize(handle: int) -> Any:
    """Waits for the operation and returns its result: a tensor, a tuple of them, or None for an unknown handle."""
    return fetch(handle, _result)


_result = attrgetter("result")


def fetch(handle: int, pick: Any) -> Any:
    """Waits for the operation and returns what `pick` takes from it."""
    if not _basics.is_initialized():
        return None
    job: Job = _basics.job()
    operation = job.handles.get(handle)
    if operation is None:
        return None
    try:
        # Most of many handles that are waited for one after the other are done when the first one is.
        if not operation.is_done or operation.error:
            job.controller.wait(operation)
    finally:
        job.handles.pop(handle, None)
    if operation.ready is not None:
        stream = torch.cuda.current_stream(operation.inputs[0].device)
        stream.wait_event(operation.ready)
        for tensor in operation.outputs:
            # Made on the controller's stream: their memory must not be used again before this one has read them.
            tensor.record_stream(stream)
    return pick(operation)


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in the allreduces of the others with zeros until all have joined.

    Returns the rank that joined last. `device` is where Horovod made the zeros; here they are made where the others'
    tensors are.
    """
    job: Job = _basics.job()
    operation = Operation(Request("join", "join"))
    job.controller.submit_join(operation)
    job.controller.wait(operation)
    job.restart_names()
    return int(operation.result)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the process set have called it."""
    number = _basics.job().next_barrier(process_set.process_set_id)
    synchronize(enqueue("barrier", [], None, f"barrier.{number}", process_set, is_urgent=True))
