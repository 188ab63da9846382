"""Margins against the papers' formulas, worked by hand; then each of them through the head, against a dense matrix.

The dense head below is independent of the package: all cosines at once, the papers' formulas with acos and cos,
`F.cross_entropy`, and autograd through the normalisations.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

from megaclass import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    ElasticFace,
    MagFace,
    Margin,
    NormalisedSoftmax,
    PartialFC,
    RowSGD,
    Targets,
)
from megaclass.config.read import load_config
from megaclass.config.schema import HeadConfig
from megaclass.errors import HeadError
from megaclass.head import chunked
from megaclass.head.counter_random import normals_from_bits, random_bits, stream_keys
from megaclass.head.margins import MARGINS
from megaclass.head.sampling import sample_classes
from megaclass.keyed_random import Stream
from megaclass.training.model.build import build_margin
from megaclass_launch.errors import ConfigError

ALL_MARGINS = {
    "ArcFace": ArcFace(),
    "ArcFace straight-through": ArcFace(gradient="straight-through"),
    "CosFace": CosFace(),
    "CombinedMargin m2 m3": CombinedMargin(angle=0.3, cosine=0.2),
    "CombinedMargin m1 m2 m3": CombinedMargin(multiplier=1.35, angle=0.2, cosine=0.1),
    "CombinedMargin straight-through": CombinedMargin(
        multiplier=1.35, angle=0.2, cosine=0.1, gradient="straight-through"
    ),
    "NormalisedSoftmax": NormalisedSoftmax(),
    "AdaFace": AdaFace(),
    "MagFace": MagFace(),
    "CurricularFace": CurricularFace(),
    "ElasticFace arc": ElasticFace(),
    "ElasticFace cos": ElasticFace(margin=0.35, kind="cos"),
}
every_margin = pytest.mark.parametrize("margin", ALL_MARGINS.values(), ids=ALL_MARGINS.keys())


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def targets_of(
    cosines_G: Tensor,
    *,
    norms_G: Tensor | None = None,
    is_image_G: Tensor | None = None,
    normals_G: Tensor | None = None,
    **state: float,
) -> Targets:
    """What a margin is given for these cosines: norm 30, nothing but images, no noise, unless told otherwise."""
    return Targets(
        cosines_G=cosines_G,
        norms_G=torch.full_like(cosines_G, 30.0) if norms_G is None else norms_G,
        is_image_G=torch.ones_like(cosines_G, dtype=torch.bool) if is_image_G is None else is_image_G,
        state={name: float64(value)[0] for name, value in state.items()},
        normals=lambda: torch.zeros_like(cosines_G) if normals_G is None else normals_G,
    )


def default_targets(margin: Margin, cosines_G: Tensor, **others: Any) -> Targets:
    return targets_of(cosines_G, **others, **margin.initial_state)


# ---- the papers' formulas, worked by hand at theta = 60 degrees, cos(theta) = 0.5 -----------------------------------


@pytest.mark.parametrize(
    ("margin", "logit"),
    [
        # arXiv:1801.07698, Eq. 2: 64 * 0.5
        (NormalisedSoftmax(), 32.0),
        # arXiv:1801.07698, Eq. 3: 64 * cos(1.0471975512 + 0.5) = 64 * 0.02359658529
        (ArcFace(margin=0.5), 1.510181458618206),
        (ArcFace(margin=0.5, gradient="straight-through"), 1.510181458618206),
        # arXiv:1801.09414, Eq. 4: 64 * (0.5 - 0.4)
        (CosFace(margin=0.4), 6.4),
        # arXiv:1801.07698, Eq. 4 with the paper's CM1 (1, 0.3, 0.2): 64 * (cos(1.3471975512) - 0.2) = 64 * 0.02174023826
        (CombinedMargin(angle=0.3, cosine=0.2), 1.391375248797162),
        (CombinedMargin(angle=0.3, cosine=0.2, gradient="straight-through"), 1.391375248797162),
        # and its CM2 (0.9, 0.4, 0.15): 64 * (cos(0.9424777961 + 0.4) - 0.15) = 64 * 0.07634001189
        (CombinedMargin(multiplier=0.9, angle=0.4, cosine=0.15), 4.885760760814275),
        # arXiv:1704.08063, psi(theta) = (-1)^k cos(4 theta) - 2k for theta in [k pi / 4, (k + 1) pi / 4]:
        # 4 * 60 = 240 degrees, k = 1: 64 * (-cos(240 degrees) - 2) = 64 * -1.5
        (CombinedMargin(multiplier=4.0), -96.0),
        # arXiv:2004.00288, T(cos theta) = cos(theta + m): ArcFace's
        (CurricularFace(margin=0.5), 1.510181458618206),
    ],
    ids=lambda value: str(value) if isinstance(value, Margin) else "",
)
def test_a_target_logit_is_the_paper_s(margin, logit):
    assert margin.target_logits(default_targets(margin, float64(0.5))).item() == pytest.approx(logit, abs=1e-12)


@pytest.mark.parametrize(
    ("norm", "logit", "meaning"),
    [
        # arXiv:2204.00964, Sec. 3.3: quality z = clip((norm - mean) / (std + 0.001) * h, -1, 1), logit
        # s * (cos(theta - m z) - (m + m z)). Here mean 20, std 9.999, h 0.333, m 0.4, so z = 0.0333 * (norm - 20).
        (20.0, 6.4, "z = 0: CosFace, 64 * (0.5 - 0.4)"),
        (30.0, 4.952625428855683, "z = 0.333: 64 * (cos(1.0471975512 - 0.1332) - 0.5332)"),
        (70.0, -0.142292855017067, "z = 1: 64 * (cos(1.0471975512 - 0.4) - 0.8)"),
        (500.0, -0.142292855017067, "norms count up to 100: still z = 1"),
    ],
)
def test_adaface_turns_from_cosface_to_a_negative_angle_as_the_norm_grows(norm, logit, meaning):
    targets = targets_of(float64(0.5), norms_G=float64(norm), norm_mean=20.0, norm_std=9.999)
    assert AdaFace(margin=0.4).target_logits(targets).item() == pytest.approx(logit, abs=1e-12), meaning


def test_adaface_is_arcface_for_the_worst_quality():
    # arXiv:2204.00964, Sec. 3.3: z = -1 gives 64 * cos(1.0471975512 + 0.4) = 64 * 0.12328431986
    targets = targets_of(float64(0.5), norms_G=float64(1.0), norm_mean=50.0, norm_std=9.999)
    assert AdaFace(margin=0.4).target_logits(targets).item() == pytest.approx(7.890196471201712, abs=1e-12)


@pytest.mark.parametrize(
    ("norm", "logit"),
    [
        # arXiv:2103.06627, Eq. 3, with m(a) = 0.0035 * (a - 10) + 0.45 on [10, 110]
        (60.0, -6.478562707125036),  # 64 * cos(1.0471975512 + 0.625)
        (10.0, 4.706070327382163),  # 64 * cos(1.0471975512 + 0.45)
        (3.0, 4.706070327382163),  # norms below 10 count as 10
        (999.0, -17.46529559071379),  # and above 110 as 110: 64 * cos(1.0471975512 + 0.8)
    ],
)
def test_magface_s_angle_grows_with_the_norm(norm, logit):
    targets = targets_of(float64(0.5), norms_G=float64(norm))
    assert MagFace().target_logits(targets).item() == pytest.approx(logit, abs=1e-12)


def test_magface_pulls_norms_up_by_its_penalty_and_down_by_its_angle():
    norms_G = float64(60.0, 3.0, 999.0).requires_grad_()
    targets = targets_of(float64(0.5, 0.5, 0.5), norms_G=norms_G)
    # arXiv:2103.06627, Eq. 3 with g(a) = a / 110^2 + 1 / a and lambda 35: 35 * (60 / 12100 + 1 / 60), and at 10, at 110
    penalty_G = MagFace().penalty(targets)
    hand = float64(0.7568870523415978, 35 * (10 / 12100 + 0.1), 35 * (2 / 110))
    torch.testing.assert_close(penalty_G, hand, rtol=0, atol=1e-14)
    # d penalty / d norm = 35 * (1 / 12100 - 1 / 3600); nothing beyond the ends
    slopes_G = torch.autograd.grad(penalty_G.sum(), norms_G)[0]
    torch.testing.assert_close(slopes_G, float64(-0.0068296602387511, 0, 0), rtol=0, atol=1e-14)
    # d logit / d norm = -64 * sin(1.0471975512 + 0.625) * 0.0035
    slopes_G = torch.autograd.grad(MagFace().target_logits(targets).sum(), norms_G)[0]
    torch.testing.assert_close(slopes_G, float64(-0.2228493790866617, 0, 0), rtol=0, atol=1e-13)


def test_curricularface_raises_the_negatives_that_are_closer_than_the_target():
    # arXiv:2004.00288: N = cos where cos <= cos(theta + m), else cos * (t + cos). Target 0.5: the border is 0.0236.
    # 0.4 is hard: 0.4 * (0.3 + 0.4) = 0.28, slope 0.3 + 0.8. 0.02 and -0.2 are easy.
    negatives_GS = float64(0.4, 0.02, -0.2)[None].requires_grad_()
    logits_GS = CurricularFace(scale=64.0, margin=0.5).negative_logits(negatives_GS, targets_of(float64(0.5), t=0.3))
    torch.testing.assert_close(logits_GS, 64 * float64(0.28, 0.02, -0.2)[None], rtol=0, atol=1e-13)
    slopes_GS = torch.autograd.grad(logits_GS.sum(), negatives_GS)[0]
    torch.testing.assert_close(slopes_GS, 64 * float64(1.1, 1, 1)[None], rtol=0, atol=1e-13)


def test_elasticface_adds_noise_to_the_margin_of_each_image():
    # arXiv:2109.09416: E(m, sigma) = 0.5 + 0.0125 * z, for z = 1, -2, 0; cos(theta + E) and cos(theta) - E.
    targets = targets_of(float64(0.5, 0.5, 0.5), normals_G=float64(1.0, -2.0, 0.0))
    arc_G = float64(0.7103070551438884, 3.109097435345985, 1.510181458618206)
    torch.testing.assert_close(ElasticFace(kind="arc").target_logits(targets), arc_G, rtol=0, atol=1e-12)
    cos_G = float64(-0.8, 1.6, 0.0)
    torch.testing.assert_close(ElasticFace(kind="cos").target_logits(targets), cos_G, rtol=0, atol=1e-12)


def test_an_elastic_margin_drawn_below_zero_is_still_cos_of_theta_plus_it():
    # margin 0.1, noise -4 * 0.05: theta - 0.1, also near pi, where a positive margin would go past it.
    angles_G = torch.linspace(0.2, math.pi, 50, dtype=torch.float64)
    targets = targets_of(torch.cos(angles_G), normals_G=torch.full((50,), -4.0, dtype=torch.float64))
    logits_G = ElasticFace(margin=0.1, deviation=0.05).target_logits(targets)
    torch.testing.assert_close(logits_G, 64 * torch.cos(angles_G - 0.1), rtol=0, atol=1e-10)


# ---- derivatives and edges ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "margin", [m for name, m in ALL_MARGINS.items() if "through" not in name], ids=lambda m: type(m).__name__
)
def test_the_derivative_is_that_of_the_value(margin):
    cosines_G = torch.linspace(-0.99, 0.99, 200, dtype=torch.float64)
    normals_G = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def logits(cosines_G: Tensor) -> Tensor:
        return margin.target_logits(default_targets(margin, cosines_G, normals_G=normals_G))

    leaf_G = cosines_G.clone().requires_grad_()
    slopes_G = torch.autograd.grad(logits(leaf_G).sum(), leaf_G)[0]
    h = 1e-6
    differences_G = (logits(cosines_G + h) - logits(cosines_G - h)) / (2 * h)
    torch.testing.assert_close(slopes_G, differences_G, rtol=1e-6, atol=1e-6)


def test_the_exact_derivative_is_sin_theta_plus_m_over_sin_theta_and_straight_through_takes_it_as_the_scale():
    cosines_G = float64(0.5, -0.99, 0.9).requires_grad_()
    exact_G = torch.autograd.grad(ArcFace().target_logits(targets_of(cosines_G)).sum(), cosines_G)[0]
    # 64 * sin(1.0471975512 + 0.5) / sin(1.0471975512); beyond pi the continuation has slope 64
    torch.testing.assert_close(exact_G[:2], float64(73.880257642233, 64.0), rtol=0, atol=1e-11)
    straight_through = ArcFace(gradient="straight-through").target_logits(targets_of(cosines_G))
    assert torch.autograd.grad(straight_through.sum(), cosines_G)[0].tolist() == [64.0, 64.0, 64.0]


def insightface_logits(cosines_GC: Tensor, labels_G: Tensor, s: float, m1: float, m2: float, m3: float) -> Tensor:
    """CombinedMarginLoss of arcface_torch: acos and cos under no_grad, no continuation past pi.

    arcface_torch itself takes m1 = 1 and one of m2 and m3; the same operations with all three are the combination's.
    """
    logits_GC = cosines_GC.clone()
    with torch.no_grad():
        logits_GC.arccos_()
        rows_G = torch.arange(len(labels_G))
        logits_GC[rows_G, labels_G] = logits_GC[rows_G, labels_G] * m1 + m2
        logits_GC.cos_()
        logits_GC[rows_G, labels_G] -= m3
    return logits_GC * s


@pytest.mark.parametrize(
    ("margin", "m123"),
    [
        (ArcFace(gradient="straight-through"), (1.0, 0.5, 0.0)),
        (CombinedMargin(angle=0.5, gradient="straight-through"), (1.0, 0.5, 0.0)),
        (CombinedMargin(angle=0.3, cosine=0.2, gradient="straight-through"), (1.0, 0.3, 0.2)),
        (CombinedMargin(multiplier=1.35, angle=0.2, cosine=0.1, gradient="straight-through"), (1.35, 0.2, 0.1)),
    ],
    ids=lambda value: str(value) if isinstance(value, Margin) else "",
)
def test_straight_through_is_insightface_s_value_and_derivative_at_every_angle(margin, m123):
    angles_G = torch.linspace(0.001, math.pi - 0.001, 1000, dtype=torch.float64)
    ours_G, theirs_G = (torch.cos(angles_G).requires_grad_() for _ in range(2))
    logits_G = margin.target_logits(targets_of(ours_G))
    truth_G = insightface_logits(theirs_G[:, None], torch.zeros(1000, dtype=torch.int64), 64.0, *m123)[:, 0]
    torch.testing.assert_close(logits_G, truth_G, rtol=0, atol=1e-12)
    assert torch.equal(torch.autograd.grad(logits_G.sum(), ours_G)[0], torch.autograd.grad(truth_G.sum(), theirs_G)[0])


@pytest.mark.parametrize(
    "margin", [m for name, m in ALL_MARGINS.items() if "through" not in name], ids=lambda m: type(m).__name__
)
def test_a_larger_angle_never_gets_a_larger_logit_even_past_pi(margin):
    angles_G = torch.linspace(0, math.pi, 20001, dtype=torch.float64)
    falls_G = margin.target_logits(default_targets(margin, torch.cos(angles_G))).diff()
    if isinstance(margin, AdaFace):
        # Its authors hold the angle to [0.001, pi - 0.001]: flat at the ends.
        assert (falls_G <= 1e-12).all()
        assert (falls_G[200:-200] < 0).all()
    else:
        assert (falls_G < 0).all()


def test_arcface_past_pi_is_cosine_minus_m_sin_m():
    # theta = acos(-0.95) = 2.8240, + 0.5 = 3.3240 > pi: 64 * (-0.95 - 0.5 * sin(0.5)) as in InsightFace's code
    assert ArcFace().target_logits(targets_of(float64(-0.95))).item() == pytest.approx(-76.1416172353345, abs=1e-12)


@every_margin
def test_value_and_gradient_are_finite_where_the_cosine_is_one(margin):
    cosines_G = float64(1.0, -1.0, 1 - 1e-16, -1 + 1e-16, 1 - 1e-9).requires_grad_()
    logits_G = margin.target_logits(default_targets(margin, cosines_G))
    assert logits_G.isfinite().all()
    assert torch.autograd.grad(logits_G.sum(), cosines_G)[0].isfinite().all()


def test_arcface_on_its_own_centre_has_the_derivative_cos_m():
    cosines_G = float64(1.0).requires_grad_()
    slope = torch.autograd.grad(ArcFace().target_logits(targets_of(cosines_G)).sum(), cosines_G)[0]
    assert slope.item() == pytest.approx(64 * math.cos(0.5), abs=1e-12)


# ---- state ----------------------------------------------------------------------------------------------------------


def test_adaface_s_statistics_are_count_sum_and_sum_of_squares_of_the_norms():
    # Norms 20, 30, 40 and 500, which counts as 100; the last is padding.
    is_image_G = torch.tensor([True, True, True, True, False])
    targets = targets_of(torch.zeros(5).double(), norms_G=float64(20, 30, 40, 500, 77), is_image_G=is_image_G)
    assert AdaFace().statistics(targets).tolist() == [4, 190, 12900]


def test_adaface_s_mean_and_deviation_move_on_by_their_running_average():
    # Three norms 20, 30, 40: sums 3, 90, 2900; mean 30, deviation sqrt((2900 - 3 * 900) / 2) = 10.
    state = {"norm_mean": float64(20)[0], "norm_std": float64(100)[0]}
    moved = AdaFace(momentum=0.01).next_state(state, float64(3, 90, 2900))
    assert moved["norm_mean"].item() == pytest.approx(20 + 0.01 * (30 - 20), abs=1e-12)
    assert moved["norm_std"].item() == pytest.approx(100 + 0.01 * (10 - 100), abs=1e-12)


def test_adaface_keeps_its_deviation_where_one_image_has_none():
    state = {"norm_mean": float64(20)[0], "norm_std": float64(100)[0]}
    moved = AdaFace(momentum=0.01).next_state(state, float64(1, 30, 900))
    assert moved["norm_mean"].item() == pytest.approx(20.1, abs=1e-12)
    assert moved["norm_std"].item() == 100


@pytest.mark.parametrize("margin", [AdaFace(), CurricularFace()], ids=["AdaFace", "CurricularFace"])
def test_a_step_without_images_leaves_the_state_alone(margin):
    state = {name: float64(0.25)[0] for name in margin.initial_state}
    nothing = torch.zeros(2, dtype=torch.float64)
    statistics = margin.statistics(default_targets(margin, nothing, is_image_G=torch.zeros(2, dtype=torch.bool)))
    assert margin.next_state(state, statistics) == state


def test_curricularface_s_t_is_the_running_mean_of_the_target_cosines():
    margin = CurricularFace(momentum=0.01)
    is_image_G = torch.tensor([True, True, True, False])
    statistics = margin.statistics(targets_of(float64(0.2, 0.4, 0.9, 0.7), is_image_G=is_image_G))
    torch.testing.assert_close(statistics, float64(3, 1.5))
    # 0.01 * 0.5, then 0.005 + 0.01 * (0.5 - 0.005)
    first = margin.next_state({"t": float64(0)[0]}, statistics)
    assert first["t"].item() == pytest.approx(0.005, abs=1e-15)
    assert margin.next_state(first, statistics)["t"].item() == pytest.approx(0.00995, abs=1e-15)


def test_the_state_moves_in_step_and_forward_uses_the_one_the_step_began_with():
    head = PartialFC(4, 5, margin=CurricularFace(momentum=0.5), storage="float64")
    embeddings_BD, labels_B = torch.eye(4, dtype=torch.float64), torch.arange(4)
    first, second = head(embeddings_BD, labels_B), head(embeddings_BD, labels_B)
    assert first.item() == second.item()
    assert head.margin_state["t"].item() == 0
    cosines = cosine_similarity(embeddings_BD, head.centres(labels_B))
    second.backward()
    head.step(lr=0.1)
    assert head.margin_state["t"].item() == pytest.approx(0.5 * cosines.mean().item(), abs=1e-15)


class _Recorder(ElasticFace):
    """Keeps what ElasticFace subtracts from each image's cosine."""

    def target_logits(self, targets: Targets) -> Tensor:
        logits_G = super().target_logits(targets)
        _Recorder.margins_G = (targets.cosines_G - logits_G / self.scale).detach()
        return logits_G


