"""Broadcasts and gathers of objects, parameters and optimizer states."""

import hmac
import io
import pickle
from collections.abc import Iterable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from horovod.collectives.handles import synchronize
from horovod.collectives.operations import allgather, broadcast_, broadcast_async_
from horovod.common.basics import _basics, rank
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set, members_of
from horovod.engine.job import current
from megaclass_launch.errors import LaunchError
from megaclass_launch.rendezvous.job_secret import JOB_SECRET

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

_MAC_BYTES = 32
_NEEDS_SECRET = (
    f"This job has no secret by which a rank could tell such an object from a forged one: start the job with "
    f"`megaclass run`, or export the same {JOB_SECRET} to all ranks, for example from `openssl rand -hex 32`."
)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrites parameters with those of the root.

    params: `model.state_dict()`, or an iterable of tensors or of (name, tensor), such as `model.named_parameters()`.
    """
    if isinstance(params, dict):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, Tensor)):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    # All broadcasts are submitted before the first is waited for, so they are negotiated together.
    pending = []
    for name, tensor in named:
        if not torch.is_tensor(tensor):
            raise ValueError(f"broadcast_parameters: {name!r} has type {type(tensor)}; expected a tensor.")
        # broadcast_async_() refuses sparse tensors, as Horovod's does.
        is_whole = tensor.layout is not torch.strided or tensor.is_contiguous()
        whole = tensor if is_whole else tensor.detach().contiguous()
        pending.append((broadcast_async_(whole, root_rank, name), whole, tensor))
    for handle, whole, tensor in pending:
        synchronize(handle)
        # A copy was broadcast for a tensor whose memory is not contiguous.
        if whole is not tensor:
            tensor.data.copy_(whole)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Overwrites the optimizer's state and options with those of the root.

    model: its nn.Embedding layers show which gradients are sparse.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict()
    if not state["state"]:
        _make_state(optimizer, _sparse_parameters(model))
        state = optimizer.state_dict()
    tensors: list[tuple[str, Tensor]] = []
    scalars: dict[str, Any] = {}
    places: dict[str, tuple[dict[Any, Any], Any]] = {}
    for index, group in enumerate(state["param_groups"]):
        for option, value in group.items():
            if option != "params":
                scalars[f"{option}.{index}"] = value
                places[f"{option}.{index}"] = (optimizer.param_groups[index], option)
        for number in group["params"]:
            for name, value in state["state"].get(number, {}).items():
                key = f"{name}.{index}.{number}"
                if torch.is_tensor(value):
                    tensors.append((key, value))
                else:
                    scalars[key] = value
                    places[key] = (state["state"][number], name)
    broadcast_parameters(tensors, root_rank)
    for key, value in broadcast_object(scalars, root_rank).items():
        # The root may have more, for example the state of a parameter that is frozen here.
        if key in places:
            holder, name = places[key]
            holder[name] = value


def _sparse_parameters(model: nn.Module | None) -> set[int]:
    modules = model.modules() if model is not None else ()
    return {
        id(parameter)
        for module in modules
        if isinstance(module, nn.Embedding) and module.sparse
        for parameter in module.parameters()
    }


def _make_state(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    """Creates the state of a new optimizer by a step with zero gradients.

    Weight decay changes the weights even so; they are restored.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        # Fused optimizers require gradients with the memory layout of the weights.
        gradient = torch.zeros_like(parameter)
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or (
            isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse
        )
        parameter.grad = gradient.to_sparse() if is_sparse else gradient
    # The step of a DistributedOptimizer would wait for all ranks.
    step = getattr(optimizer, "step_without_reduction", optimizer.step)
    step()
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on every rank; it is pickled. `root_rank` is the global rank."""
    is_root = rank() == root_rank
    envelope = _Envelope(name, process_set)
    # The length is broadcast first: the other ranks need it to receive the object.
    data = envelope.sealed(obj, root_rank) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([data.numel()]), root_rank, f"{envelope.name}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{envelope.name}.t", process_set)
    return obj if is_root else envelope.opened(data, root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, ordered by rank; they are pickled."""
    return gather_objects(obj, name, global_process_set)


def gather_objects(obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Returns the objects of the ranks of a process set, ordered by rank."""
    envelope = _Envelope(name, process_set)
    data = envelope.sealed(obj, rank())
    lengths = allgather(torch.tensor([data.numel()]), name=f"{envelope.name}.sz", process_set=process_set).tolist()
    gathered = allgather(data, name=f"{envelope.name}.t", process_set=process_set)
    senders = members_of(process_set, current.running()) or ()
    return [envelope.opened(part, sender) for sender, part in zip(senders, gathered.split(lengths), strict=True)]


class _Envelope:
    """Signs one exchanged object with an HMAC, because unpickling runs code and gloo does not authenticate connections.

    The HMAC covers the sender, the name and the number of earlier uses of the name, so a recorded message is not
    accepted a second time. In a job without a secret anyone could compute the HMAC; there only plain data and tensors are
    unpickled, as by torch.load(weights_only=True).
    """

    def __init__(self, name: str | None, process_set: ProcessSet) -> None:
        job, number = current.running(), process_set.process_set_id
        # Not the object's type, as in Horovod, which hangs if the types of the ranks' objects differ.
        self.name = job.next_name("object", number) if name is None else name
        self._secret = job.meeting.secret
        self._is_trusted = bool(self._secret) or job.meeting.size == 1
        # Counted on every rank alike: ranks exchange the objects of one name in the same order.
        self._identity = f"{number} {job.next_name(f'object {self.name}', number)}"

    def sealed(self, obj: Any, sender: int) -> Tensor:
        content = cloudpickle.dumps(obj) if self._is_trusted else _plain_dumps(obj)
        return torch.frombuffer(bytearray(self._mac(content, sender) + content), dtype=torch.uint8)

    def opened(self, data: Tensor, sender: int) -> Any:
        whole = data.numpy().tobytes()
        mac, content = whole[:_MAC_BYTES], whole[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(content, sender)):
            raise HorovodInternalError(
                f"The object {self._identity!r} does not come from rank {sender} of this job: its signature is wrong. Either "
                f"the ranks exchange different objects under one name, or another process interferes."
            )
        return pickle.loads(content) if self._is_trusted else _plain_loads(content)

    def _mac(self, content: bytes, sender: int) -> bytes:
        return hmac.digest(self._secret, f"{sender} {self._identity}\0".encode() + content, "sha256")


def _plain_dumps(obj: Any) -> bytes:
    """Returns the bytes of plain data; raises LaunchError for an object that the other ranks would refuse."""
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        _plain_loads(buffer.getvalue())
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(f"Cannot send {type(obj).__name__} to the other ranks: {error}. {_NEEDS_SECRET}") from error
    return buffer.getvalue()


def _plain_loads(content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(f"An object from another rank is not plain data: {reason}. {_NEEDS_SECRET}") from error


# Names that Horovod's own module has as well.
from horovod.torch.mpi_ops import (
    ProcessSet,
    allgather,
    broadcast_,
    broadcast_async_,
    global_process_set,
    rank,
    size,
    synchronize,
)
