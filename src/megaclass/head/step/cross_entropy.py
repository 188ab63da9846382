"""Loss of one gathered batch against the classes of all ranks, and its gradients.

Every rank holds the whole batch and its own classes. Its kernel sums exp(logit) over those classes; one all-reduce adds
the sums and distributes the target cosines; from then on every rank computes the same G losses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import scatter_sum, sum_over_ranks_
from megaclass.head.kernels.problem import Kernel, Problem
from megaclass.head.margins import CurricularFace, Margin, Targets


@dataclass(slots=True)
class TargetRows:
    """The centres of the images' own classes, on the rank that owns them."""

    rows_G: Tensor
    """Row of each image's class (its closest sub-centre) on this rank, -1 where another rank owns it."""
    unit_GD: Tensor
    """That row, normalised; zero where another rank owns it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredImages:
    """The global batch as every rank holds it after the all-gather, matched with the classes of this rank."""

    unit_GD: Tensor
    """Normalised embeddings in the work dtype; padding rows are zero."""
    operand_GD: Tensor
    """unit_GD in the dtype of the products; the fused kernel fills it up with zeros to whole tiles."""
    norms_G: Tensor
    """Length of each embedding before normalisation."""
    cosines_G: Tensor
    """float64: cosine with the own class; zero where another rank owns it."""
    labels_G: Tensor
    is_image_G: Tensor
    """False for padding."""
    own: TargetRows
    local_ids_G: Tensor
    """Local id of each image's class, -1 where another rank owns it."""
    counts_W: Tensor
    """Images each rank brought."""
    max_batch: int

    def of_rank(self, rank: int) -> slice:
        """Returns the rows of one rank's images, padding included."""
        return slice(rank * self.max_batch, (rank + 1) * self.max_batch)


@dataclass(frozen=True, slots=True)
class LossesAndSlopes:
    """The losses of the images and their derivatives; G-vectors are float64."""

    log_total_G: Tensor
    """Logarithm of the softmax denominator over all ranks; infinite for padding and for images without negatives."""
    slope_cosine_G: Tensor
    """d loss / d target cosine of each image; 0 for padding."""
    slope_norm_G: Tensor | None
    """d loss / d length of the embedding of each image; None: 0 for all."""
    loss_sum: Tensor | None = None
    """Sum over the images of this part, where mean_loss is None."""
    mean_loss: Tensor | None = None
    """Mean over the images of the step in the work dtype, NaN after a fault: where one program forms it all."""


@dataclass(slots=True)
class LossPart:
    """One forward: what backward and the update need of it. G-vectors are float64.

    The coefficients are written by backward, which alone knows the upstream gradient, and read by the update.
    """

    images: GatheredImages
    problem: Problem
    cosines_G: Tensor
    """Cosine with the own class, over all ranks; 0 for padding."""
    losses: LossesAndSlopes
    statistics: Tensor | None
    """Sums from which the margin's running values are updated."""
    negative_coefficients_G: Tensor = field(init=False)
    target_coefficients_G: Tensor = field(init=False)

    def weigh(self, image_weight_G: Tensor) -> None:
        """Sets the coefficients from d total / d loss of each image."""
        # exp(-inf) is 0: padding and images without negatives, whose total is infinite, get no coefficient.
        self.negative_coefficients_G = image_weight_G * torch.exp(-self.losses.log_total_G)
        self.target_coefficients_G = image_weight_G * self.losses.slope_cosine_G


