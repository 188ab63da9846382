"""DistributedOptimizer: combines gradients over ranks while backward is still running; step() applies them.

The wrapped optimizer keeps its class name, state and hooks. Both share their param_groups, so a scheduler may be
created for either. How a gradient gets through a step:

    backward computes it -> hook: _gradient_is_ready() -> after backward_passes_per_step passes: _submit()
    -> alone (first step), in a batch, or when its group is complete -> _reduce(): a Reduction
    step() or synchronize(): submits parameters that have none yet -> waits for all handles -> _store() writes the results

_DistributedAdasumOptimizer lets every rank make its step first, and combines the changes of the weights.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod.collectives.compression import Compression, wire_of
from horovod.collectives.handles import ReductionOptions, group_of, groups_of_options, synchronize
from horovod.collectives.operations import allreduce_async_, sparse_allreduce_async, start_allreduce
from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.engine.job import current
from horovod.engine.kinds import Adasum, Average, Sum
from horovod.torch.functions import broadcast_object
from horovod.torch.gradient_batches import GradientBatches

__all__ = ["DistributedOptimizer"]

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


@dataclass(slots=True, eq=False)
class Reduction:
    """The allreduce of a gradient or of a group of them."""

    parameters: Sequence[Tensor] = ()
    handle: Any = None
    """For synchronize(), or the function that sparse_allreduce_async() returned; None while it is not submitted yet."""
    contexts: Sequence[Any] | None = None
    """For decompress(), one for each gradient; None if they arrive decompressed."""


class _DistributedOptimizer:
    """Combines gradients, mixed into a subclass of the wrapped optimizer's class.

    State per parameter: `_parameter_names` holds the name of its allreduce, `_allreduce_delay` the number of backward
    passes until that is submitted, `_hooks` its hook, `_handles` the open reduction of its gradient; scripts clear it.
    `_requires_update` holds the parameters that step() reduces even without a gradient; scripts empty it. Hooks run in
    backward's threads, one per device, all else in the user's thread.
    """

    param_groups: list[dict[str, Any]]

    def _set_up(
        self,
        named_parameters: Any,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: int | list[list[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._compression = compression
        names = checked_names(self.param_groups, named_parameters)
        self._parameter_names: dict[Tensor, str] = {parameter: name for name, parameter in names}
        self.backward_passes_per_step = backward_passes_per_step
        self._allreduce_delay = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self._handles: dict[Tensor, Reduction] = {}
        self._hooks: dict[Tensor, Any] = {}
        self._requires_update: set[Tensor] = set()
        self._synchronized = False
        self._should_synchronize = True
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._groups = checked_groups(groups)
        self._is_reducing = bool(process_set.included()) and _basics.size() > 1
        self._batches = GradientBatches(current.running().settings.fusion_threshold)
        if self._is_reducing:
            if self._groups is not None:
                self._form_groups()
            self._register_hooks()

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes

    def _register_hooks(self) -> None:
        """Registers a hook on every trained parameter. Called again before each step, for parameters added or thawed since."""
        for i, group in enumerate(self.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._hooks:
                    self._parameter_names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                    self._allreduce_delay.setdefault(parameter, self.backward_passes_per_step)
                    self._requires_update.add(parameter)
                    self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook())

    def _hook(self) -> Callable[[Tensor], None]:
        # A weak reference: the hook must not keep an optimizer alive that the script has replaced, and which would go on
        # reducing gradients.
        this = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._gradient_is_ready(parameter)

        return hook

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        # Its gradient is being reduced in place: adding to it now would corrupt the result.
        if self._allreduce_delay[parameter] <= 0:
            raise AssertionError(_TOO_MANY_PASSES)
        assert parameter.grad is not None and not parameter.grad.requires_grad
        self._allreduce_delay[parameter] -= 1
        if self._allreduce_delay[parameter] == 0:
            self._submit(parameter)
        else:
            self._handles[parameter] = Reduction()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._handles:
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def step_without_reduction(self) -> Any:
        """Makes the wrapped optimizer's step on this rank alone."""
        return super().step()  # type: ignore[misc]

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
            formed = [tuple(part) for part in split_list(parameters, self._groups)]
        self._batches.fix([group for group in formed if group])

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._handles = {}
        self._batches.end_step()
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _submit(self, parameter: Tensor) -> None:
        self._handles[parameter] = Reduction()
        is_planned = parameter in self._batches
        # Empty until the batch or the group is complete.
        ready = self._batches.arrive(parameter)
        if is_planned or self._groups is not None:
            self._submit_together(ready)
        else:
            # In the first step the order is unknown; the controller waits a cycle for further gradients to fuse.
            self._reduce(ready)

    def _submit_together(self, parameters: Sequence[Tensor]) -> None:
        """Submits the gradients of these parameters, and those of the groups that they belong to."""
        if not parameters:
            return
        is_grouped = self._groups is not None
        with current.running().controller.together():
            for parameter in parameters:
                reduction = self._handles.get(parameter)
                # The first one of a group submits the whole group.
                if reduction is None or reduction.handle is None:
                    unit = self._batches.batch_of(parameter) if is_grouped else [parameter]
                    self._reduce(unit, is_grouped=is_grouped)

    def _reduce(self, parameters: Sequence[Tensor], *, is_grouped: bool = False) -> None:
        """Submits the gradients of these parameters under the name of the first one."""
        reduction = Reduction(parameters)
        self._handles.update(dict.fromkeys(parameters, reduction))
        name = self._parameter_names[parameters[0]]
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                # Branches of a model may differ between ranks: another rank may have computed this gradient.
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            gradient = parameter.grad
            if gradient.is_sparse and not is_grouped:
                if not self.sparse_as_dense:
                    reduction.handle = sparse_allreduce_async(gradient, name, self.op, self.process_set)
                    return
                gradient = gradient.to_dense()
            gradients.append(gradient.contiguous())
        # As in Horovod, f divides before and multiplies after the sum; Average itself divides by the number of ranks.
        before, after = 1.0, 1.0
        if self.op == Average and not is_grouped:
            before, after = 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor
        wire = wire_of(self._compression, gradients, self.op)
        if not wire:
            pairs = [self._compression.compress(gradient) for gradient in gradients]
            gradients, reduction.contexts = [packed for packed, _ in pairs], [context for _, context in pairs]
        options = ReductionOptions(self.op, before, after, self.process_set, wire)
        tensors = group_of(gradients)
        reduction.handle = start_allreduce(tensors, name, options, in_place=True, is_grouped=is_grouped)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Call it before clipping, with skip_synchronize() around step()."""
        if not self.process_set.included():
            self._synchronized = True
            return
        if self._is_reducing:
            self._register_hooks()
        self._submit_missing()
        # Parameters of a group have one reduction.
        for reduction in dict.fromkeys(self._handles.values()):
            outputs = reduction.handle() if callable(reduction.handle) else synchronize(reduction.handle)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if reduction.contexts is not None:
                pairs = zip(outputs, reduction.contexts, strict=True)
                outputs = [self._compression.decompress(output, context) for output, context in pairs]
            for parameter, output in zip(reduction.parameters, outputs, strict=True):
                self._store(parameter, output)
        self._handles.clear()
        self._batches.end_step()
        self._synchronized = True

    def _submit_missing(self) -> None:
        """Submits parameters without a gradient, and those whose further backward passes did not come."""
        sent = {parameter for parameter, reduction in self._handles.items() if reduction.handle is not None}
        # Scripts empty _requires_update to leave out parameters without a gradient; the others are still reduced.
        wanted = self._requires_update.union(self._handles) - sent
        # In the order of param_groups, so all ranks submit them in the same order.
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


def checked_names(param_groups: list[dict[str, Any]], named_parameters: Any) -> list[tuple[str, Tensor]]:
    """Returns the name of each parameter, under which the ranks find each other's gradients."""
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [id(p) for group in param_groups for p in group["params"] if id(p) not in known]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(map(str, unnamed))}"
        )
    return named


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


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """Lets every rank make its own step and combines the changes of the weights by Adasum."""

    def _submit(self, parameter: Tensor) -> None:
        # There is nothing to send before this rank's own step.
        self._handles[parameter] = Reduction()

    def synchronize(self) -> None:
        """Does nothing: step() waits for the changes itself."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        self._register_hooks()
        wanted = self._requires_update | set(self._handles)
        # In the order of param_groups, so all ranks submit them in the same order.
        trained = [parameter for group in self.param_groups for parameter in group["params"] if parameter in wanted]
        starts = {parameter: parameter.detach().clone() for parameter in trained}
        for parameter in starts:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        self.step_without_reduction()
        pending = []
        with torch.no_grad():
            for parameter, start in starts.items():
                change = (parameter - start).contiguous()
                packed, context = self._compression.compress(change)
                handle = allreduce_async_(packed, name=self._parameter_names[parameter], op=Adasum)
                pending.append((parameter, start, handle, context))
            for parameter, start, handle, context in pending:
                change = self._compression.decompress(synchronize(handle), context)
                parameter.copy_(start + change.view_as(parameter))
                self._allreduce_delay[parameter] = self.backward_passes_per_step
        self._handles.clear()
        return loss


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the optimizer with gradients combined over ranks before they are applied.

    named_parameters: names of the reductions, usually model.named_parameters().
    compression: hvd.Compression.none, fp16, bf16, fp8 or int8, or a user's compressor.
    backward_passes_per_step: number of passes whose gradients are summed locally before they are sent.
    op: Average, Sum or Adasum.
    gradient_predivide_factor: f multiplies gradients by 1/f before the sum and by f/size after it; ignored with groups.
    groups: a number of groups, or lists of parameters, whose gradients are reduced together.
    sparse_as_dense: converts sparse gradients to dense ones before the reduction.
    num_groups: deprecated name of groups.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise TypeError(
            f"This {type(optimizer).__name__} is a DistributedOptimizer already: wrap the plain optimizer, once."
        )
    groups = groups_of_options(op, gradient_predivide_factor, num_groups, groups, stacklevel=2)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    is_adasum = op == Adasum and _basics.size() > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    base = _DistributedAdasumOptimizer if is_adasum else _DistributedOptimizer
    # As in Horovod, the result is a new subclass of the optimizer's class under the same name: isinstance() holds, and
    # hooks, schedulers and checkpoints see the optimizer they know.
    kind = type(optimizer.__class__.__name__, (base, optimizer.__class__), {"__module__": __name__})
    wrapped: Any = object.__new__(kind)
    # A scheduler replaces `step` on the instance it was created for; that must not hide the step of this class.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._set_up(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        None if is_adasum else groups,
        sparse_as_dense,
        process_set,
    )
    return wrapped


# Names that Horovod's own module has as well.
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import (
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    rocm_built,
    size,
    sparse_allreduce_async,
    synchronize,
)
