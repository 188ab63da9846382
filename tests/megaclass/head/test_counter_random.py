"""Random numbers keyed by what they are for: as good as random, and the same wherever they are drawn."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from megaclass import PartialFC
from megaclass.head.counter_random import (
    normals_from_bits,
    random_bits,
    random_bits_rows,
    round_stochastically,
    stream_keys,
)
from megaclass.keyed_random import Stream

KEYS = stream_keys(Stream.DRAW_NEGATIVES, 0, 0)
MILLION = torch.arange(1_000_000)


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_every_byte_of_the_bits_is_uniform():
    bytes_N4 = random_bits(KEYS, MILLION).view(torch.uint8).reshape(-1, 4)
    for place in range(4):
        counts = torch.bincount(bytes_N4[:, place], minlength=256).double()
        expected = len(MILLION) / 256
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        # 255 degrees of freedom: mean 255, variance 510. Indices are distinct, so it cannot be much too even either.
        assert abs(chi_square - 255) < 5 * math.sqrt(510)


@pytest.mark.parametrize("num_columns", [1, 8])
def test_every_byte_of_the_bits_of_rows_is_uniform(num_columns):
    bytes_N = random_bits_rows(KEYS, torch.arange(100_000), num_columns).view(torch.uint8).flatten()
    counts = torch.bincount(bytes_N, minlength=256).double()
    expected = len(bytes_N) / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 5 * math.sqrt(510)


def test_each_bit_of_the_index_turns_each_bit_of_the_number_half_the_time():
    num_samples = 20_000
    indices = random_bits(stream_keys(9), torch.arange(num_samples))
    base = random_bits(KEYS, indices)
    places = torch.arange(32, dtype=torch.int32)
    for place in range(32):
        flip = torch.tensor(1 << place).to(torch.int32)
        turned = base ^ random_bits(KEYS, indices ^ flip)
        shares = ((turned[:, None] >> places) & 1).double().mean(0)
        assert (shares - 0.5).abs().max().item() < 5 * 0.5 / math.sqrt(num_samples)


@pytest.mark.parametrize(
    "other", [(Stream.DRAW_NEGATIVES, 0, 1), (Stream.DRAW_NEGATIVES, 1, 0), (Stream.MARGIN_NOISE, 0, 0)]
)
def test_another_step_seed_or_purpose_gives_other_bits(other):
    turned = random_bits(KEYS, MILLION) ^ random_bits(stream_keys(*other), MILLION)
    counts = ((turned[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).double().mean(0)
    assert (counts - 0.5).abs().max().item() < 5 * 0.5 / math.sqrt(len(MILLION))


def test_keys_of_all_purposes_seeds_and_steps_are_distinct():
    purposes = (Stream.INITIAL_CENTRES, Stream.DRAW_NEGATIVES, Stream.MARGIN_NOISE, Stream.ROUND_WEIGHTS)
    keys = [stream_keys(p, seed, step) for p in purposes for seed in range(-5, 20) for step in range(500)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= half < 2**31 for pair in keys for half in pair)


def test_bits_depend_on_the_index_and_not_on_the_block_it_is_drawn_in():
    whole = random_bits(KEYS, torch.arange(1000))
    assert torch.equal(random_bits(KEYS, torch.arange(300, 700)), whole[300:700])
    rows = random_bits_rows(KEYS, torch.arange(1000), 5)
    assert torch.equal(random_bits_rows(KEYS, torch.arange(300, 700), 5), rows[300:700])
    assert torch.equal(random_bits_rows(KEYS, torch.arange(1000), 3), rows[:, :3])


def _lowbias32(x: int) -> int:
    """Wellons' hash in unsigned arithmetic, https://github.com/skeeto/hash-prospector."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def test_the_bits_are_those_of_unsigned_arithmetic():
    first, second = (key & 0xFFFFFFFF for key in KEYS)
    indices = [0, 1, 2, 12_345_678, 2**31 - 1, 2**31, 2**32 - 1]
    bits = [b & 0xFFFFFFFF for b in random_bits(KEYS, torch.tensor(indices)).tolist()]
    assert bits == [_lowbias32((_lowbias32(i ^ first) + second) & 0xFFFFFFFF) for i in indices]
    rows = random_bits_rows(KEYS, torch.tensor(indices), 3)
    columns = [_lowbias32(column ^ second) for column in range(3)]
    assert [[b & 0xFFFFFFFF for b in row] for row in rows.tolist()] == [
        [_lowbias32(_lowbias32(i ^ first) ^ column) for column in columns] for i in indices
    ]


def test_the_keys_are_these_for_ever():
    # Runs are repeated and checkpoints resumed: a change here changes the draws of every run there was.
    assert stream_keys(1, 2, 3) == (-1922286776, -2010309940)


