"""The distributed optimizer that combines gradients, by Average or Sum, before the wrapped optimizer steps.

How a gradient gets through a step:

    backward computes it -> hook: _gradient_is_ready() -> after backward_passes_per_step passes: _submit()
    -> alone (first step), in a batch, or when its group is complete -> _reduce() or _reduce_group(): a handle
    step() or synchronize(): submits parameters that have none yet -> waits for all handles -> _store() writes the results
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horovod.collectives.allgather import sparse_allreduce_async
from horovod.collectives.allreduce import (
    allreduce_async_,
    compressed_allreduce_async_,
    grouped_allreduce_async_,
)
from horovod.collectives.handles import synchronize
from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet
from horovod.engine.kinds import Average, Sum
from horovod.torch.compression import wire_of
from horovod.torch.functions import broadcast_object
from horovod.torch.optimizers.base import DistributedBase, Reduction
from horovod.torch.optimizers.gradient_batches import GradientBatches
from megaclass_launch.even_parts import even_part


class _DistributedOptimizer(DistributedBase):
    """Combines gradients by Average or Sum."""

    def _set_up(
        self,
        op: int,
        gradient_predivide_factor: float,
        groups: int | list[list[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._groups = checked_groups(groups)
        self._group_of: dict[Tensor, tuple[Tensor, ...]] = {}
        self._num_ready: dict[tuple[Tensor, ...], int] = {}
        self._is_reducing = bool(process_set.included()) and _basics.size() > 1
        self._batches = GradientBatches(_basics.job().settings.fusion_threshold)
        if self._is_reducing:
            if self._groups is not None:
                self._form_groups()
            self._register_hooks()

    def _form_groups(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        # Groups must be the same on all ranks, so they follow the order of parameters on the first rank of the set.
        root = (self.process_set.ranks or [0])[0]
        names = broadcast_object(
            [self._parameter_names[p] for p in parameters], root_rank=root, process_set=self.process_set
        )
        parameters.sort(key=lambda parameter: names.index(self._parameter_names[parameter]))
        if isinstance(self._groups, list):
            wanted = {id(parameter) for parameter in parameters}
            formed = [tuple(p for p in group if id(p) in wanted) for group in self._groups]
            grouped = {id(parameter) for group in formed for parameter in group}
            formed += [(parameter,) for parameter in parameters if id(parameter) not in grouped]
        else:
            assert self._groups is not None
            parts = [even_part(len(parameters), part, self._groups) for part in range(self._groups)]
            formed = [tuple(parameters[part.start : part.stop]) for part in parts]
        for group in formed:
            if group:
                self._num_ready[group] = 0
                for parameter in group:
                    self._group_of[parameter] = group

    def _add_parameter(self, parameter: Tensor) -> None:
        if self._groups is not None and parameter not in self._group_of:
            self._group_of[parameter] = (parameter,)
            self._num_ready[parameter,] = 0

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._handles = {}
        self._batches.end_step()
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _is_in_sent_group(self, parameter: Tensor) -> bool:
        group = self._group_of.get(parameter)
        return group is not None and group in self._handles

    def _submit(self, parameter: Tensor) -> None:
        if self._groups is None:
            self._handles[parameter] = Reduction()
            is_planned = parameter in self._batches
            ready = self._batches.arrive(parameter)
            if is_planned:
                # Empty until the batch is complete.
                self._submit_together(ready)
            else:
                # In the first step the order is unknown; the controller waits a cycle for further gradients to fuse.
                self._handles[parameter] = self._reduce(parameter)
            return
        group = self._group_of[parameter]
        self._num_ready[group] += 1
        if self._num_ready[group] < len(group):
            self._handles[parameter] = Reduction()
            return
        self._num_ready[group] = 0
        # One entry for the group replaces those that only counted its members.
        for member in group:
            self._handles.pop(member, None)
        self._handles[group] = self._reduce_group(group)

    def _submit_together(self, parameters: list[Tensor]) -> None:
        if parameters:
            with _basics.job().controller.together():
                for parameter in parameters:
                    self._handles[parameter] = self._reduce(parameter)

    def _reduce(self, parameter: Tensor) -> Reduction:
        if parameter.grad is None:
            # Branches of a model may differ between ranks: another rank may have computed this gradient.
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        name = self._parameter_names[parameter]
        gradient = parameter.grad
        if gradient.is_sparse:
            if not self.sparse_as_dense:
                return Reduction(sparse_allreduce_async(gradient, name, self.op, self.process_set))
            gradient = gradient.to_dense()
        gradient = gradient.contiguous()
        # As in Horovod, f divides before and multiplies after the sum; Average itself divides by the number of ranks.
        before, after = 1.0, 1.0
        if self.op == Average:
            before, after = 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor
        wire = wire_of(self._compression, gradient) if self.op in (Average, Sum) else ""
        if wire:
            handle = compressed_allreduce_async_(gradient, name, self.op, before, after, self.process_set, wire)
            return Reduction(handle)
        packed, context = self._compression.compress(gradient)
        handle = allreduce_async_(
            packed,
            name=name,
            op=self.op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self.process_set,
        )
        return Reduction(handle, context)

    def _reduce_group(self, group: tuple[Tensor, ...]) -> Reduction:
        gradients = [_gradient(parameter).contiguous() for parameter in group]
        packed, contexts = zip(*[self._compression.compress(gradient) for gradient in gradients], strict=True)
        handle = grouped_allreduce_async_(
            list(packed), name=self._parameter_names[group[0]], op=self.op, process_set=self.process_set
        )
        return Reduction(handle, contexts)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Call it before clipping, with skip_synchronize() around step()."""
        if not self.process_set.included():
            self._synchronized = True
            return
        if self._is_reducing:
            self._register_hooks()
        self._submit_missing()
        for key, reduction in self._handles.items():
            if isinstance(key, tuple):
                outputs = synchronize(reduction.handle)
                for parameter, output, context in zip(key, outputs, reduction.contexts, strict=True):
                    self._store(parameter, self._compression.decompress(output, context))
            elif callable(reduction.handle):
                self._store(key, reduction.handle())
            else:
                output = synchronize(reduction.handle)
                # A gradient that was compressed on the wire arrives decompressed.
                plain = reduction.contexts is None and wire_of(self._compression, output)
                self._store(key, output if plain else self._compression.decompress(output, reduction.contexts))
        for group in self._num_ready:
            self._num_ready[group] = 0
        self._handles.clear()
        self._batches.end_step()
        self._synchronized = True

    def _submit_missing(self) -> None:
        """Submits parameters without a gradient, and those whose further backward passes did not come."""
        sent: set[Tensor] = set()
        counted: set[Tensor] = set()
        for key, reduction in self._handles.items():
            (counted if reduction.handle is None else sent).update(key if isinstance(key, tuple) else (key,))
        # Scripts empty _requires_update to leave out parameters without a gradient; the others are still reduced.
        wanted = (self._requires_update | counted) - sent
        # In the order of param_groups, so that all ranks submit them in the same order.
        missing = [parameter for group in self.param_groups for parameter in group["params"] if parameter in wanted]
        self._submit_together(missing)

    def _store(self, parameter: Tensor, reduced: Tensor) -> None:
        self._allreduce_delay[parameter] = self.backward_passes_per_step
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            parameter.grad = reduced if reduced.is_sparse else reduced.to_sparse()
        # Most gradients are reduced in place and need no copy.
        elif reduced.data_ptr() != gradient.data_ptr() or reduced.dtype is not gradient.dtype:
            gradient.copy_(reduced)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes step() skip synchronize() within the block, because the script has called it."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._should_synchronize and self._is_reducing:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]


def checked_groups(groups: int | Sequence[Sequence[Tensor]] | None) -> Any:
    """Returns the groups as given; raises ValueError for anything else than Horovod accepts."""
    if groups is None:
        return None
    if not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[int] = set()
    for group in groups if isinstance(groups, list) else ():
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))
    return groups


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
