"""Turns the margin, row optimizer and device that a user gives to PartialFC into objects, or says what to give instead."""

import contextlib
import difflib
import os
from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.devices import usable_device
from megaclass.errors import HeadError
from megaclass.head.margins import MARGINS, ArcFace, Margin
from megaclass.head.row_optimizers import ROW_OPTIMIZERS, RowOptimizer, RowSGD
from megaclass.world import world_from_environment

_T = TypeVar("_T")


class HasGroup(Protocol):
    """An object that stands for a process group, such as a process set of Horovod's API."""

    @property
    def group(self) -> dist.ProcessGroup: ...


def chosen_margin(given: Margin | str | None) -> Margin:
    """Returns the margin itself, the one of that name with its published values, or ArcFace() for None."""
    if given is None:
        return ArcFace()
    if isinstance(given, str):
        return _by_name({name: cls for name, (cls, _) in MARGINS.items()}, given, "margin")()
    if not isinstance(given, Margin):
        allowed = f"an instance such as ArcFace(scale=64, margin=0.5), or one of {', '.join(MARGINS)}"
        raise HeadError(
            f"PartialFC margin is {_described(given)}; it must be {allowed}. {_call_it(given, Margin)}".strip()
        )
    return given


def chosen_optimizer(given: RowOptimizer | str | None) -> RowOptimizer:
    """Returns the row optimizer itself, the one of that name with its default values, or RowSGD() for None."""
    if given is None:
        return RowSGD()
    if isinstance(given, str):
        return _by_name(ROW_OPTIMIZERS, given, "optimizer")()
    if isinstance(given, RowOptimizer):
        return given
    text = f"PartialFC optimizer is {_described(given)}; it must be RowSGD(), RowAdamW() or RowAdagrad()."
    is_class = isinstance(given, type)
    if isinstance(given, torch.optim.Optimizer) or (is_class and issubclass(given, torch.optim.Optimizer)):
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        row = {"adam": "RowAdamW()", "adamw": "RowAdamW()", "adagrad": "RowAdagrad()"}.get(name.lower(), "RowSGD()")
        raise HeadError(
            f"{text} Optimizers of torch.optim update all rows of a parameter, and the head updates only the centres that "
            f"took part in a step. Use optimizer={row} here, give the learning rate to head.step(lr=…), and keep "
            f"torch.optim for the backbone."
        )
    raise HeadError(f"{text} {_call_it(given, RowOptimizer)}".strip())


def chosen_device(given: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device of a new head; for None torch's default device, or the current GPU if the group is for GPUs only."""
    if given is not None:
        return usable_device(given, "PartialFC")
    default = torch.get_default_device()
    # A group of NCCL alone cannot exchange anything between CPUs.
    is_for_gpus = torch.cuda.is_available() and _is_for_gpus_only(group)
    return torch.device("cuda", torch.cuda.current_device()) if default.type == "cpu" and is_for_gpus else default


def _is_for_gpus_only(group: dist.ProcessGroup | None) -> bool:
    if group is not None:
        return torch.device("cpu") not in group._device_types
    return dist.is_initialized() and "cpu" not in dist.get_backend_config()


def chosen_group(given: object) -> dist.ProcessGroup | None:
    """Returns the process group that `group=` names, or None for the default group or a process on its own.

    given: a process group, or an object that has one as its attribute `group`, such as a process set of Horovod's API.
    """
    if given is None:
        _check_alone()
        return None
    group = given if isinstance(given, dist.ProcessGroup) else getattr(given, "group", None)
    if not isinstance(group, dist.ProcessGroup):
        raise HeadError(
            f"PartialFC group is {_described(given)}; it must be a process group of torch.distributed, or a process set of "
            f"Horovod's API, such as hvd.global_process_set."
        )
    return group


def _check_alone() -> None:
    """Raises if this process is one of several and no group connects them: each would train a head of its own."""
    if dist.is_initialized():
        return
    num_ranks = world_from_environment().size
    # A script that was started by horovodrun, or by hand with Horovod's names.
    with contextlib.suppress(ValueError):
        num_ranks = max(num_ranks, int(os.environ.get("HOROVOD_SIZE", "1")))
    if num_ranks > 1:
        raise HeadError(
            f"PartialFC was built in one of {num_ranks} processes, but torch.distributed is not initialised, so each of them "
            f"would train a separate head. Call torch.distributed.init_process_group() before, or give group=: with Horovod's "
            f"API, PartialFC(…, group=hvd.global_process_set) after hvd.init(). To train separate heads on purpose, unset "
            f"WORLD_SIZE and HOROVOD_SIZE."
        )


def check_tensors(**given: object) -> None:
    """Raises for a list or an array where a tensor is expected."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise HeadError(
                f"The head's {name} are {_described(value)}; they must be a tensor: torch.as_tensor({name}) makes one."
            )


def _by_name(known: Mapping[str, type[_T]], given: str, what: str) -> type[_T]:
    if given.lower() in known:
        return known[given.lower()]
    close = difflib.get_close_matches(given.lower(), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise HeadError(f"PartialFC {what} is {given!r}; it must be one of {', '.join(known)}.{hint}")


def _described(given: object) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return f"an object of {type(given).__module__}.{type(given).__qualname__}"


def _call_it(given: object, base: type) -> str:
    return f"Write {given.__name__}(), with parentheses." if isinstance(given, type) and issubclass(given, base) else ""
