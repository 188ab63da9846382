"""The distributed optimizer that lets every rank step and combines the changes of the weights by Adasum."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horovod.collectives.allreduce import allreduce_async_
from horovod.collectives.handles import synchronize
from horovod.engine.kinds import Adasum
from horovod.torch.optimizers.base import DistributedBase, Reduction


class _DistributedAdasumOptimizer(DistributedBase):
    """Lets every rank make its own step and combines the changes of the weights by Adasum."""

    def _set_up(self) -> None:
        self._starts: dict[Tensor, Tensor] = {}
        self._register_hooks()

    def _add_parameter(self, parameter: Tensor) -> None:
        self._starts[parameter] = torch.zeros_like(parameter)

    def _submit(self, parameter: Tensor) -> None:
        self._handles[parameter] = self._reduce(parameter)

    @torch.no_grad()
    def _reduce(self, parameter: Tensor) -> Reduction:
        """Steps this parameter alone and submits its change.

        Until step() has added the combined change to `_starts`, the parameter holds its own change instead of its value.
        """
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        groups = [group["params"] for group in self.param_groups]
        # Every other parameter is hidden from the wrapped optimizer for the duration of this step.
        for group in self.param_groups:
            group["params"] = [parameter] if any(parameter is other for other in group["params"]) else []
        start = self._starts[parameter]
        start.copy_(parameter)
        try:
            self.step_without_reduction()
        finally:
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = parameters
        parameter.sub_(start)
        packed, context = self._compression.compress(parameter.detach().contiguous())
        handle = allreduce_async_(packed, name=self._parameter_names[parameter], op=Adasum)
        return Reduction(handle, context)

    def synchronize(self) -> None:
        """Does nothing: step() waits for the changes itself."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        self._register_hooks()
        for group in self.param_groups:
            for parameter in group["params"]:
                reduction = self._handles.get(parameter)
                is_sent = reduction is not None and reduction.handle is not None
                if parameter in self._requires_update and not is_sent:
                    self._handles[parameter] = self._reduce(parameter)
        with torch.no_grad():
            for parameter, reduction in self._handles.items():
                moved = self._compression.decompress(synchronize(reduction.handle), reduction.contexts)
                parameter.copy_(self._starts[parameter] + moved.view_as(parameter))
                self._allreduce_delay[parameter] = self.backward_passes_per_step
        self._handles.clear()
        return loss
