"""Margins: how the cosine between an image and its own class becomes a logit.

A margin is a small class. `target_logits` turns the G target cosines into logits; it is plain differentiable torch.
Margins see the whole global batch and run identically on every rank, so their result must not depend on the rank.

Margins with running values (AdaFace, CurricularFace) use the values from the start of the step; the update adds the step's
images to them. The authors' code adds them first. This way accumulated parts equal one big batch, and a skipped step
changes nothing.

Sources of the formulas: SphereFace arXiv:1704.08063, CosFace 1801.09414, ArcFace 1801.07698, CurricularFace 2004.00288,
MagFace 2103.06627, ElasticFace 2109.09416, AdaFace 2204.00964, SphereFace2 2108.01513, UniFace ICCV 2023, dynamic margins
2010.05350, inter-topk 2110.05042.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.losses import LossName

Gradient = Literal["exact", "straight-through"]
Limits = Mapping[str, tuple[float, float]]
GpuRule = Literal["cosine", "angle"]
"""cosine: scale * (cos(theta) - margin). angle: ArcFace, exact or straight-through. See gpu/image_programs.py:finish_losses."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The images of the global batch as a margin sees them; all vectors are float64 of length G.

    If images have several labels, every vector has one entry per image and label, G * P in all.
    """

    cosines_G: Tensor
    """Cosine between each image and its own class. Differentiable."""
    norms_G: Tensor
    """Length of each embedding before normalisation. Differentiable."""
    is_image_G: Tensor
    """False for padding rows, whose other values mean nothing."""
    state: Mapping[str, Tensor]
    """The margin's own running values, as they were when the step began."""
    normals: Callable[[], Tensor]
    """Draws standard normal numbers, one per image, from (seed, step, place in the global batch)."""
    classes_G: Tensor | None = None
    """Number of each image's class, int64; below 0 for padding."""
    class_counts_G: Tensor | None = None
    """Images of that class in the training data; None if the head was built without class_counts. 1 for padding."""
    hardest_G: Tensor | None = None
    """Cosine of each image's k-th closest negative over all ranks, for a margin with num_hardest = k; (G,)."""
    is_cosine: bool = True
    """False for a head with inner products, whose values are not bounded."""

    def with_cosines(self, cosines_G: Tensor, *, requires_grad: bool = False) -> "Targets":
        """Returns the images with these cosines, clamped to ±1; as leaves of a new autograd graph if requires_grad."""
        cosines_G = cosines_G.detach().clamp(-1, 1) if self.is_cosine else cosines_G.detach().clone()
        cosines_G = cosines_G.requires_grad_(requires_grad)
        return replace(self, cosines_G=cosines_G, norms_G=self.norms_G.detach().clone().requires_grad_(requires_grad))