def loss_part(
    images: GatheredImages,
    problem: Problem,
    targets: Targets,
    *,
    kernel: Kernel,
    margin: Margin,
    overflowed: Tensor,
    finish_losses: Callable[[Tensor, Tensor, Tensor], LossesAndSlopes],
    group: dist.ProcessGroup | None,
) -> LossPart:
    """Collective: all-reduces 2 * G + 1 float64; G, then G + 1, where the margin's negatives depend on the target.

    targets: with cosines_G as this rank knows them: zero where another rank owns the class.
    finish_losses: masses and target cosines over all ranks, and the number of ranks that overflowed -> losses, slopes.
    """
    num_rows, cosines_G = len(targets.cosines_G), targets.cosines_G
    if margin.touches_only_target:
        # Exactly one rank owns a label, so summing its cosine over ranks, zeros elsewhere, yields it.
        # It travels with the masses to save a round trip.
        sums = sum_over_ranks_(torch.cat([kernel.mass(problem), cosines_G, overflowed[None]]), group)
        cosines_G = sums[num_rows:-1]
    else:
        # Here the logits of the negatives depend on the target's cosine: it must be known on all ranks before the masses.
        # The clone keeps images.cosines_G as this rank knows it: the reduction works in place.
        cosines_G = sum_over_ranks_(cosines_G.clone(), group)
        known = targets.with_cosines(cosines_G)
        # Kernels that know the rule of CurricularFace use `curriculum`; all others call the function and differentiate it.
        problem.negative_logits = lambda cosines_GS: margin.negative_logits(cosines_GS, known)
        problem.curriculum = margin.curriculum(known) if isinstance(margin, CurricularFace) else None
        sums = sum_over_ranks_(torch.cat([kernel.mass(problem), overflowed[None]]), group)
    return LossPart(
        images=images,
        problem=problem,
        cosines_G=cosines_G,
        losses=finish_losses(sums[:num_rows], cosines_G, sums[-1]),
        statistics=margin.statistics(targets.with_cosines(cosines_G)),
    )


def finish_losses(margin: Margin, targets: Targets, mass_G: Tensor, cosines_G: Tensor) -> LossesAndSlopes:
    """Computes the losses from the softmax mass of the negatives and the target cosine; slopes by autograd."""
    is_image_G = targets.is_image_G
    with torch.enable_grad():
        # Autograd runs over G numbers only, so that a margin needs no derivative of its own; the G x S matrix is the kernel's.
        leaf = targets.with_cosines(cosines_G, requires_grad=True)
        logits_G = margin.target_logits(leaf)
        penalty_G = margin.penalty(leaf)
        # In the logarithm: the mass of the negatives may be 0, and exp of a large target logit would overflow.
        log_total_G = torch.logaddexp(mass_G.log(), logits_G)
        losses_G = log_total_G - logits_G
        if penalty_G is not None:
            losses_G = losses_G + penalty_G
        total = torch.where(is_image_G, losses_G, 0).sum()
        slopes = torch.autograd.grad(total, (leaf.cosines_G, leaf.norms_G), allow_unused=True)
    # A margin may return anything for padding, also NaN; and an image without negatives has none to weigh.
    has_negatives_G = is_image_G & (mass_G > 0)
    return LossesAndSlopes(
        log_total_G=torch.where(has_negatives_G, log_total_G.detach(), torch.inf),
        slope_cosine_G=torch.zeros_like(mass_G) if slopes[0] is None else torch.where(is_image_G, slopes[0], 0),
        slope_norm_G=None if slopes[1] is None else torch.where(is_image_G, slopes[1], 0),
        loss_sum=total.detach(),
    )


def grad_embeddings(part: LossPart, kernel: Kernel, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """Collective. Returns the (B, D) gradient of this rank's embeddings for the weights given to `part.weigh`.

    Reduce-scatter of G * D numbers: every rank forms the gradient of all G unit embeddings from its own classes; each
    gets the sum for its own images.
    """
    images = part.images
    grad_GD = kernel.grad_images(part.problem, part.negative_coefficients_G)
    # Only the rank that owns the class has a unit vector here; the rows of the others are zero, so the sum counts it once.
    grad_GD.addcmul_(images.own.unit_GD, part.target_coefficients_G.to(images.unit_GD.dtype)[:, None])
    grad_BD = scatter_sum(grad_GD.unflatten(0, (-1, images.max_batch)), group)

    unit_BD, norms_B = images.unit_GD[images.of_rank(rank)], images.norms_G[images.of_rank(rank)]
    # Through the normalisation; an embedding of length zero has no direction and gets no gradient.
    inverse_B = torch.where(norms_B > 0, 1 / norms_B, 0)
    along_B = (unit_BD * grad_BD).sum(1, keepdim=True)
    return (grad_BD - unit_BD * along_B) * inverse_B[:, None]


def grad_norms(part: LossPart, image_weight_G: Tensor, rank: int) -> Tensor:
    """Returns the (B, D) gradient through the embeddings' lengths, which some margins read. Sends nothing."""
    mine = part.images.of_rank(rank)
    unit_BD = part.images.unit_GD[mine]
    if part.losses.slope_norm_G is None:
        return torch.zeros_like(unit_BD)
    slopes_B = (image_weight_G * part.losses.slope_norm_G)[mine].to(unit_BD.dtype)
    return unit_BD * slopes_B[:, None]
