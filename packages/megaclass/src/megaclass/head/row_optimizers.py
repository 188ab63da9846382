"""Optimizers for the class centres. They change only the rows that took part in a step.

Weights, state and decay of the other rows stay as they are to the bit, as in the Partial FC paper. (InsightFace's
torch code moves every row at every step by its momentum and decay.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaclass.errors import HeadError


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """Base class of the row optimizers. Frozen: the head keeps the state, row for row with the centres."""

    weight_decay: float = 0.0
    clip_value: float | None = None
    """Elements of the gradient are clipped to ±clip_value."""
    clip_row_norm: float | None = None
    """Rows of the gradient are scaled down to this norm."""

    def __post_init__(self) -> None:
        for field in ("weight_decay", "clip_value", "clip_row_norm", "eps"):
            value = getattr(self, field, None)
            if value is not None and not value >= 0:
                raise HeadError(f"{type(self).__name__}.{field} is {value}; it must be 0 or more.")

    def new_state(self, weight_RD: Tensor) -> dict[str, Tensor]:
        """Zeroed state for these rows: tensors whose first dimension is R."""
        raise NotImplementedError

    def update_(self, weight_RD: Tensor, state: dict[str, Tensor], grad_RD: Tensor, lr: float | Tensor) -> None:
        """Moves the given rows and their state in place; grad_RD may be overwritten."""
        raise NotImplementedError

    def clip_(self, grad_RD: Tensor) -> Tensor:
        if self.clip_value is not None:
            grad_RD.clamp_(-self.clip_value, self.clip_value)
        if self.clip_row_norm is not None:
            norms_R = torch.linalg.vector_norm(grad_RD, dim=1, keepdim=True)
            grad_RD.mul_((self.clip_row_norm / norms_R.clamp_min(1e-30)).clamp_max(1))
        return grad_RD


@dataclass(frozen=True, kw_only=True)
class RowSGD(RowOptimizer):
    """torch.optim.SGD, row by row. Without momentum it keeps no state."""

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise HeadError(f"RowSGD.momentum is {self.momentum}; it must lie in [0, 1).")
        if self.nesterov and not self.momentum:
            raise HeadError("RowSGD.nesterov is True, but momentum is 0; it must be above 0 for Nesterov's step.")

    def new_state(self, weight_RD: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(weight_RD)} if self.momentum else {}

    def update_(self, weight_RD: Tensor, state: dict[str, Tensor], grad_RD: Tensor, lr: float | Tensor) -> None:
        if self.weight_decay:
            grad_RD.add_(weight_RD, alpha=self.weight_decay)
        if self.momentum:
            momentum_RD = state["momentum"].mul_(self.momentum).add_(grad_RD)
            grad_RD = grad_RD.add_(momentum_RD, alpha=self.momentum) if self.nesterov else momentum_RD
        _subtract_(weight_RD, grad_RD, lr)


@dataclass(frozen=True, kw_only=True)
class RowAdamW(RowOptimizer):
    """AdamW with a step count per row, so that the bias correction of a rarely drawn row is right."""

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise HeadError(f"RowAdamW.{field} is {getattr(self, field)}; it must lie in [0, 1).")

    def new_state(self, weight_RD: Tensor) -> dict[str, Tensor]:
        counts_R = torch.zeros(len(weight_RD), dtype=torch.int32, device=weight_RD.device)
        return {"mean": torch.zeros_like(weight_RD), "square": torch.zeros_like(weight_RD), "count": counts_R}

    def update_(self, weight_RD: Tensor, state: dict[str, Tensor], grad_RD: Tensor, lr: float | Tensor) -> None:
        counts_R = state["count"].add_(1).to(weight_RD.dtype)[:, None]
        weight_RD.mul_(1 - lr * self.weight_decay)
        mean_RD = state["mean"].lerp_(grad_RD, 1 - self.beta1)
        square_RD = state["square"].mul_(self.beta2).addcmul_(grad_RD, grad_RD, value=1 - self.beta2)
        denominator_RD = (square_RD / (1 - self.beta2**counts_R)).sqrt_().add_(self.eps)
        _subtract_(weight_RD, mean_RD / (1 - self.beta1**counts_R) / denominator_RD, lr)


@dataclass(frozen=True, kw_only=True)
class RowAdagrad(RowOptimizer):
    """Adagrad with one accumulator per row (the mean square of its gradient): 4 bytes of state per class."""

    eps: float = 1e-10

    def new_state(self, weight_RD: Tensor) -> dict[str, Tensor]:
        dtype = torch.float64 if weight_RD.dtype == torch.float64 else torch.float32
        return {"square": torch.zeros(len(weight_RD), dtype=dtype, device=weight_RD.device)}

    def update_(self, weight_RD: Tensor, state: dict[str, Tensor], grad_RD: Tensor, lr: float | Tensor) -> None:
        if self.weight_decay:
            grad_RD.add_(weight_RD, alpha=self.weight_decay)
        squares_R = state["square"].add_(grad_RD.square().mean(1))
        _subtract_(weight_RD, grad_RD.div_(squares_R.sqrt().add_(self.eps)[:, None]), lr)


# The row optimizers by the names that recipes and PartialFC(optimizer=…) take.
ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {"sgd": RowSGD, "adamw": RowAdamW, "adagrad": RowAdagrad}


def _subtract_(weight_RD: Tensor, direction_RD: Tensor, lr: float | Tensor) -> None:
    if isinstance(lr, Tensor):
        weight_RD.sub_(direction_RD * lr)
    else:
        weight_RD.sub_(direction_RD, alpha=lr)