class Margin:
    """Base class of all margins. Its own logits are scale * cosine, also for the target."""

    scale: float
    touches_only_target: ClassVar[bool] = True
    """True: negatives are scale * cosine, and the margin runs in every kernel."""
    gpu_rule: ClassVar[GpuRule | None] = None
    """The rule of target_logits that the GPU's program contains with its derivative, if any, for the size `margin`. Without
    one autograd forms the derivative, in some sixty launches more. A subclass does not inherit it."""
    initial_state: ClassVar[Mapping[str, float]] = {}
    negatives_read_targets: ClassVar[bool] = True
    """True: negative_logits, if there is one, reads targets.cosines_G, which costs an exchange of its own."""
    num_hardest: int = 0
    """Above 0: targets.hardest_G is given to negative_logits. It costs one more product with the centres."""
    needs_class_counts: ClassVar[bool] = False
    needs_cosines: ClassVar[bool] = True
    """False: the formula also holds for inner products."""
    loss: ClassVar[LossName] = "softmax"
    """The loss if PartialFC is not told one."""
    sizes: ClassVar[tuple[str, ...]] = ("margin",)
    """Fields that a margin schedule multiplies."""
    learns_bias: ClassVar[bool] = False
    """The state `bias` is an addend of all logits, and statistics() is replaced by its gradient: (images, sum over them)."""
    loss_factors: tuple[float, float] = (1.0, 1.0)
    """Factors of the labels' and of the negatives' terms of the sigmoid loss."""
    limits: ClassVar[Limits] = {}
    """Smallest and largest value of the fields of a margin that is a dataclass."""

    def __post_init__(self) -> None:
        if not 0 < self.logit_bound() <= 600:
            raise HeadError(
                f"{type(self).__name__}.scale is {self.scale}; it must be above 0, and logits (up to "
                f"{self.logit_bound():g} here) must stay within ±600."
            )
        for name, (low, high) in self.limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise HeadError(f"{type(self).__name__}.{name} is {value}; it must lie in [{low:g}, {high:.4g}].")

    def __repr__(self) -> str:
        """Returns class and fields. Ranks compare it, so it must not contain an address."""
        fields = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({fields})"

    def target_logits(self, targets: Targets) -> Tensor:
        """Returns the (G,) logits of the images' own classes, differentiable in targets.cosines_G and targets.norms_G."""
        return self.scale * targets.cosines_G

    def negative_logits(self, cosines_GS: Tensor, targets: Targets) -> Tensor:
        """Returns the (G, S) logits of the other classes; differentiated with respect to cosines_GS alone."""
        return self.scale * cosines_GS

    def state_for(self, num_classes: int) -> Mapping[str, float]:
        """Returns the running values at the start."""
        return self.initial_state

    def at_share(self, share: float) -> "Margin":
        """Returns this margin with its sizes multiplied by `share`, for a margin schedule."""
        sizes = {name: share * getattr(self, name) for name in self.sizes if hasattr(self, name)}
        if not sizes or not is_dataclass(self):
            raise HeadError(f"margin_schedule was given for {self!r}, which has no size: it needs a margin with one.")
        return replace(self, **sizes)

    def logit_bound(self) -> float:
        """Returns a bound of the negatives' |logit|. Above 66 the kernels spend a pass on the row maximum."""
        return self.scale

    def penalty(self, targets: Targets) -> Tensor | None:
        """Returns (G,) numbers that are added to the images' losses, differentiable in targets.norms_G."""
        return None

    def statistics(self, targets: Targets) -> Tensor | None:
        """Returns sums over the images (float64 vector) that update the state; sums of partial batches are added."""
        return None

    def next_state(self, state: Mapping[str, Tensor], statistics: Tensor) -> dict[str, Tensor]:
        """Returns the state after a step, given its statistics summed over all images."""
        return dict(state)


def add_angle(cosines_G: Tensor, margin: Tensor | float) -> Tensor:
    """cos(theta + margin); if theta + margin passes pi, cos(theta) - margin * sin(margin), which keeps falling.

    The second form is the one of ArcFace's authors. The derivative at |cos| = 1, where that of sin(theta) is infinite,
    is taken as cos(margin): the embedding's gradient is zero there anyway.
    """
    if not isinstance(margin, Tensor):
        # Filled on the device: a copy from the host would make a GPU wait.
        margin = torch.full((), margin, dtype=cosines_G.dtype, device=cosines_G.device)
    sines_G = torch.sqrt((1 - cosines_G * cosines_G).clamp_min(torch.finfo(cosines_G.dtype).tiny))
    inside_G = cosines_G * torch.cos(margin) - sines_G * torch.sin(margin)
    # A margin drawn below 0 takes no angle past pi.
    is_past_pi_G = (cosines_G <= -torch.cos(margin)) & (margin > 0)
    return torch.where(is_past_pi_G, cosines_G - margin * torch.sin(margin), inside_G)


def add_angle_straight_through(cosines_G: Tensor, multiplier: float, angle: float) -> Tensor:
    """cos(multiplier * theta + angle) with the derivative 1, as InsightFace's CombinedMarginLoss trains.

    InsightFace computes acos and cos under no_grad, so autograd sees the identity. It has no continuation past pi either:
    the value rises again there, which does no harm because the derivative does not depend on it.
    """
    shifted_G = torch.cos(torch.acos(cosines_G.detach()) * multiplier + angle)
    return cosines_G + (shifted_G - cosines_G.detach())


@dataclass(frozen=True)
class NormalisedSoftmax(Margin):
    """No margin: logits are scale * cosine."""

    scale: float = 64.0
    gpu_rule: ClassVar[GpuRule | None] = "cosine"
    needs_cosines: ClassVar[bool] = False