def test_drawing_does_not_change_the_indices_it_is_given():
    indices = torch.arange(10, dtype=torch.int32)
    random_bits(KEYS, indices)
    random_bits_rows(KEYS, indices, 4)
    assert indices.tolist() == list(range(10))


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_no_two_rows_are_equal():
    # Rows with the same key would agree in every column; here they differ even in the first.
    assert len(random_bits_rows(KEYS, torch.arange(200_000), 1).unique()) == 200_000


@pytest.mark.parametrize("distance", [1, 2, 1024])
def test_initial_centres_of_different_classes_point_in_unrelated_directions(distance):
    width = 64
    unit_RD = normalize(PartialFC(width, 20_000, storage="float64").rows()["weight"])
    cosines = (unit_RD[distance:] * unit_RD[:-distance]).sum(1)
    # Mean 0, variance 1 / D; the variance of a squared cosine is 2 / D^2 * (D - 1) / (D + 2).
    assert abs(cosines.mean().item()) < 5 / math.sqrt(width * len(cosines))
    squares_deviation = math.sqrt(2 * (width - 1) / (width + 2)) / width
    assert abs(cosines.square().mean().item() - 1 / width) < 5 * squares_deviation / math.sqrt(len(cosines))
    assert cosines.abs().max().item() < 6 / math.sqrt(width)


def test_columns_of_the_initial_centres_are_unrelated():
    weight_RD = PartialFC(32, 20_000, storage="float64").rows()["weight"]
    correlations = torch.corrcoef(weight_RD.T).fill_diagonal_(0)
    assert correlations.abs().max().item() < 5.5 / math.sqrt(len(weight_RD))


# ---- normal numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_have_the_moments_of_the_normal_distribution(dtype):
    normals = normals_from_bits(random_bits(KEYS, MILLION), dtype).double()
    n = len(normals)
    assert abs(normals.mean().item()) < 5 / math.sqrt(n)
    assert abs(normals.square().mean().item() - 1) < 5 * math.sqrt(2 / n)
    assert abs(normals.pow(3).mean().item()) < 5 * math.sqrt(15 / n)
    # E z^4 = 3, and its variance is E z^8 - 9 = 105 - 9.
    assert abs(normals.pow(4).mean().item() - 3) < 5 * math.sqrt(96 / n)
    # One in 31,574 lies beyond 4: tails are there.
    beyond = (normals.abs() > 4).sum().item()
    assert abs(beyond - n * 6.334e-5) < 5 * math.sqrt(n * 6.334e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_bits_give_an_infinite_number(dtype):
    extremes = torch.tensor([-(2**31), 2**31 - 1, 0, -1], dtype=torch.int32)
    normals = normals_from_bits(extremes, dtype)
    assert normals.isfinite().all()
    assert normals[0].item() == pytest.approx(-normals[1].item(), rel=1e-6)
    assert normals[0].item() < -5


# ---- stochastic rounding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-3, 2.0**-130, -1e30], ids=str)
def test_rounding_is_right_on_average(value, share):
    num_draws = 100_000
    low = torch.tensor(value).to(torch.bfloat16)
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)
    between = low.double() + share * (high.double() - low.double())
    # The float32 nearest to it; its place between the two is what the mean must show.
    values = between.float().expand(num_draws).contiguous()
    place = ((values[0].double() - low.double()) / (high.double() - low.double())).item()
    rounded = round_stochastically(values, random_bits(KEYS, torch.arange(num_draws)))
    assert ((rounded == low) | (rounded == high)).all(), "one of the two neighbours"
    deviation = math.sqrt(place * (1 - place) / num_draws)
    assert abs((rounded == high).double().mean().item() - place) < 5 * deviation


def test_what_bfloat16_holds_is_not_rounded():
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, 3.3895313892515355e38, 0.15625])
    for bits in (0, -1, 0xFFFF, 0x7FFF):
        rounded = round_stochastically(exact, torch.full_like(exact, bits, dtype=torch.int32))
        assert torch.equal(rounded.float().view(torch.int32), exact.view(torch.int32)), "to the bit, signs of zero too"


def test_rounding_never_moves_a_value_by_a_bfloat16_step_or_more():
    values = normals_from_bits(random_bits(KEYS, torch.arange(100_000)), torch.float32)
    rounded = round_stochastically(values, random_bits(stream_keys(Stream.ROUND_WEIGHTS), torch.arange(100_000)))
    # bfloat16 keeps 7 bits behind the leading one.
    steps = torch.exp2(values.abs().log2().floor() - 7)
    assert ((rounded.float() - values).abs() < steps).all()


def test_infinities_and_nan_stay_what_they_are():
    nan_of_low_bits = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), nan_of_low_bits])
    rounded = round_stochastically(values, torch.full((4,), -1, dtype=torch.int32))
    assert rounded[:2].tolist() == [math.inf, -math.inf]
    assert rounded[2:].isnan().all()
