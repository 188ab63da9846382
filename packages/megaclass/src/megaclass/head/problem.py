"""The problem that every kernel solves: one global batch against the classes of this rank that take part.

A kernel works on the negatives alone. With cos_gs the cosine of image g and class s, z_gs its logit and e_gs = exp(z_gs):

    mass_G        = sum over s of weight_s * e_gs           (the target's class left out)
    grad_unit_GD  = sum over s of c_g * weight_s * e_gs * dz/dcos * unit centre s
    grad_unit_SD  = sum over g of c_g * weight_s * e_gs * dz/dcos * unit image g

where c_g = upstream gradient / softmax denominator is an argument: it is known after the ranks have summed their masses.
Variants, for the plain kernel only: log(1 + exp(z)) in place of exp(z), inner products in place of cosines, several labels per
image, and a second sum. N counts the pairs of an image and one of its labels, image by image.
The logit, margin and gradient of the target are one row per image, computed outside in full precision.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

# exp(z) of logits up to this size fits float32, and so does a sum of 1e9 of them; beyond, kernels shift by a row maximum.
SAFE_LOGIT = 66.0


class Stored:
    """Base class of what a kernel keeps between forward and backward; each kernel that keeps something has its own."""


@dataclass(slots=True)
class Problem:
    """G images against S classes, each with M sub-centres, on one rank."""

    unit_GD: Tensor
    """Normalised embeddings in the dtype of the products; padding rows are zero."""
    weight_RD: Tensor
    """All centres of this rank, as stored; R = K * M, the sub-centres of a class are adjacent."""
    classes_S: Tensor | None
    """Local ids of the classes that take part, ascending; None: all of them. Ids of K and above are padding."""
    target_slots_N: Tensor
    """Place of each label's class among the S, -1 if another rank owns it or there is none; N = G * labels per image."""
    class_weight_S: Tensor | None
    """Factor of each class's exponential (sampling correction; 0 for padding); None: 1."""
    num_drawn: Tensor | None
    """0-d int32, where padding is not marked by weights: how many of classes_S are not padding."""
    num_subcentres: int
    scale: float
    logit_bound: float
    filter_above: float | None
    """Negatives with a larger cosine count as cosine 0, without gradient: probably the same identity twice."""
    wants_grad_images: bool
    """True if grad_images will be called; a kernel may form it ahead."""
    stored_bytes: int
    """Most bytes of exponentials kept between forward and backward; the rest is computed again."""
    negative_logits: Callable[[Tensor], Tensor] | None = None
    """Cosines -> logits if a margin changes the negatives; None: scale * cosine."""
    max_labels: int = 1
    is_cosine: bool = True
    """False: centres and images are compared as they are, not their unit vectors."""
    is_sigmoid: bool = False
    """The mass is a sum of log(1 + exp(z)), not of exp(z)."""
    second: Literal["slope", "logit"] | None = None
    """A second sum: of z, which has a gradient; or with is_sigmoid of 1 / (1 + exp(-z)), whose gradient is not needed."""
    curriculum: tuple[Tensor, Tensor] | None = None
    """CurricularFace's borders (G,) and t (), where negative_logits is its rule: fused kernels know it."""
    stored: "Stored | None" = None
    """The kernel's own: tensors that forward keeps for backward. The update drops them."""

    @property
    def num_classes(self) -> int:
        # shape[0], not len(), which takes a microsecond: this is asked several times per step.
        return self.weight_RD.shape[0] // self.num_subcentres if self.classes_S is None else self.classes_S.shape[0]

    @property
    def work_dtype(self) -> torch.dtype:
        """Accumulators, norms and updates: float32, or float64 if the centres are."""
        return torch.float64 if self.weight_RD.dtype == torch.float64 else torch.float32

    @property
    def exp_dtype(self) -> torch.dtype:
        """Exponentials: as the products, but float16 would overflow; bfloat16 has the range of float32."""
        return torch.bfloat16 if self.unit_GD.dtype == torch.float16 else self.unit_GD.dtype

    @property
    def has_direction_G(self) -> Tensor:
        """False for padding and for embeddings of length zero: they are closest to no sub-centre."""
        return self.unit_GD.ne(0).any(1)

    def rows_of(self, start: int, stop: int) -> slice | Tensor:
        """Returns the rows in weight_RD of the classes in slots [start, stop); padding points at the last class."""
        if self.classes_S is None:
            return slice(start * self.num_subcentres, stop * self.num_subcentres)
        return rows_of_classes(self.classes_S[start:stop], self.weight_RD, self.num_subcentres)


def rows_of_classes(classes: Tensor, weight_RD: Tensor, num_subcentres: int) -> Tensor:
    """Returns the (N * M,) rows of these local classes, clamped into range."""
    if num_subcentres > 1:
        offsets_M = torch.arange(num_subcentres, device=classes.device)
        classes = (classes[:, None] * num_subcentres + offsets_M).flatten()
    return classes.clamp(0, len(weight_RD) - 1)


def take_rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Returns a view for a slice, a copy for a list of rows."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def unit_rows(weight_RD: Tensor, dtype: torch.dtype, *, is_cosine: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the rows divided by their length, and 1 / length; for a zero row both are zero.

    Without is_cosine: the rows as they are, and ones.
    """
    weight_RD = weight_RD.to(dtype)
    if not is_cosine:
        return weight_RD, torch.ones_like(weight_RD[:, 0])
    norms_R = torch.linalg.vector_norm(weight_RD, dim=1)
    inverse_R = torch.where(norms_R > 0, 1 / norms_R, 0)
    return weight_RD * inverse_R[:, None], inverse_R


@dataclass(frozen=True, slots=True)
class CentreGradient:
    """Gradient of the unit centres in slots [start, stop), from the negatives."""

    start: int
    stop: int
    grad_RD: Tensor
    """((stop - start) * M, D), in the work dtype; the caller may overwrite it."""
    won_R: Tensor | None
    """With sub-centres: whether a row was the closest of its class for some image. Others are left alone."""


class Kernel(Protocol):
    """Interface of all kernels; the module docstring defines the three results."""

    def mass(self, problem: Problem) -> Tensor:
        """(G,) float64; (2, G) with the second sum."""

    def grad_images(self, problem: Problem, coefficients_G: Tensor) -> Tensor:
        """(G, D) in the work dtype; coefficients_G: float64, (2, G) if the second sum has a gradient."""

    def grad_centres(self, problems: list[Problem], coefficients: list[Tensor]) -> Iterator[CentreGradient]:
        """Summed over the problems (the parts of an accumulated batch, all with the same classes), slot by slot."""