@dataclass(frozen=True)
class ArcFace(Margin):
    """scale * cos(theta + margin)."""

    scale: float = 64.0
    margin: float = 0.5
    """An angle in radians."""
    gradient: Gradient = "exact"
    """`straight-through` takes the derivative of the logit as `scale`, as InsightFace's training code does."""
    gpu_rule: ClassVar[GpuRule | None] = "angle"
    limits: ClassVar[Limits] = {"margin": (0, math.pi / 2)}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gradient(self, self.gradient)

    def target_logits(self, targets: Targets) -> Tensor:
        if self.gradient == "straight-through":
            return self.scale * add_angle_straight_through(targets.cosines_G, 1.0, self.margin)
        return self.scale * add_angle(targets.cosines_G, self.margin)


@dataclass(frozen=True)
class CosFace(Margin):
    """scale * (cos(theta) - margin)."""

    scale: float = 64.0
    margin: float = 0.4
    gpu_rule: ClassVar[GpuRule | None] = "cosine"
    needs_cosines: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"margin": (0, 2)}

    def target_logits(self, targets: Targets) -> Tensor:
        return self.scale * (targets.cosines_G - self.margin)


@dataclass(frozen=True)
class CombinedMargin(Margin):
    """scale * (cos(multiplier * theta + angle) - cosine): SphereFace, ArcFace and CosFace in one (m1, m2, m3)."""

    scale: float = 64.0
    multiplier: float = 1.0
    angle: float = 0.0
    cosine: float = 0.0
    gradient: Gradient = "exact"
    """`straight-through` takes the derivative of the logit as `scale`, and does not continue the value past pi."""
    sizes: ClassVar[tuple[str, ...]] = ("angle", "cosine")
    limits: ClassVar[Limits] = {"multiplier": (0.5, 8), "angle": (0, math.pi / 2), "cosine": (0, 2)}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gradient(self, self.gradient)

    def target_logits(self, targets: Targets) -> Tensor:
        if self.gradient == "straight-through":
            shifted_G = add_angle_straight_through(targets.cosines_G, self.multiplier, self.angle)
            return self.scale * (shifted_G - self.cosine)
        if self.multiplier == 1:
            return self.scale * (add_angle(targets.cosines_G, self.angle) - self.cosine)
        # acos has an infinite derivative at ±1; stay a hair inside, where the gradient is large but finite.
        angles_G = torch.acos(targets.cosines_G.clamp(-1 + 1e-12, 1 - 1e-12)) * self.multiplier + self.angle
        turns_G = torch.floor(angles_G.detach() / math.pi)
        # SphereFace's continuation: each half turn flips the sign and steps down by 2, so the value falls throughout.
        return self.scale * ((1 - 2 * (turns_G % 2)) * torch.cos(angles_G) - 2 * turns_G - self.cosine)


@dataclass(frozen=True)
class AdaFace(Margin):
    """A margin that adapts to image quality, read off the embedding's norm against its running mean and deviation."""

    scale: float = 64.0
    margin: float = 0.4
    concentration: float = 0.333
    """h: norms 1/h deviations or more from the mean count as the best or the worst quality."""
    momentum: float = 0.01
    """Weight of a step's mean and deviation in the running ones."""
    initial_state: ClassVar[Mapping[str, float]] = {"norm_mean": 20.0, "norm_std": 100.0}
    limits: ClassVar[Limits] = {"margin": (0, 1), "concentration": (0, math.inf), "momentum": (0, 1)}

    def target_logits(self, targets: Targets) -> Tensor:
        norms_G = _safe_norms(targets)
        mean, std = targets.state["norm_mean"], targets.state["norm_std"]
        quality_G = ((norms_G - mean) / (std + 1e-3) * self.concentration).clamp(-1, 1)
        angles_G = torch.acos(targets.cosines_G.clamp(-1 + 1e-12, 1 - 1e-12)) - self.margin * quality_G
        angles_G = angles_G.clamp(1e-3, math.pi - 1e-3)
        return self.scale * (torch.cos(angles_G) - self.margin - self.margin * quality_G)

    def statistics(self, targets: Targets) -> Tensor:
        norms_G = torch.where(targets.is_image_G, _safe_norms(targets), 0)
        return torch.stack([targets.is_image_G.sum(), norms_G.sum(), (norms_G * norms_G).sum()])

    def next_state(self, state: Mapping[str, Tensor], statistics: Tensor) -> dict[str, Tensor]:
        count, total, squares = statistics
        mean = total / count.clamp_min(1)
        std = torch.sqrt(((squares - count * mean * mean) / (count - 1).clamp_min(1)).clamp_min(0))
        # No image has no mean, one image has no deviation: the running value stays.
        mean = torch.where(count > 0, mean, state["norm_mean"])
        std = torch.where(count > 1, std, state["norm_std"])
        return {
            "norm_mean": state["norm_mean"] + self.momentum * (mean - state["norm_mean"]),
            "norm_std": state["norm_std"] + self.momentum * (std - state["norm_std"]),
        }


