"""The draw of classes: what it depends on, how many it takes, and that none is lost."""

import math

import pytest
import torch
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.centres import class_range
from megaclass.head.sampling import is_drawn, rate_of_negatives, rate_schedule, sample_capacity, sample_classes

CPU = torch.device("cpu")
NO_LABELS = torch.zeros(0, dtype=torch.int64)


def drawn(num_classes: int, rate: float, *, seed: int = 0, step: int = 0) -> Tensor:
    return is_drawn(0, num_classes, rate, seed, step, CPU)


# ---- what the draw depends on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_classes", [1003, 140_000], ids=["one block", "several blocks"])
def test_the_same_classes_take_part_however_they_are_cut(num_classes, world_size):
    labels_G = torch.tensor([0, 17, 1002, 500, 500])
    whole = sample_classes(labels_G, 0, num_classes, 0.1, seed=7, step=42)
    parts, is_positive = [], []
    for rank in range(world_size):
        own = class_range(num_classes, rank, world_size)
        sample = sample_classes(labels_G, own.start, len(own), 0.1, seed=7, step=42)
        parts.append(sample.classes_S + own.start)
        is_positive.append(sample.is_positive_S)
    assert torch.equal(torch.cat(parts), whole.classes_S)
    assert torch.equal(torch.cat(is_positive), whole.is_positive_S)


def test_seed_and_step_alone_change_the_draw():
    assert torch.equal(drawn(10_000, 0.1, seed=1, step=2), drawn(10_000, 0.1, seed=1, step=2))
    assert not torch.equal(drawn(10_000, 0.1, seed=1, step=2), drawn(10_000, 0.1, seed=1, step=3))
    assert not torch.equal(drawn(10_000, 0.1, seed=1, step=2), drawn(10_000, 0.1, seed=2, step=2))
    assert not torch.equal(drawn(10_000, 0.1, seed=1, step=2), drawn(10_000, 0.1, seed=2, step=1))


def test_a_larger_rate_adds_classes_and_takes_none_away():
    smaller, larger = drawn(100_000, 0.1), drawn(100_000, 0.2)
    assert (larger | ~smaller).all()


# ---- how many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("step", range(5))
def test_the_share_of_drawn_classes_is_the_rate(rate, step):
    num_classes = 300_000
    deviation = math.sqrt(num_classes * rate * (1 - rate))
    assert abs(drawn(num_classes, rate, step=step).sum().item() - rate * num_classes) < 5 * deviation


def test_with_the_positives_counted_the_rate_is_the_share_of_all_classes():
    """1,013 classes, 64 images, r = 0.1: 101 classes take part on average, and 15 % if r counts the negatives alone."""
    labels = [torch.randint(0, 1013, (64,), generator=torch.Generator().manual_seed(step)) for step in range(200)]

    def mean_share(is_counted: bool) -> float:
        total = 0
        for step, labels_G in enumerate(labels):
            rate = float(rate_of_negatives(labels_G, 1013, 0.1)) if is_counted else 0.1
            total += len(sample_classes(labels_G, 0, 1013, rate, seed=0, step=step).classes_S)
        return total / len(labels) / 1013

    # One class in a thousand: the standard error of 200 steps of about 40 drawn classes is 0.0004.
    assert abs(mean_share(True) - 0.1) < 0.0015
    assert 0.15 < mean_share(False) < 0.16


def test_the_rate_of_the_negatives_counts_each_positive_once_and_no_padding():
    labels_G = torch.tensor([5, 2, 5, -1, -1, 0])
    assert rate_of_negatives(labels_G, 103, 0.5).item() == (0.5 * 103 - 3) / 100
    assert rate_of_negatives(labels_G, 103, 0.01).item() == 0
    assert rate_of_negatives(torch.tensor([0, 1]), 2, 0.5).item() == 0
    assert rate_of_negatives(NO_LABELS, 100, 0.25).item() == 0.25


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.999])
def test_a_rate_on_the_device_draws_the_same_classes(rate):
    on_device = is_drawn(3, 100_000, torch.tensor(rate, dtype=torch.float64), 1, 2, CPU)
    assert torch.equal(on_device, is_drawn(3, 100_000, rate, 1, 2, CPU))


def test_rate_0_draws_none_and_rate_1_all():
    assert not drawn(200_000, 0.0).any()
    assert drawn(200_000, 1.0).all()


def test_rate_0_leaves_the_positives():
    sample = sample_classes(torch.tensor([5, 2, 5, -1]), 0, 1000, 0.0, seed=0, step=0)
    assert sample.classes_S.tolist() == [2, 5]
    assert sample.is_positive_S.all()


def test_every_class_is_drawn_at_the_rate_over_the_steps():
    num_steps, num_classes, rate = 2000, 500, 0.1
    counts_C = torch.stack([drawn(num_classes, rate, step=step) for step in range(num_steps)]).sum(0)
    deviation = math.sqrt(num_steps * rate * (1 - rate))
    assert (counts_C - num_steps * rate).abs().max().item() < 5 * deviation


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("distance", [1, 2, 1000])
def test_the_draws_of_two_steps_know_nothing_of_each_other(rate, distance):
    num_classes = 200_000
    # Each class is in both with probability rate^2, independently of the others.
    expected, share = rate**2 * num_classes, rate**2
    both = (drawn(num_classes, rate, step=10) & drawn(num_classes, rate, step=10 + distance)).sum().item()
    assert abs(both - expected) < 5 * math.sqrt(num_classes * share * (1 - share))


