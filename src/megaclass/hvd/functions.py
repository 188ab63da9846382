"""Objects, parameters and optimizer states from one rank to all."""

import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megaclass.hvd.basics import _basics
from megaclass.hvd.mpi_ops import allgather, broadcast_, broadcast_async_, rank, size, synchronize
from megaclass.hvd.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrites parameters by those of the root: `model.state_dict()`, a list of (name, tensor), or of tensors."""
    if isinstance(params, dict):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    elif isinstance(params, Iterable) and not isinstance(params, (str, Tensor)):
        # model.named_parameters() itself, as scripts write it.
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    pending = []
    for name, tensor in named:
        if not torch.is_tensor(tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is of type {type(tensor)}, not a tensor.")
        whole = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        pending.append((broadcast_async_(whole, root_rank, name), whole, tensor))
    for handle, whole, tensor in pending:
        synchronize(handle)
        if whole is not tensor:
            tensor.data.copy_(whole)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Overwrites the optimizer's state and options by those of the root; `model` tells which gradients are sparse."""
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
    """A new optimizer has no state yet: a step with zero gradients makes it.

    Weights may move in that step (weight decay), so they are put back.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        # Laid out as the weights are: fused optimizers insist on it.
        gradient = torch.zeros_like(parameter)
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or (
            isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse
        )
        parameter.grad = gradient.to_sparse() if is_sparse else gradient
    # A distributed optimizer's own step would wait for all ranks.
    step = getattr(optimizer, "step_without_reduction", optimizer.step)
    step()
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank, pickled on the way. `root_rank` is the global rank."""
    name = name if name is not None else _object_name(process_set)
    if rank() == root_rank:
        data = torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64)
        broadcast_(length, root_rank, f"{name}.sz", process_set)
    else:
        length = torch.zeros(1, dtype=torch.int64)
        broadcast_(length, root_rank, f"{name}.sz", process_set)
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if rank() == root_rank else _loads(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, in their order, pickled on the way."""
    name = name if name is not None else _object_name(global_process_set)
    data = torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([data.numel()]), name=f"{name}.sz").tolist()
    gathered = allgather(data, name=f"{name}.t")
    return [_loads(part) for part in gathered.split(lengths)][: size()]


def _object_name(process_set: ProcessSet) -> str:
    """Horovod takes the type's name, and waits for ever where the ranks' types differ; this one is counted."""
    return f"object.{_basics.job().next_object(process_set.process_set_id)}"


def _dumps(obj: Any) -> bytes:
    """Between ranks of one job. With cloudpickle, as Horovod does, where it is installed: it knows lambdas."""
    try:
        import cloudpickle
    except ImportError:
        try:
            return pickle.dumps(obj)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"Cannot pickle {type(obj).__name__} for the other ranks: {error}. "
                f"Functions defined in functions need cloudpickle: pip install 'megaclass[hvd]'."
            ) from error
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return buffer.getvalue()


def _loads(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
