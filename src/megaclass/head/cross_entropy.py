"""Loss of one gathered batch against the classes of all ranks, and its gradients.

Every rank holds the whole batch and its own classes. Its kernel sums exp(logit) over those; one all-reduce adds the
sums up and hands round the target cosines; from then on every rank computes the same G losses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import scatter_sum, sum_over_ranks_
from megaclass.head.kernels.problem import Kernel, Problem
from megaclass.head.margins import Margin, Targets


@dataclass(slots=True)
class TargetRows:
    """The centres of the images' own classes, on the rank that owns them."""

    rows_G: Tensor
    """Row of each image's class (its closest sub-centre) on this rank, -1 where another rank owns it."""
    unit_GD: Tensor
    """That row, normalised; zero where another rank owns it."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The losses of the images and their derivatives; G-vectors are float64."""

    log_total_G: Tensor
    """Logarithm of the softmax denominator over all ranks; infinite for padding and for images without negatives."""
    slope_cosine_G: Tensor
    """d loss / d target cosine, image by image; 0 for padding."""
    slope_norm_G: Tensor | None
    """d loss / d length of the embedding, image by image; None: 0 for all."""
    loss_sum: Tensor | None = None
    mean_loss: Tensor | None = None
    """Over the images of the step, in the work dtype and NaN where a fault is known, where that was formed at once."""


@dataclass(slots=True)
class LossPart:
    """One forward: what backward and the centres' update need of it. G-vectors are float64."""

    is_image_G: Tensor
    max_batch: int
    problem: Problem
    unit_GD: Tensor
    norms_G: Tensor
    own: TargetRows
    cosines_G: Tensor
    """With the own class, over all ranks; 0 for padding."""
    settled: Settled
    counts_W: Tensor
    """Images each rank brought."""
    num_overflowed: Tensor
    """Ranks whose drawn classes did not fit."""
    statistics: Tensor | None
    """What the margin's state moves on by."""
    negative_coefficients_G: Tensor = field(init=False)
    target_coefficients_G: Tensor = field(init=False)

    def weigh(self, image_weight_G: Tensor) -> None:
        """Fixes d total / d loss of each image, once backward knows it."""
        self.negative_coefficients_G = image_weight_G * torch.exp(-self.settled.log_total_G)
        self.target_coefficients_G = image_weight_G * self.settled.slope_cosine_G


def loss_part(
    max_batch: int,
    problem: Problem,
    unit_GD: Tensor,
    norms_G: Tensor,
    own: TargetRows,
    *,
    kernel: Kernel,
    margin: Margin,
    targets: Targets,
    overflowed: Tensor,
    settle: Callable[[Tensor, Tensor, Tensor], Settled],
    counts_W: Tensor,
    group: dist.ProcessGroup | None,
) -> LossPart:
    """All-reduce of 2 * G + 1 float64; of G + 1 after one of G where the margin's negatives depend on the target.

    targets: with cosines_G as this rank knows them: zero where another rank owns the class.
    settle: masses and target cosines over all ranks, and the number of ranks that overflowed -> losses and slopes.
    """
    num_rows = len(unit_GD)
    cosines_G = targets.cosines_G
    if margin.touches_only_target:
        # Exactly one rank owns a label, so summing its cosine over ranks, zeros elsewhere, yields it.
        # It travels with the masses to save a latency.
        sums = sum_over_ranks_(torch.cat([kernel.mass(problem), overflowed[None], cosines_G]), group)
        cosines_G = sums[num_rows + 1 :]
    else:
        cosines_G = sum_over_ranks_(cosines_G.clone(), group)
        known = targets.with_cosines(cosines_G)
        problem.negative_logits = lambda cosines_GS: margin.negative_logits(cosines_GS, known)
        problem.curriculum = margin.curriculum(known)
        sums = sum_over_ranks_(torch.cat([kernel.mass(problem), overflowed[None]]), group)
    mass_G, num_overflowed = sums[:num_rows], sums[num_rows]

    return LossPart(
        is_image_G=targets.is_image_G,
        max_batch=max_batch,
        problem=problem,
        unit_GD=unit_GD,
        norms_G=norms_G,
        own=own,
        cosines_G=cosines_G,
        settled=settle(mass_G, cosines_G, num_overflowed),
        counts_W=counts_W,
        num_overflowed=num_overflowed,
        statistics=margin.statistics(targets.with_cosines(cosines_G)),
    )


def settle(margin: Margin, targets: Targets, mass_G: Tensor, cosines_G: Tensor) -> Settled:
    """Losses of images whose softmax mass over all negatives, and target cosine, are known; slopes by autograd."""
    is_image_G = targets.is_image_G
    with torch.enable_grad():
        leaf = targets.with_cosines(cosines_G, requires_grad=True)
        logits_G = margin.target_logits(leaf)
        penalty_G = margin.penalty(leaf)
        log_total_G = torch.logaddexp(mass_G.log(), logits_G)
        losses_G = log_total_G - logits_G
        if penalty_G is not None:
            losses_G = losses_G + penalty_G
        total = torch.where(is_image_G, losses_G, 0).sum()
        slopes = torch.autograd.grad(total, (leaf.cosines_G, leaf.norms_G), allow_unused=True)
    # Padding may be anything to a margin, NaN included; and where an image has no negatives there is nothing to weigh.
    has_negatives_G = is_image_G & (mass_G > 0)
    return Settled(
        log_total_G=torch.where(has_negatives_G, log_total_G.detach(), torch.inf),
        slope_cosine_G=torch.zeros_like(mass_G) if slopes[0] is None else torch.where(is_image_G, slopes[0], 0),
        slope_norm_G=None if slopes[1] is None else torch.where(is_image_G, slopes[1], 0),
        loss_sum=total.detach(),
    )


def grad_embeddings(part: LossPart, kernel: Kernel, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """(B, D) gradient of this rank's embeddings for the weights given to `part.weigh`.

    Reduce-scatter of G * D numbers: every rank forms the gradient of all G unit embeddings from its own classes; each
    gets the sum for its own images.
    """
    dtype = part.unit_GD.dtype
    grad_GD = kernel.grad_images(part.problem, part.negative_coefficients_G)
    grad_GD.addcmul_(part.own.unit_GD, part.target_coefficients_G.to(dtype)[:, None])
    grad_BD = scatter_sum(grad_GD.unflatten(0, (-1, part.max_batch)), group)

    mine = slice(rank * part.max_batch, (rank + 1) * part.max_batch)
    unit_BD, norms_B = part.unit_GD[mine], part.norms_G[mine]
    # Through the normalisation; an embedding of length zero has no direction and gets no gradient.
    inverse_B = torch.where(norms_B > 0, 1 / norms_B, 0)
    along_B = (unit_BD * grad_BD).sum(1, keepdim=True)
    return (grad_BD - unit_BD * along_B) * inverse_B[:, None]


def grad_norms(part: LossPart, image_weight_G: Tensor, rank: int) -> Tensor:
    """(B, D) gradient through the embeddings' lengths (margins that read them). Sends nothing: all ranks know it."""
    mine = slice(rank * part.max_batch, (rank + 1) * part.max_batch)
    if part.settled.slope_norm_G is None:
        return torch.zeros_like(part.unit_GD[mine])
    slopes_B = (image_weight_G * part.settled.slope_norm_G)[mine].to(part.unit_GD.dtype)
    return part.unit_GD[mine] * slopes_B[:, None]