@pytest.mark.parametrize("distance", [1, 2, 64, 4096])
def test_the_draws_of_neighbouring_classes_know_nothing_of_each_other(distance):
    drawn_C, rate = drawn(300_000, 0.1), 0.1
    both = (drawn_C[distance:] & drawn_C[:-distance]).sum().item()
    num_pairs = len(drawn_C) - distance
    # Pairs overlap, which adds covariance: var = n (p - p^2) + 2 n (rate^3 - rate^4), p = rate^2.
    variance = num_pairs * (rate**2 - rate**4 + 2 * (rate**3 - rate**4))
    assert abs(both - rate**2 * num_pairs) < 5 * math.sqrt(variance)


# ---- positives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("capacity", [None, 900])
def test_positives_are_always_there_and_the_list_rises_without_repetition(rate, capacity):
    start, num_local = 300, 900
    for step in range(20):
        labels_G = torch.randint(-1, 2000, (64,), generator=torch.Generator().manual_seed(step))
        sample = sample_classes(labels_G, start, num_local, rate, 0, step, capacity)
        classes = sample.classes_S[sample.classes_S < num_local]
        here = labels_G[(labels_G >= start) & (labels_G < start + num_local)].unique() - start
        assert (classes.diff() > 0).all()
        assert torch.isin(here, classes).all()
        assert torch.equal(classes[sample.is_positive_S[: len(classes)]], here)
        expected = is_drawn(start, num_local, rate, 0, step, CPU).index_fill_(0, here, True)
        assert torch.equal(classes, expected.nonzero().flatten())


# ---- a fixed capacity -----------------------------------------------------------------------------------------------


def test_with_a_capacity_the_same_classes_come_first_and_padding_follows():
    labels_G = torch.tensor([3, 999, -1])
    free = sample_classes(labels_G, 0, 1000, 0.1, 0, 0)
    sample = sample_classes(labels_G, 0, 1000, 0.1, 0, 0, capacity=300)
    num_drawn = len(free.classes_S)
    assert sample.classes_S.shape == (300,)
    assert torch.equal(sample.classes_S[:num_drawn], free.classes_S)
    assert (sample.classes_S[num_drawn:] == 1000).all()
    assert torch.equal(sample.is_positive_S[:num_drawn], free.is_positive_S)
    assert not sample.is_positive_S[num_drawn:].any()
    assert not sample.overflowed


def test_a_capacity_that_is_too_small_by_one_is_flagged_and_one_that_fits_is_not():
    num_drawn = len(sample_classes(NO_LABELS, 0, 1000, 0.1, 0, 0).classes_S)
    assert not sample_classes(NO_LABELS, 0, 1000, 0.1, 0, 0, capacity=num_drawn).overflowed
    tight = sample_classes(NO_LABELS, 0, 1000, 0.1, 0, 0, capacity=num_drawn - 1)
    assert tight.overflowed
    assert tight.classes_S.shape == (num_drawn - 1,)


def test_without_a_capacity_nothing_overflows():
    assert not sample_classes(NO_LABELS, 0, 1000, 1.0, 0, 0).overflowed


def test_the_capacity_is_never_exceeded_in_1000_random_draws():
    generator = torch.Generator().manual_seed(0)
    for step in range(1000):
        num_local = int(torch.randint(1, 5000, (), generator=generator))
        rate = float(torch.rand((), generator=generator)) ** 3
        labels_G = torch.randint(num_local, (int(torch.randint(64, (), generator=generator)),), generator=generator)
        capacity = sample_capacity(num_local, rate, len(labels_G))
        assert capacity <= num_local
        assert not sample_classes(labels_G, 0, num_local, rate, 0, step, capacity).overflowed


def test_the_capacity_of_a_large_draw_is_close_to_its_mean():
    # 0.1 * 10M = 1,000,000, plus 8 * sqrt(900,000) = 7,590, plus the positives
    assert sample_capacity(10_000_000, 0.1, 4096) == 1_000_000 + 7_590 + 4096
    assert sample_capacity(1000, 0.0, 64) == 64
    assert sample_capacity(1000, 1.0, 64) == 1000


# ---- schedules ------------------------------------------------------------------------------------------------------


def test_one_rate_holds_for_ever():
    assert [rate_schedule(0.1).at(step) for step in (0, 1, 10**9)] == [0.1, 0.1, 0.1]
    assert rate_schedule(1).at(0) == 1.0


def test_a_schedule_changes_at_the_steps_it_names():
    schedule = rate_schedule([(0, 0.1), (100, 0.5), (200, 1.0)])
    assert [schedule.at(step) for step in (0, 99, 100, 199, 200, 10**9)] == [0.1, 0.1, 0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("sample_rate", [[], [(1, 0.1)], [(0, 0.1), (0, 0.2)], [(0, 0.1), (50, 0.5), (20, 1.0)]])
def test_a_schedule_that_does_not_begin_at_0_and_rise_is_refused(sample_rate):
    with pytest.raises(HeadError, match=r"a list of \(first step, rate\) that begins at step 0 and rises"):
        rate_schedule(sample_rate)


@pytest.mark.parametrize(
    ("sample_rate", "text"),
    [
        (1.5, r"sample_rate is 1.5 from step 0 on; it must lie in \[0, 1\]"),
        (-0.1, r"sample_rate is -0.1 from step 0 on"),
        (math.nan, r"sample_rate is nan from step 0 on"),
        ([(0, 0.1), (80, 2.0)], r"sample_rate is 2.0 from step 80 on"),
    ],
)
def test_a_rate_outside_its_range_is_named_with_its_step(sample_rate, text):
    with pytest.raises(HeadError, match=text):
        rate_schedule(sample_rate)