@dataclass(frozen=True)
class MagFace(Margin):
    """ArcFace with a margin that grows with the embedding's norm, and a penalty that pulls norms up."""

    scale: float = 64.0
    lower_norm: float = 10.0
    upper_norm: float = 110.0
    lower_margin: float = 0.45
    upper_margin: float = 0.8
    penalty_weight: float = 35.0
    sizes: ClassVar[tuple[str, ...]] = ("lower_margin", "upper_margin")
    limits: ClassVar[Limits] = {
        "lower_margin": (0, math.pi / 2),
        "upper_margin": (0, math.pi / 2),
        "penalty_weight": (0, math.inf),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lower_norm < self.upper_norm:
            raise HeadError(
                f"MagFace.lower_norm is {self.lower_norm} and upper_norm {self.upper_norm}: expected 0 < lower < upper."
            )
        if self.upper_margin < self.lower_margin:
            raise HeadError(
                f"MagFace.upper_margin is {self.upper_margin}; it must lie in [{self.lower_margin:g}, {math.pi / 2:.4g}]."
            )

    def target_logits(self, targets: Targets) -> Tensor:
        slope = (self.upper_margin - self.lower_margin) / (self.upper_norm - self.lower_norm)
        norms_G = targets.norms_G.clamp(self.lower_norm, self.upper_norm)
        return self.scale * add_angle(targets.cosines_G, slope * (norms_G - self.lower_norm) + self.lower_margin)

    def penalty(self, targets: Targets) -> Tensor:
        norms_G = targets.norms_G.clamp(self.lower_norm, self.upper_norm)
        return self.penalty_weight * (norms_G / self.upper_norm**2 + 1 / norms_G)


@dataclass(frozen=True)
class CurricularFace(Margin):
    """ArcFace whose hard negatives (closer than the target after its margin) weigh more in the course of training."""

    scale: float = 64.0
    margin: float = 0.5
    momentum: float = 0.01
    """Weight of a step's mean target cosine in the running one, t."""
    touches_only_target: ClassVar[bool] = False
    initial_state: ClassVar[Mapping[str, float]] = {"t": 0.0}
    limits: ClassVar[Limits] = {"margin": (0, math.pi / 2), "momentum": (0, 1)}

    def target_logits(self, targets: Targets) -> Tensor:
        return self.scale * add_angle(targets.cosines_G, self.margin)

    def curriculum(self, targets: Targets) -> tuple[Tensor, Tensor]:
        """Returns the numbers of `negative_logits` for the fused kernel: borders (G,) of the hard negatives, and t ()."""
        cosines_G = targets.cosines_G.detach()
        sines_G = torch.sqrt((1 - cosines_G * cosines_G).clamp_min(0))
        # The plain cos(theta + m), without the continuation beyond pi: so the paper's indicator is defined.
        return cosines_G * math.cos(self.margin) - sines_G * math.sin(self.margin), targets.state["t"]

    def negative_logits(self, cosines_GS: Tensor, targets: Targets) -> Tensor:
        borders_G, t = (part.to(cosines_GS.dtype) for part in self.curriculum(targets))
        is_hard_GS = cosines_GS > borders_G[:, None]
        return self.scale * torch.where(is_hard_GS, cosines_GS * (t + cosines_GS), cosines_GS)

    def logit_bound(self) -> float:
        return 2 * self.scale

    def statistics(self, targets: Targets) -> Tensor:
        cosines_G = torch.where(targets.is_image_G, targets.cosines_G.detach(), 0)
        return torch.stack([targets.is_image_G.sum(), cosines_G.sum()])

    def next_state(self, state: Mapping[str, Tensor], statistics: Tensor) -> dict[str, Tensor]:
        count, total = statistics
        mean = torch.where(count > 0, total / count.clamp_min(1), state["t"])
        return {"t": state["t"] + self.momentum * (mean - state["t"])}


@dataclass(frozen=True)
class ElasticFace(Margin):
    """ArcFace or CosFace with one margin per image, drawn from a normal distribution.

    The authors use a mean of 0.5 for `arc` and of 0.35 for `cos`.
    """

    scale: float = 64.0
    margin: float = 0.5
    deviation: float = 0.0125
    kind: Literal["arc", "cos"] = "arc"
    limits: ClassVar[Limits] = {"margin": (0, math.pi / 2), "deviation": (0, 1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ("arc", "cos"):
            raise HeadError(f"ElasticFace.kind is {self.kind!r}: expected 'arc' or 'cos'.")

    def target_logits(self, targets: Targets) -> Tensor:
        margins_G = self.margin + self.deviation * targets.normals()
        if self.kind == "cos":
            return self.scale * (targets.cosines_G - margins_G)
        return self.scale * add_angle(targets.cosines_G, margins_G)


@dataclass(frozen=True)
class DynamicArcFace(Margin):
    """ArcFace with a margin per class: factor * n^-exponent + offset, for a class of n training images.

    Rare classes get the larger margin. The defaults are those of the winners of the Google Landmarks challenge 2020.
    """

    scale: float = 64.0
    factor: float = 0.45
    exponent: float = 0.25
    offset: float = 0.05
    needs_class_counts: ClassVar[bool] = True
    sizes: ClassVar[tuple[str, ...]] = ("factor", "offset")
    limits: ClassVar[Limits] = {"factor": (0, math.pi / 2), "exponent": (0, 8), "offset": (0, math.pi / 2)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor + self.offset > math.pi / 2:
            raise HeadError(
                f"DynamicArcFace.factor is {self.factor} and offset {self.offset}: together, the margin of a class of one "
                f"image, they must be at most {math.pi / 2:.4g}."
            )

    def target_logits(self, targets: Targets) -> Tensor:
        assert targets.class_counts_G is not None, "the head has checked that it has class counts"
        # Counts may be frequencies: the margin of a class never exceeds that of a single image.
        margins_G = self.factor * targets.class_counts_G.clamp_min(1) ** -self.exponent + self.offset
        return self.scale * add_angle(targets.cosines_G, margins_G)


@dataclass(frozen=True)
class InterTopK(Margin):
    """ArcFace with an extra margin for the k closest negatives of each image: scale * cos(theta - extra)."""

    scale: float = 64.0
    margin: float = 0.2
    extra: float = 0.06
    k: int = 5
    touches_only_target: ClassVar[bool] = False
    negatives_read_targets: ClassVar[bool] = False
    sizes: ClassVar[tuple[str, ...]] = ("margin", "extra")
    limits: ClassVar[Limits] = {"margin": (0, math.pi / 2), "extra": (0, math.pi / 2), "k": (1, 10_000)}

    @property
    def num_hardest(self) -> int:  # type: ignore[override]
        return self.k

    def target_logits(self, targets: Targets) -> Tensor:
        return self.scale * add_angle(targets.cosines_G, self.margin)

    def negative_logits(self, cosines_GS: Tensor, targets: Targets) -> Tensor:
        assert targets.hardest_G is not None, "the head forms it for num_hardest"
        is_hard_GS = cosines_GS >= targets.hardest_G.to(cosines_GS.dtype)[:, None]
        # Rounding may take a cosine to or past 1, where the angle has no derivative.
        closer_GS = add_angle(cosines_GS.clamp(-1, 1), -self.extra)
        return self.scale * torch.where(is_hard_GS, closer_GS, cosines_GS)


@dataclass(frozen=True)
class _SigmoidMargin(Margin):
    """Base class of margins for the sigmoid loss: all logits get a bias, which every step moves against its gradient."""

    scale: float = 64.0
    margin: float = 0.4
    bias: float | None = None
    """The bias at the start; None: a value that depends on the number of classes."""
    bias_rate: float = 0.1
    """Learning rate of the bias; 0 keeps it."""
    touches_only_target: ClassVar[bool] = False
    negatives_read_targets: ClassVar[bool] = False
    loss: ClassVar[LossName] = "sigmoid"
    learns_bias: ClassVar[bool] = True
    initial_state: ClassVar[Mapping[str, float]] = {"bias": 0.0}
    limits: ClassVar[Limits] = {"margin": (0, 2), "bias_rate": (0, math.inf), "bias": (-600, 600)}

    def next_state(self, state: Mapping[str, Tensor], statistics: Tensor) -> dict[str, Tensor]:
        count, gradient = statistics
        return {"bias": state["bias"] - self.bias_rate * gradient / count.clamp_min(1)}


@dataclass(frozen=True)
class UniFace(_SigmoidMargin):
    """Every class decides for itself whether the image is its own, with one threshold for all: log(1 + exp(logit)).

    Own class: scale * (cos(theta) - margin) + bias, others: scale * cos(theta) + bias. margin=0 is the plain sigmoid loss. The
    bias starts at -log(10 * classes).
    """

    def state_for(self, num_classes: int) -> Mapping[str, float]:
        return {"bias": -math.log(10 * num_classes) if self.bias is None else self.bias}

    def target_logits(self, targets: Targets) -> Tensor:
        return self.scale * (targets.cosines_G - self.margin) + targets.state["bias"]

    def negative_logits(self, cosines_GS: Tensor, targets: Targets) -> Tensor:
        return self.scale * cosines_GS + targets.state["bias"].to(cosines_GS.dtype)


@dataclass(frozen=True)
class SphereFace2(_SigmoidMargin):
    """One binary classifier per class, with g(cos) = 2 * ((cos + 1) / 2)^t - 1 in place of the cosine.

    Own class: scale * (g - margin) + bias, others: scale * (g + margin) + bias. The terms of the own class count
    balance / scale, those of the others (1 - balance) / scale. The bias starts where both pull equally at a right angle.
    """

    scale: float = 40.0
    t: float = 3.0
    balance: float = 0.7
    limits: ClassVar[Limits] = {**_SigmoidMargin.limits, "t": (1, 100), "balance": (1e-6, 1 - 1e-6)}

    @property
    def loss_factors(self) -> tuple[float, float]:  # type: ignore[override]
        return self.balance / self.scale, (1 - self.balance) / self.scale

    def state_for(self, num_classes: int) -> Mapping[str, float]:
        if self.bias is not None:
            return {"bias": self.bias}
        ratio = self.balance / ((1 - self.balance) * max(1, num_classes - 1))
        own, other = (self.scale * (2 * 0.5**self.t - 1 + sign * self.margin) for sign in (-1, 1))
        root = math.sqrt((1 - ratio) ** 2 + 4 * ratio * math.exp(own - other))
        return {"bias": math.log(2 * ratio) - other - math.log(1 - ratio + root)}

    def target_logits(self, targets: Targets) -> Tensor:
        return self.scale * (self._g(targets.cosines_G) - self.margin) + targets.state["bias"]

    def negative_logits(self, cosines_GS: Tensor, targets: Targets) -> Tensor:
        return self.scale * (self._g(cosines_GS) + self.margin) + targets.state["bias"].to(cosines_GS.dtype)

    def _g(self, cosines: Tensor) -> Tensor:
        return 2 * ((cosines + 1) / 2).clamp(0, 1) ** self.t - 1


# The margins of recipes: name, class, and the field that `head.margin_size` sets (None: the margin has no single size).
# A new margin is a class above and a line here. `megaclass` exports all classes of this table, and `make docs` lists them.
MARGINS: dict[str, tuple[type[Margin], str | None]] = {
    "softmax": (NormalisedSoftmax, None),
    "arcface": (ArcFace, "margin"),
    "cosface": (CosFace, "margin"),
    "combined": (CombinedMargin, "angle"),
    "adaface": (AdaFace, "margin"),
    "magface": (MagFace, None),
    "curricularface": (CurricularFace, "margin"),
    "elasticface": (ElasticFace, "margin"),
    "dynamic": (DynamicArcFace, "factor"),
    "intertopk": (InterTopK, "margin"),
    "uniface": (UniFace, "margin"),
    "sphereface2": (SphereFace2, "margin"),
}


def _safe_norms(targets: Targets) -> Tensor:
    return targets.norms_G.detach().clamp(1e-3, 100)


def _check_gradient(margin: Margin, gradient: str) -> None:
    if gradient not in get_args(Gradient):
        raise HeadError(f"{type(margin).__name__}.gradient is {gradient!r}: expected 'exact' or 'straight-through'.")
