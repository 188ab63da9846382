"""Common part of the distributed optimizers: names of the reductions, hooks, and the count of backward passes."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


@dataclass(slots=True)
class Reduction:
    """The allreduce of a gradient or of a group of them."""

    handle: Any = None
    """For synchronize(), or the function that sparse_allreduce_async() returned; None while it is not submitted yet."""
    contexts: Any = None
    """For decompress(): one context, or one for each member of a group."""


class DistributedBase:
    """The common part of both distributed optimizers, mixed into a subclass of the wrapped optimizer's class.

    State per parameter: `_parameter_names` holds the name of its allreduce, `_allreduce_delay` the number of backward
    passes until that is submitted, `_hooks` its hook. `_handles` maps parameters, and groups of them as tuples, to open
    reductions; scripts clear it. `_requires_update` holds the parameters that step() reduces even without a gradient;
    scripts empty it. Hooks run in backward's threads, one per device, all else in the user's thread.
    """

    param_groups: list[dict[str, Any]]

    def _prepare(self, named_parameters: Any, compression: Any, backward_passes_per_step: int) -> None:
        self._compression = compression
        names = checked_names(self.param_groups, named_parameters)
        self._parameter_names: dict[Tensor, str] = {parameter: name for name, parameter in names}
        self.backward_passes_per_step = backward_passes_per_step
        self._allreduce_delay = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self._handles: dict[Any, Reduction] = {}
        self._hooks: dict[Tensor, Any] = {}
        self._requires_update: set[Tensor] = set()
        self._synchronized = False
        self._should_synchronize = True

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
                    self._add_parameter(parameter)

    def _hook(self) -> Callable[[Tensor], None]:
        # A weak reference: the hook must not keep an optimizer alive that the script has replaced, and which would go on
        # reducing gradients.
        this = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._gradient_is_ready(parameter)

        return hook

    def _add_parameter(self, parameter: Tensor) -> None:
        raise NotImplementedError

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        reduction = self._handles.get(parameter)
        is_sent = reduction is not None and reduction.handle is not None
        # Its gradient is being reduced in place: adding to it now would corrupt the result.
        if (is_sent or self._is_in_sent_group(parameter)) and self._allreduce_delay[parameter] <= 0:
            raise AssertionError(_TOO_MANY_PASSES)
        assert parameter.grad is not None and not parameter.grad.requires_grad
        assert self._allreduce_delay[parameter] > 0, _TOO_MANY_PASSES
        self._allreduce_delay[parameter] -= 1
        if self._allreduce_delay[parameter] == 0:
            self._submit(parameter)
        else:
            self._handles[parameter] = Reduction()

    def _is_in_sent_group(self, parameter: Tensor) -> bool:
        return False

    def _submit(self, parameter: Tensor) -> None:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._handles:
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def step_without_reduction(self) -> Any:
        """Makes the wrapped optimizer's step on this rank alone."""
        return super().step()  # type: ignore[misc]


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
