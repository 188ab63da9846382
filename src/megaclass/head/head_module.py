"""The head as a torch module: state dicts, moves and conversions, copies and pickles.

The centres are no parameters or buffers, because DistributedDataParallel and FSDP give every rank those of rank 0, and every
rank of a head holds classes of its own. So this class does for them what nn.Module does for buffers.

A head on several ranks is a part of the whole. state_dict() of the head itself returns this rank's classes; for a module
around it, which may not know that, the setting `module_state` decides.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaclass.errors import HeadError
from megaclass.head.choose_engine import choose_engine
from megaclass.head.kernels.problem import Kernel
from megaclass.head.settings import HeadSettings
from megaclass.head.state import state_dict as head_state
from megaclass.head.state.centres import STORAGE_DTYPES, Centres
from megaclass.head.state.shards import ClassRange
from megaclass.head.state.state_dict import EXTRA, StateHeader
from megaclass.head.step.engine import StepEngine
from megaclass.head.step.followed_scaler import FollowedScaler
from megaclass.head.step.open_step import OpenStep


class HeadModule(nn.Module):
    """State of a head and how torch saves, loads, moves and copies it. PartialFC fills it."""

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    settings: HeadSettings
    classes: ClassRange
    """Classes on this rank."""
    store: Centres
    """Centres and optimizer state of this rank; written by the engine's update and by loading."""
    margin_state: dict[str, Tensor]
    """The margin's running values, 0-d float64, the same on every rank; written by the engine's update and by loading."""
    step_count: int
    """Steps done; keys the random numbers of a step."""
    _follows_embeddings: bool = False
    """The head was built without a device, and moves to that of the first embeddings it is given."""

    _scaler: FollowedScaler | None = None
    """The GradScaler of the loop; copies of the head follow none."""
    _is_scale_checked: bool = False
    """A step without a scaler has shown that the loss is not multiplied by a loss scale."""

    def _start_engine(self, engine: type[StepEngine], kernel: Kernel) -> None:
        """Forms what depends on the device and dtype of the centres, and on nothing else."""
        self._engine = engine(self.settings, self.store, self.margin_state, kernel, self.group)
        self._engine.faults.is_scaled = self._scaler is not None
        # Lets loss.backward() reach the centres when the embeddings themselves are frozen.
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._open_step = OpenStep()

    @property
    def device(self) -> torch.device:
        return self.store.weight_RD.device

    @property
    def kernel(self) -> Kernel:
        return self._engine.kernel

    def _settle_on(self, device: torch.device) -> None:
        """Moves a head that was built without `device` to that of the first tensors it is given."""
        if self._follows_embeddings and not self._open_step.is_open and self.device != device:
            self.to(device)
        # Once: from now on embeddings on another device are a mistake, which check_embeddings() explains.
        self._follows_embeddings = False

    def rows(self) -> dict[str, Tensor]:
        """Returns this rank's centres and optimizer state, row for row: `weight`, and one entry per state tensor.

        They are the head's own tensors. Change them with load_rows(), or call accept_rows() afterwards.
        """
        return self.store.rows()

    def accept_rows(self) -> None:
        """Declares that a write to rows() was intended; without it the next forward may take it for an accident."""
        self.store.seal.renew()

    def load_rows(self, first_class: int, tensors: dict[str, Tensor]) -> None:
        """Copies the part of the rows that belongs to this rank, whatever world saved them; first_class: class of row 0."""
        self.store.load_rows(first_class, tensors)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Collective. Returns the state dict of the head on one rank: all classes, in host memory on every rank.

        load_state_dict() accepts it on any number of ranks.
        """
        rows = head_state.gather_whole_rows(self.store, self.settings.num_classes, self.group)
        return head_state.name_tensors(rows, self.margin_state, self._header(ClassRange(0, self.settings.num_classes)))

    def get_extra_state(self) -> Tensor:
        return self._header(self.classes).to_tensor()

    def set_extra_state(self, state: Tensor | Mapping[str, int]) -> None:
        header, own = StateHeader.read(state), self.classes
        saved = header.classes
        if header.num_classes != self.settings.num_classes or not saved.start <= own.start < own.stop <= saved.stop:
            is_shard = header.num_classes == self.settings.num_classes
            raise HeadError(
                f"The state holds classes [{saved.start}, {saved.stop}) of {header.num_classes}"
                f"{', the part of one rank as state_dict() returns it' if is_shard else ''}, but rank {self.rank} of "
                f"{self.world_size} holds [{own.start}, {own.stop}) of {self.settings.num_classes}: load it with load_rows(), "
                f"or save with whole_state_dict(), which loads on any number of ranks."
            )
        self.step_count = header.step_count

    def _header(self, classes: ClassRange) -> StateHeader:
        return StateHeader(self.step_count, classes, self.settings.num_classes)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Without a prefix the head itself was asked, and the caller knows that it gets a shard.
        is_part = self.world_size > 1 and bool(prefix)
        if is_part and self.settings.module_state == "refuse":
            what = f"state_dict() of the module that contains this head as {prefix.removesuffix('.')!r}"
            raise head_state.refuse_part(what, self.classes, self.settings.num_classes, self.rank, self.world_size)
        if is_part and self.settings.module_state == "whole":
            named = self.whole_state_dict()
        else:
            named = head_state.name_tensors(self.rows(), self.margin_state, self._header(self.classes))
        destination.update({prefix + name: tensor for name, tensor in named.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        known = head_state.name_tensors(self.rows(), self.margin_state, self._header(self.classes))
        missing_keys += [prefix + name for name in known if name not in given]
        unexpected_keys += [prefix + name for name in given if name not in known]
        given = {name: value for name, value in given.items() if name in known}
        rows = head_state.rows_in(given)
        if EXTRA in given:
            self.set_extra_state(given[EXTRA])
        elif rows and self.world_size > 1:
            raise HeadError(
                f"The state has centres but no {prefix}{EXTRA}, which names their classes: it cannot be loaded on "
                f"{self.world_size} ranks. Keep that entry, or use load_rows()."
            )
        first_class = StateHeader.read(given[EXTRA]).classes.start if EXTRA in given else 0
        with torch.no_grad():
            self.store.load_some_rows(first_class, rows)
            for name, value in head_state.margin_state_in(given).items():
                self.margin_state[name].copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HeadModule":
        """Moves and converts as for buffers (`.to()`, `.cuda()`, `.double()`); the margin's values stay float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        old = self.store.weight_RD
        probe = fn(old.new_empty(0))
        if probe.dtype not in STORAGE_DTYPES.values():
            raise HeadError(
                f"The head's centres cannot become {probe.dtype}: they are stored as one of {', '.join(STORAGE_DTYPES)} "
                f"(.float(), .double(), .bfloat16()). Convert the other parts of the model only: embeddings may be of any "
                f"floating dtype, and autocast leaves the head as it is."
            )
        is_moved = (probe.dtype, probe.device) != (old.dtype, old.device)
        if is_moved and self._open_step.is_open:
            raise HeadError("The head was moved or converted inside an open step: call step() first.")
        chosen = self._choose_engine(probe)
        self.store.apply_(fn)
        for name, value in self.margin_state.items():
            moved = fn(value)
            self.margin_state[name] = moved if moved.dtype == value.dtype else value.to(moved.device)
        if is_moved:
            self._start_engine(*chosen)
        if probe.device != old.device:
            # The user, or a wrapper such as DDP, has chosen.
            self._follows_embeddings = False
        return self

    def _choose_engine(self, weight: Tensor) -> tuple[type[StepEngine], Kernel]:
        return choose_engine(self.settings.kernel, weight.device, margin=self.settings.margin, dtype=weight.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles: all but the scaler, the open step and what _start_engine() forms."""
        formed = ("_engine", "_anchor", "_open_step", "_scaler")
        return {name: value for name, value in vars(self).items() if name not in formed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.store.apply_(lambda tensor: tensor)
        self._start_engine(*self._choose_engine(self.store.weight_RD))

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadModule":
        # The copy belongs to the same ranks; a process group cannot be copied.
        memo[id(self.group)] = self.group
        other: HeadModule = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to pickle one rank's part of a head (torch.save of a module, or handing it to another process)."""
        if self.world_size > 1 and self.settings.module_state != "local":
            raise head_state.refuse_part(
                "A pickled head", self.classes, self.settings.num_classes, self.rank, self.world_size
            )
        return super().__reduce_ex__(protocol)
