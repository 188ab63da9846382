"""Losses: functions of the target logits and of sums over the other classes. One entry of LOSSES each.

A loss of G images with up to P labels each returns (G,) losses, differentiable in the target logits, and (G,) derivatives
by the sum over the negatives. The sums are formed by the kernel, class chunk by class chunk, and added up over the ranks.

    softmax     sum over labels of w * (log Z - z), Z with the negatives and all labels of the image
    decoupled   the same with a Z per label that leaves out the image's other labels (decoupled softmax)
    sigmoid     sum over labels of w * log(1 + exp(-z)), and log(1 + exp(z)) of each negative

The weights w are 1 / (number of the image's labels) for the first two, 1 for sigmoid, unless the user gives others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

LossName = Literal["softmax", "decoupled", "sigmoid"]


@dataclass(frozen=True, slots=True)
class NegativeSums:
    """Sums over the negatives of each image, over all ranks; float64."""

    sum_G: Tensor
    """Of weight * exp(logit); for sigmoid of weight * log(1 + exp(logit))."""
    is_label_GP: Tensor | None = None
    """False for the padding of an image with fewer labels: its weight is 0, and its logit so low that the exponential is 0."""
    second_G: Tensor | None = None
    """With label smoothing, of weight * logit."""
    num_classes: Tensor | None = None
    """0-d: sum of the weights of all classes that take part; likewise."""
    smoothing: float = 0.0
    factors: tuple[float, float] = (1.0, 1.0)
    """Of the labels' and of the negatives' terms: for sigmoid."""


def softmax(logits_GP: Tensor, weights_GP: Tensor | None, sums: NegativeSums) -> tuple[Tensor, Tensor]:
    # In the logarithm: the sum over the negatives may be 0, and exp of a large target logit would overflow.
    log_total_G = sums.sum_G.log()
    for logits_G in logits_GP.unbind(1):
        log_total_G = torch.logaddexp(log_total_G, logits_G)
    if weights_GP is None:
        return log_total_G - logits_GP[:, 0], torch.exp(-log_total_G.detach())
    total_G = weights_GP.sum(1)
    losses_G = (weights_GP * (log_total_G[:, None] - logits_GP)).sum(1)
    if sums.smoothing:
        assert sums.second_G is not None and sums.is_label_GP is not None and sums.num_classes is not None
        # A share of the weight moves from the labels to all classes that take part, the labels among them.
        mean_G = (logits_GP.where(sums.is_label_GP, 0).sum(1) + sums.second_G) / sums.num_classes
        losses_G = losses_G + sums.smoothing * ((weights_GP * logits_GP).sum(1) - total_G * mean_G)
    return losses_G, total_G * torch.exp(-log_total_G.detach())


def decoupled(logits_GP: Tensor, weights_GP: Tensor | None, sums: NegativeSums) -> tuple[Tensor, Tensor]:
    weights_GP = torch.ones_like(logits_GP) if weights_GP is None else weights_GP
    log_totals_GP = torch.logaddexp(sums.sum_G.log()[:, None], logits_GP)
    losses_G = (weights_GP * (log_totals_GP - logits_GP)).sum(1)
    return losses_G, (weights_GP * torch.exp(-log_totals_GP.detach())).sum(1)


def sigmoid(logits_GP: Tensor, weights_GP: Tensor | None, sums: NegativeSums) -> tuple[Tensor, Tensor]:
    of_labels, of_negatives = sums.factors
    if weights_GP is None or sums.is_label_GP is None:
        weights_GP, slope_G = torch.ones_like(logits_GP), torch.full_like(sums.sum_G, of_negatives)
    else:
        # An image's negatives count with the mean of its labels' weights.
        slope_G = of_negatives * weights_GP.sum(1) / sums.is_label_GP.sum(1).clamp_min(1)
    losses_G = of_labels * (weights_GP * -F.logsigmoid(logits_GP)).sum(1) + slope_G * sums.sum_G
    return losses_G, slope_G


LOSSES: dict[str, Callable[[Tensor, Tensor | None, NegativeSums], tuple[Tensor, Tensor]]] = {
    "softmax": softmax,
    "decoupled": decoupled,
    "sigmoid": sigmoid,
}
