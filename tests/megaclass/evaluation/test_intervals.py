"""Confidence intervals against sums over the binomial distribution and against repeated experiments."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from megaclass.evaluation.protocols.intervals import rank_interval, tar_interval, wilson_interval


@pytest.mark.parametrize(("num_trials", "share"), [(100, 0.1), (50, 0.5), (1000, 0.01), (300, 0.001)])
def test_a_count_lies_in_its_interval_as_often_as_promised_and_a_narrower_one_would_not_do(num_trials, share):
    chances = [
        math.exp(
            math.lgamma(num_trials + 1)
            - math.lgamma(k + 1)
            - math.lgamma(num_trials - k + 1)
            + k * math.log(share)
            + (num_trials - k) * math.log1p(-share)
        )
        for k in range(num_trials + 1)
    ]
    low, high = rank_interval(num_trials, share)
    tail = 0.0125
    assert sum(chances[:low]) <= tail
    assert sum(chances[high + 1 :]) <= tail
    assert sum(chances[: low + 1]) > tail
    assert sum(chances[high:]) > tail


def test_wilson_of_a_hand_worked_case():
    # 8 of 10 at z = 2: middle (8 + 2) / 14, half 2 / 14 * sqrt(10 * 0.16 + 1).
    low, high = wilson_interval(8, 10, z=2.0)
    assert low == pytest.approx(10 / 14 - 2 / 14 * math.sqrt(2.6))
    assert high == pytest.approx(10 / 14 + 2 / 14 * math.sqrt(2.6))
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == 1


@pytest.mark.parametrize(("num_pairs", "far"), [(1000, 1e-1), (1000, 1e-2), (3000, 1e-3)])
def test_the_true_rate_lies_in_the_interval_in_95_of_100_experiments(num_pairs, far):
    # Distances of same pairs ~ N(0, 1), of different pairs ~ N(3, 1): the true TAR is known.
    true_tar = NormalDist().cdf(NormalDist(3, 1).inv_cdf(far))
    rng = np.random.default_rng(0)
    num_right = 0
    for _ in range(200):
        same, different = np.sort(rng.normal(size=num_pairs)), np.sort(rng.normal(3, 1, size=num_pairs))
        low, high = tar_interval(same, different, far)
        num_right += low <= true_tar <= high
    assert num_right >= 0.93 * 200


def test_more_pairs_make_it_narrower():
    rng = np.random.default_rng(0)
    widths = []
    for num_pairs in (300, 3000, 30000):
        low, high = tar_interval(np.sort(rng.normal(size=num_pairs)), np.sort(rng.normal(3, 1, size=num_pairs)), 0.01)
        widths.append(high - low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]