def test_elasticface_s_margins_have_the_mean_and_the_deviation_asked_for_and_change_every_step():
    num_images = 40_000
    head = PartialFC(2, 2, margin=_Recorder(margin=0.35, deviation=0.05, kind="cos"), storage="float64")
    embeddings_BD = torch.ones(num_images, 2, dtype=torch.float64)
    draws = []
    for _ in range(2):
        head(embeddings_BD, torch.zeros(num_images, dtype=torch.int64)).backward()
        head.step(lr=0.1)
        draws.append(_Recorder.margins_G)
    for margins_G in draws:
        assert abs(margins_G.mean().item() - 0.35) < 5 * 0.05 / math.sqrt(num_images)
        assert abs(margins_G.std().item() - 0.05) < 5 * 0.05 / math.sqrt(2 * num_images)
    assert abs(torch.corrcoef(torch.stack(draws))[0, 1].item()) < 5 / math.sqrt(num_images)


# ---- bad parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("margin", "settings", "parts"),
    [
        (NormalisedSoftmax, {"scale": 0.0}, ["NormalisedSoftmax.scale is 0.0", "above 0"]),
        (ArcFace, {"scale": 601.0}, ["ArcFace.scale is 601.0", "±600"]),
        (ArcFace, {"scale": math.nan}, ["ArcFace.scale is nan"]),
        (CurricularFace, {"scale": 301.0}, ["CurricularFace.scale is 301.0", "602", "±600"]),
        (ArcFace, {"margin": -0.1}, ["ArcFace.margin is -0.1", "[0, 1.571]"]),
        (ArcFace, {"gradient": "none"}, ["ArcFace.gradient is 'none'", "'exact' or 'straight-through'"]),
        (CosFace, {"margin": 2.5}, ["CosFace.margin is 2.5", "[0, 2]"]),
        (CombinedMargin, {"gradient": "none"}, ["CombinedMargin.gradient is 'none'", "'exact' or 'straight-through'"]),
        (CombinedMargin, {"multiplier": 0.0}, ["CombinedMargin.multiplier is 0.0", "[0.5, 8]"]),
        (CombinedMargin, {"angle": 2.0}, ["CombinedMargin.angle is 2.0", "[0, 1.571]"]),
        (CombinedMargin, {"cosine": -1.0}, ["CombinedMargin.cosine is -1.0", "[0, 2]"]),
        (AdaFace, {"margin": 1.5}, ["AdaFace.margin is 1.5", "[0, 1]"]),
        (AdaFace, {"concentration": -1.0}, ["AdaFace.concentration is -1.0", "[0, inf]"]),
        (AdaFace, {"momentum": 1.1}, ["AdaFace.momentum is 1.1", "[0, 1]"]),
        (MagFace, {"lower_norm": 120.0}, ["MagFace.lower_norm is 120.0", "upper_norm 110.0", "0 < lower < upper"]),
        (MagFace, {"lower_margin": -1.0}, ["MagFace.lower_margin is -1.0", "[0, 1.571]"]),
        (MagFace, {"upper_margin": 0.2}, ["MagFace.upper_margin is 0.2", "[0.45, 1.571]"]),
        (MagFace, {"penalty_weight": -35.0}, ["MagFace.penalty_weight is -35.0", "[0, inf]"]),
        (CurricularFace, {"margin": 3.0}, ["CurricularFace.margin is 3.0", "[0, 1.571]"]),
        (CurricularFace, {"momentum": -0.5}, ["CurricularFace.momentum is -0.5", "[0, 1]"]),
        (ElasticFace, {"margin": 2.0}, ["ElasticFace.margin is 2.0", "[0, 1.571]"]),
        (ElasticFace, {"deviation": -0.1}, ["ElasticFace.deviation is -0.1", "[0, 1]"]),
        (ElasticFace, {"kind": "sphere"}, ["ElasticFace.kind is 'sphere'", "'arc' or 'cos'"]),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_its_range(margin, settings, parts):
    with pytest.raises(HeadError) as raised:
        margin(**settings)
    assert [part for part in parts if part not in str(raised.value)] == []


# ---- through the head, against a dense matrix -----------------------------------------------------------------------

SCALE = 24.0
SEED = 5


def _added_angle(cosines_G: Tensor, angle: Tensor | float) -> Tensor:
    angle = torch.as_tensor(angle, dtype=torch.float64)
    angles_G = torch.acos(cosines_G)
    return torch.where(angles_G + angle < math.pi, torch.cos(angles_G + angle), cosines_G - angle * torch.sin(angle))


def _sphere(cosines_G: Tensor, multiplier: float, angle: float) -> Tensor:
    angles_G = multiplier * torch.acos(cosines_G) + angle
    turns_G = (angles_G / math.pi).floor()
    return (-1) ** turns_G * torch.cos(angles_G) - 2 * turns_G


def _mag_angle(norms_G: Tensor) -> Tensor:
    return 0.45 + (norms_G.clamp(10, 110) - 10) * 0.35 / 100


def _ada(cosines_G: Tensor, norms_G: Tensor, state: dict[str, float]) -> Tensor:
    # Norms are held to 100 and 0.001 added to the deviation, as in the authors' code.
    norms_G = norms_G.detach().clamp(max=100)
    quality_G = (0.333 * (norms_G - state["norm_mean"]) / (state["norm_std"] + 1e-3)).clamp(-1, 1)
    return torch.cos(torch.acos(cosines_G) - 0.4 * quality_G) - 0.4 * (1 + quality_G)


def _ada_next(state: dict[str, float], cosines_G: Tensor, norms_G: Tensor) -> dict[str, float]:
    norms_G = norms_G.clamp(max=100)
    mean, std = norms_G.mean().item(), norms_G.std().item()
    return {
        "norm_mean": 0.7 * state["norm_mean"] + 0.3 * mean,
        "norm_std": 0.7 * state["norm_std"] + 0.3 * std,
    }


def _curricular_negatives(cosines_GS: Tensor, target_G: Tensor, state: dict[str, float]) -> Tensor:
    borders_G = torch.cos(torch.acos(target_G.detach()) + 0.5)
    return torch.where(cosines_GS > borders_G[:, None], cosines_GS * (state["t"] + cosines_GS), cosines_GS)


def _curricular_next(state: dict[str, float], cosines_G: Tensor, norms_G: Tensor) -> dict[str, float]:
    return {"t": 0.7 * state["t"] + 0.3 * cosines_G.mean().item()}


@dataclass(frozen=True)
class Formula:
    """A margin, and the paper's formula for it (without the scale) in terms of whole vectors and matrices."""

    margin: Margin
    target: Callable[[Tensor, Tensor, dict[str, float], Tensor], Tensor]
    negatives: Callable[[Tensor, Tensor, dict[str, float]], Tensor] = lambda cosines_GS, target_G, state: cosines_GS
    penalty: Callable[[Tensor], Tensor] = lambda norms_G: norms_G * 0
    state: dict[str, float] = field(default_factory=dict)
    next_state: Callable[[dict[str, float], Tensor, Tensor], dict[str, float]] = lambda state, c, n: state


FORMULAS = {
    "ArcFace": Formula(ArcFace(scale=SCALE), lambda c, n, s, z: _added_angle(c, 0.5)),
    "ArcFace straight-through": Formula(
        ArcFace(scale=SCALE, gradient="straight-through"),
        lambda c, n, s, z: c + (torch.cos(torch.acos(c) + 0.5) - c).detach(),
    ),
    "CosFace": Formula(CosFace(scale=SCALE), lambda c, n, s, z: c - 0.4),
    "CombinedMargin m2 m3": Formula(
        CombinedMargin(scale=SCALE, angle=0.3, cosine=0.2), lambda c, n, s, z: _added_angle(c, 0.3) - 0.2
    ),
    "CombinedMargin m1 m2 m3": Formula(
        CombinedMargin(scale=SCALE, multiplier=1.7, angle=0.2, cosine=0.1),
        lambda c, n, s, z: _sphere(c, 1.7, 0.2) - 0.1,
    ),
    "CombinedMargin straight-through": Formula(
        CombinedMargin(scale=SCALE, multiplier=1.7, angle=0.2, cosine=0.1, gradient="straight-through"),
        lambda c, n, s, z: c + (torch.cos(1.7 * torch.acos(c) + 0.2) - 0.1 - c).detach(),
    ),
    "NormalisedSoftmax": Formula(NormalisedSoftmax(scale=SCALE), lambda c, n, s, z: c),
    "AdaFace": Formula(
        AdaFace(scale=SCALE, momentum=0.3),
        lambda c, n, s, z: _ada(c, n, s),
        state={"norm_mean": 20.0, "norm_std": 100.0},
        next_state=_ada_next,
    ),
    "MagFace": Formula(
        MagFace(scale=SCALE),
        lambda c, n, s, z: _added_angle(c, _mag_angle(n)),
        penalty=lambda n: 35 * (n.clamp(10, 110) / 110**2 + 1 / n.clamp(10, 110)),
    ),
    "CurricularFace": Formula(
        CurricularFace(scale=SCALE, momentum=0.3),
        lambda c, n, s, z: _added_angle(c, 0.5),
        negatives=_curricular_negatives,
        state={"t": 0.0},
        next_state=_curricular_next,
    ),
    "CurricularFace, logits past what float32 holds": Formula(
        CurricularFace(scale=64.0, momentum=0.3),
        lambda c, n, s, z: _added_angle(c, 0.5),
        negatives=_curricular_negatives,
        state={"t": 0.0},
        next_state=_curricular_next,
    ),
    "ElasticFace arc": Formula(
        ElasticFace(scale=SCALE, deviation=0.1), lambda c, n, s, z: _added_angle(c, 0.5 + 0.1 * z)
    ),
    "ElasticFace cos": Formula(
        ElasticFace(scale=SCALE, margin=0.35, deviation=0.1, kind="cos"), lambda c, n, s, z: c - 0.35 - 0.1 * z
    ),
}


@dataclass
class DenseStep:
    loss: Tensor
    grad_BD: Tensor
    weight_RD: Tensor
    state: dict[str, float]


def dense_step(
    formula: Formula,
    weight_RD: Tensor,
    embeddings_BD: Tensor,
    labels_B: Tensor,
    *,
    state: dict[str, float],
    normals_B: Tensor,
    classes_S: Tensor,
    weight_S: Tensor,
    num_subcentres: int,
    filter_above: float,
    lr: float,
) -> DenseStep:
    """One step of plain SGD on the whole matrix of logits of the classes in classes_S."""
    weight_RD = weight_RD.clone().requires_grad_()
    embeddings_BD = embeddings_BD.clone().requires_grad_()
    unit_SMD = normalize(weight_RD.unflatten(0, (-1, num_subcentres))[classes_S], dim=-1)
    norms_B = embeddings_BD.norm(dim=1)
    cosines_BS = torch.einsum("bd,smd->bsm", embeddings_BD / norms_B[:, None], unit_SMD).amax(2)
    slots_B = torch.searchsorted(classes_S, labels_B)
    target_B = cosines_BS.gather(1, slots_B[:, None])[:, 0]
    scale = formula.margin.scale
    kept_BS = torch.where(cosines_BS > filter_above, 0, cosines_BS)
    logits_BS = scale * formula.negatives(kept_BS, target_B, state) + weight_S.log()
    target_logits_B = scale * formula.target(target_B, norms_B, state, normals_B)
    logits_BS = logits_BS.scatter(1, slots_B[:, None], target_logits_B[:, None])
    loss = cross_entropy(logits_BS, slots_B) + formula.penalty(norms_B).mean()
    loss.backward()
    return DenseStep(
        loss=loss.detach(),
        grad_BD=embeddings_BD.grad,
        weight_RD=(weight_RD - lr * weight_RD.grad).detach(),
        state=formula.next_state(state, target_B.detach(), norms_B.detach()),
    )


def _images(num_images: int, width: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random directions of norms between 5 and 120; some labels twice."""
    generator = torch.Generator().manual_seed(seed)
    directions = normalize(torch.randn(num_images, width, dtype=torch.float64, generator=generator), dim=1)
    norms = 5 + 115 * torch.rand(num_images, 1, dtype=torch.float64, generator=generator)
    labels = torch.randint(num_classes, (num_images,), generator=generator)
    labels[1:2] = labels[0:1]
    return directions * norms, labels


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sample_rate": 0.3},
        {"sample_rate": 0.3, "correct_sampling": True},
        {"num_subcentres": 3},
        {"filter_above": 0.3},
        {"sample_rate": 0.3, "correct_sampling": True, "num_subcentres": 3, "filter_above": 0.3},
        {"sample_rate": 0.0},
    ],
    ids=["all classes", "sampled", "corrected", "sub-centres", "filtered", "all of it", "positives only"],
)
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_the_head_is_the_dense_softmax_over_the_classes_that_take_part(monkeypatch, formula, settings):
    # Chunks of 7 classes, of which the exponentials of two are kept for backward and the others computed again.
    monkeypatch.setattr(chunked, "_CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(chunked, "_MIN_CHUNK", 7)
    num_classes, width, num_images, lr = 40, 8, 12, 1e-4
    head = PartialFC(
        width,
        num_classes,
        margin=formula.margin,
        optimizer=RowSGD(momentum=0.0),
        seed=SEED,
        storage="float64",
        stored_bytes=2 * num_images * 7 * 8 + 500,
        **settings,
    )
    weight_RD, state = head.rows()["weight"].clone(), formula.state
    rate = settings.get("sample_rate", 1.0)
    for step in range(2):
        embeddings_BD, labels_B = _images(num_images, width, num_classes, seed=step)
        sample = sample_classes(labels_B, 0, num_classes, rate, SEED, step)
        drawn_weight = 1 / rate if settings.get("correct_sampling") else 1.0
        noise_keys = stream_keys(Stream.MARGIN_NOISE, SEED, step)
        dense = dense_step(
            formula,
            weight_RD,
            embeddings_BD,
            labels_B,
            state=state,
            normals_B=normals_from_bits(random_bits(noise_keys, torch.arange(num_images)), torch.float64),
            classes_S=sample.classes_S,
            weight_S=torch.ones(len(sample.classes_S)).double().masked_fill(~sample.is_positive_S, drawn_weight),
            num_subcentres=settings.get("num_subcentres", 1),
            filter_above=settings.get("filter_above", math.inf),
            lr=lr,
        )
        embeddings_BD.requires_grad_()
        loss = head(embeddings_BD, labels_B)
        loss.backward()
        head.step(lr)
        torch.testing.assert_close(loss.detach(), dense.loss, rtol=0, atol=1e-10)
        torch.testing.assert_close(embeddings_BD.grad, dense.grad_BD, rtol=0, atol=1e-10)
        torch.testing.assert_close(head.rows()["weight"], dense.weight_RD, rtol=0, atol=1e-10)
        weight_RD, state = dense.weight_RD, dense.state
        for name, value in state.items():
            assert head.margin_state[name].item() == pytest.approx(value, abs=1e-10)


class NoisyNegatives(Margin):
    """A user's margin: not a dataclass, and with noise in the negatives, which a kernel may compute twice."""

    touches_only_target = False

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def negative_logits(self, cosines_GS: Tensor, targets: Targets) -> Tensor:
        return self.scale * cosines_GS * (1 + 0.1 * targets.normals())[:, None]

    def logit_bound(self) -> float:
        return 2 * self.scale


@pytest.mark.parametrize("stored_bytes", [0, 1 << 20], ids=["computed again", "stored"])
def test_backward_sees_the_noise_that_forward_saw(stored_bytes):
    head = PartialFC(
        8,
        40,
        margin=NoisyNegatives(SCALE),
        optimizer=RowSGD(momentum=0.0),
        seed=SEED,
        storage="float64",
        stored_bytes=stored_bytes,
    )
    embeddings_BD, labels_B = _images(12, 8, 40, seed=0)
    normals_B = normals_from_bits(
        random_bits(stream_keys(Stream.MARGIN_NOISE, SEED, 0), torch.arange(12)), torch.float64
    )
    formula = Formula(
        head.margin, lambda c, n, s, z: c, negatives=lambda cosines, c, s: cosines * (1 + 0.1 * normals_B)[:, None]
    )
    dense = dense_step(
        formula,
        head.rows()["weight"],
        embeddings_BD,
        labels_B,
        state={},
        normals_B=normals_B,
        classes_S=torch.arange(40),
        weight_S=torch.ones(40).double(),
        num_subcentres=1,
        filter_above=math.inf,
        lr=1e-4,
    )
    embeddings_BD.requires_grad_()
    head(embeddings_BD, labels_B).backward()
    head.step(1e-4)
    torch.testing.assert_close(embeddings_BD.grad, dense.grad_BD, rtol=0, atol=1e-10)
    torch.testing.assert_close(head.rows()["weight"], dense.weight_RD, rtol=0, atol=1e-10)


@every_margin
@pytest.mark.parametrize("storage", ["float32", "float64"])
def test_a_class_without_any_negative_costs_nothing_but_the_penalty(margin, storage):
    # At cosine -1 some targets' logits lie below -88, where 1 / exp(logit) leaves float32; the softmax is still 1.
    head = PartialFC(4, 1, margin=margin, storage=storage)
    embeddings_BD = (-head.rows()["weight"]).clone().requires_grad_()
    head(embeddings_BD, torch.tensor([0])).backward()
    head.step(lr=0.1)
    assert embeddings_BD.grad.isfinite().all()
    assert head.rows()["weight"].isfinite().all()


# ---- over ranks -----------------------------------------------------------------------------------------------------


class NormMargin(Margin):
    """A user's margin that is not a number for padding, whose norm is 0."""

    scale = SCALE

    def target_logits(self, targets: Targets) -> Tensor:
        return self.scale * targets.cosines_G * (1 - 1 / targets.norms_G)


def _five_steps(margin: Margin, settings: dict[str, Any], num_labels: int) -> dict[str, Any]:
    """Losses, gradients of the rank's own images, its centres, the margin's state: after 5 steps of uneven batches."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = RowSGD(momentum=0.9, weight_decay=0.01)
    head = PartialFC(
        8, 23, margin=margin, optimizer=optimizer, seed=SEED, storage="float64", gradient_scale="sum", **settings
    )
    losses, grads, states = [], [], []
    for step in range(5):
        embeddings_GD, labels_G = _images(11, 8, num_labels, seed=step)
        # Cuts at random places: some rank brings many images, another few or none.
        cuts = torch.randint(12, (size - 1,), generator=torch.Generator().manual_seed(step)).sort().values.tolist()
        mine = slice([0, *cuts][rank], [*cuts, 11][rank])
        embeddings_BD = embeddings_GD[mine].clone().requires_grad_()
        loss = head(embeddings_BD, labels_G[mine])
        loss.backward()
        head.step(lr=1e-3)
        losses.append(loss.item())
        grads.append(embeddings_BD.grad)
        states.append({name: head.margin_state[name].item() for name in margin.initial_state})
    return {"losses": losses, "grads": grads, "rows": head.rows()["weight"], "states": states}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("margin", "settings", "num_labels"),
    [
        (AdaFace(scale=SCALE, momentum=0.3), {}, 23),
        (CurricularFace(scale=SCALE, momentum=0.3), {"sample_rate": 0.4}, 23),
        (ElasticFace(scale=SCALE, deviation=0.1), {"sample_rate": 0.4, "correct_sampling": True}, 23),
        (ArcFace(scale=SCALE), {"num_subcentres": 3}, 23),
        (ArcFace(scale=SCALE), {"sample_rate": 0.0}, 5),
        (NoisyNegatives(SCALE), {}, 23),
        (NormMargin(), {}, 23),
    ],
    ids=[
        "AdaFace",
        "CurricularFace sampled",
        "ElasticFace sampled",
        "sub-centres",
        "all classes of the step on rank 0",
        "own margin with noise",
        "own margin that is not a number for padding",
    ],
)
def test_a_head_cut_over_ranks_is_the_same_head(run_ranks, margin, settings, num_labels, world_size):
    whole = _five_steps(margin, settings, num_labels)
    ranks = run_ranks(world_size, _five_steps, margin, settings, num_labels)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(whole["losses"], abs=1e-10)
        assert rank["states"] == ranks[0]["states"], "the state differs between ranks"
    for own, state in zip(ranks[0]["states"], whole["states"], strict=True):
        assert own == pytest.approx(state, abs=1e-10)
    for step, grad_GD in enumerate(whole["grads"]):
        parts = torch.cat([rank["grads"][step] for rank in ranks])
        torch.testing.assert_close(parts, grad_GD, rtol=0, atol=1e-10)
    rows = torch.cat([rank["rows"] for rank in ranks])
    torch.testing.assert_close(rows, whole["rows"], rtol=0, atol=1e-10)


BOTH_GRADIENTS = ["ArcFace", "ArcFace straight-through", "CombinedMargin m1 m2 m3", "CombinedMargin straight-through"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", BOTH_GRADIENTS)
def test_both_gradients_are_those_of_the_dense_matrix_on_any_number_of_ranks(run_ranks, name, world_size):
    """Five steps of momentum SGD in float64, against autograd through one matrix of all logits."""
    formula, momentum, decay = FORMULAS[name], 0.9, 0.01
    ranks = run_ranks(world_size, _five_steps, formula.margin, {}, 23)
    weight_RD = PartialFC(8, 23, margin=formula.margin, seed=SEED, storage="float64").rows()["weight"].clone()
    momentum_RD = torch.zeros_like(weight_RD)
    for step in range(5):
        embeddings_GD, labels_G = _images(11, 8, 23, seed=step)
        dense = dense_step(
            formula,
            weight_RD,
            embeddings_GD,
            labels_G,
            state={},
            normals_B=torch.zeros(11),
            classes_S=torch.arange(23),
            weight_S=torch.ones(23).double(),
            num_subcentres=1,
            filter_above=math.inf,
            lr=-1.0,
        )
        grad_RD = dense.weight_RD - weight_RD + decay * weight_RD
        momentum_RD = momentum * momentum_RD + grad_RD
        weight_RD = weight_RD - 1e-3 * momentum_RD
        for rank in ranks:
            assert rank["losses"][step] == pytest.approx(dense.loss.item(), abs=1e-10)
        grads = torch.cat([rank["grads"][step] for rank in ranks])
        torch.testing.assert_close(grads, dense.grad_BD, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat([rank["rows"] for rank in ranks]), weight_RD, rtol=0, atol=1e-10)


def test_recipes_name_every_margin_of_the_table_and_no_other():
    with pytest.raises(ConfigError, match=r"'arcfac'; expected one of softmax, .* of your own; did you mean arcface\?"):
        build_margin(HeadConfig(margin="arcfac"))
    for name, (margin, size_field) in MARGINS.items():
        built = build_margin(HeadConfig(margin=name, margin_size=None if size_field is None else 0.3))
        assert type(built) is margin and (size_field is None or getattr(built, size_field) == 0.3)


OWN_MARGINS = """
from dataclasses import dataclass
from megaclass import Margin

@dataclass(frozen=True, kw_only=True)
class SquaredMargin(Margin):
    scale: float = 64.0
    margin: float = 0.3

    def target_logits(self, targets):
        return self.scale * (targets.cosines_G - self.margin * (1 - targets.cosines_G) ** 2)

class NoMargin:
    pass
"""


def test_a_class_in_the_working_folder_is_a_margin_of_recipes(tmp_path, monkeypatch):
    (tmp_path / "squared_margins.py").write_text(OWN_MARGINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = ["head.margin=squared_margins:SquaredMargin", "head.margin_size=0.2", "head.scale=30"]
    margin = build_margin(load_config(Path("demo"), given).head)
    assert (type(margin).__name__, vars(margin)) == ("SquaredMargin", {"scale": 30.0, "margin": 0.2})
    with pytest.raises(ConfigError, match="not a dataclass derived from"):
        build_margin(HeadConfig(margin="squared_margins:NoMargin"))
    with pytest.raises(ConfigError, match=r"mymargins.py in this folder with a class SquaredMargin"):
        build_margin(HeadConfig(margin="squared_margins:Gone"))


def test_a_line_in_the_table_makes_a_margin_of_recipes(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Half(Margin):
        scale: float = 64.0
        size: float = 0.5

    monkeypatch.setitem(MARGINS, "half", (Half, "size"))
    head = load_config(Path("demo"), ["head.margin=half", "head.margin_size=0.1"]).head
    assert build_margin(head) == Half(scale=head.scale, size=0.1)
