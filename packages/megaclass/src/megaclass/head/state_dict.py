"""Entries of a head in a state dict: names, the header, and gathering the whole head from all ranks.

A state dict holds the classes [start, stop) that `_extra_state` names: one rank's, or all of them. The second is the
format of a head on one rank, and loads on any number of ranks.

    margin_NAME         the margin's running values
    _extra_state        (4,) int64: step, first class, end of the classes, classes in total (a dict in older versions)
    store.weight_RD     centres
    store.state_NAME    the optimizer's state
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.centres import Centres, class_range
from megaclass_launch.ranks.collectives import gather_blocks, group_size

EXTRA = "_extra_state"
_STORE = "store."
_MARGIN = "margin_"
_GATHERED_BYTES = 1 << 26

ModuleState = Literal["refuse", "whole", "local"]
MODULE_STATES: tuple[str, ...] = get_args(ModuleState)


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Content of `_extra_state`."""

    step_count: int
    classes: range
    num_classes: int

    def to_tensor(self) -> Tensor:
        return torch.tensor([self.step_count, self.classes.start, self.classes.stop, self.num_classes])

    @classmethod
    def read(cls, state: Tensor | Mapping[str, int]) -> "StateHeader":
        # A tensor, because Lightning and Accelerate gather and broadcast entries of a state dict, which must be tensors.
        if isinstance(state, Tensor):
            step, start, stop, num_classes = state.tolist()
        else:
            step, start, stop, num_classes = (
                state[name] for name in ("step_count", "class_start", "class_stop", "num_classes")
            )
        return cls(step, range(start, stop), num_classes)


def name_tensors(
    rows: Mapping[str, Tensor], margin_state: Mapping[str, Tensor], header: StateHeader
) -> dict[str, Tensor]:
    """Returns the entries of a state dict, without the prefix."""
    named = {_MARGIN + name: value for name, value in margin_state.items()}
    named[EXTRA] = header.to_tensor()
    for name, tensor in rows.items():
        named[_STORE + ("weight_RD" if name == "weight" else f"state_{name}")] = tensor
    return named


def rows_in(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the row tensors among the entries of a state dict, named as by Centres.rows()."""
    names = {name: name.removeprefix(_STORE).removeprefix("state_") for name in given if name.startswith(_STORE)}
    return {"weight" if short == "weight_RD" else short: given[name] for name, short in names.items()}


def margin_state_in(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name.removeprefix(_MARGIN): value for name, value in given.items() if name.startswith(_MARGIN)}


def gather_whole_rows(store: Centres, num_classes: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Collective. Returns the rows of all classes in host memory on every rank; all-gathers up to 64 MiB per rank."""
    num_subcentres = store.num_subcentres
    ranges = [class_range(num_classes, rank, group_size(group)) for rank in range(group_size(group))]
    # All ranks gather equally many blocks of equal size, although their shards differ by one class.
    most_rows = max(map(len, ranges)) * num_subcentres
    whole = {}
    for name, tensor in store.rows().items():
        rows = torch.empty((num_classes * num_subcentres, *tensor.shape[1:]), dtype=tensor.dtype)
        # Bounded, because the gathered block is W times as large and lives on the device next to the centres.
        num_at_once = max(1, _GATHERED_BYTES // (tensor[0].numel() * tensor.element_size()))
        for start in range(0, most_rows, num_at_once):
            block = tensor.new_zeros((min(num_at_once, most_rows - start), *tensor.shape[1:]))
            part = tensor[start : start + len(block)]
            block[: len(part)] = part
            for theirs, classes in zip(gather_blocks(block, group), ranges, strict=True):
                first, stop = classes.start * num_subcentres + start, classes.stop * num_subcentres
                # The last block of a shorter shard ends with padding.
                num_theirs = max(0, min(len(block), stop - first))
                rows[first : first + num_theirs] = theirs[:num_theirs]
        whole[name] = rows
    return whole


def refuse_part(what: str, classes: range, num_classes: int, rank: int, world_size: int) -> HeadError:
    """Returns the error for saving a module of which every rank holds a different part."""
    return HeadError(
        f"{what} holds only the classes [{classes.start}, {classes.stop}) of {num_classes}, those of rank {rank} of "
        f"{world_size}; a checkpoint written by one rank would lose the others. Build the head with "
        f"PartialFC(..., module_state='whole') if every rank calls state_dict(), as under Lightning and Accelerate: "
        f"then it holds all classes. Use module_state='local' if every rank writes a file of its own. Or save the "
        f"head separately: head.whole_state_dict() on every rank."
    )
