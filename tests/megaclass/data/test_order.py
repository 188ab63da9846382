"""The order of images: a pure function of (seed, epoch, position)."""

import numpy as np
import pytest

from megaclass.data.order import ClassOrder, ImageOrder, rank_batch, shuffled
from megaclass.errors import DataError
from megaclass_launch.even_parts import even_part


def epoch_order(num_images, seed, epoch):
    return shuffled(np.arange(num_images), num_images, seed, epoch)


@pytest.mark.parametrize("num_images", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 10_007])
def test_an_epoch_shows_every_image_exactly_once(num_images):
    assert np.array_equal(np.sort(epoch_order(num_images, seed=3, epoch=5)), np.arange(num_images))


def test_epochs_and_seeds_give_unrelated_orders():
    orders = [epoch_order(5000, seed, epoch) for seed in (0, 1, 2**63) for epoch in (0, 1)]
    for number, first in enumerate(orders):
        for second in orders[number + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.06
            assert np.mean(first == second) < 0.01
        assert abs(np.corrcoef(first, np.arange(5000))[0, 1]) < 0.06


def test_any_position_can_be_asked_alone():
    order = epoch_order(1234, seed=7, epoch=2)
    assert [int(shuffled(np.array([position]), 1234, 7, 2)[0]) for position in (0, 77, 1233)] == order[
        [0, 77, 1233]
    ].tolist()


def test_forty_million_images_cost_nothing_to_start():
    order = ImageOrder(num_images=40_000_000, global_batch=256)
    assert len(np.unique(order.batch(epoch=9, step=order.steps_per_epoch - 1))) == 256


def test_ranks_share_a_global_batch_that_does_not_depend_on_their_number():
    order = ImageOrder(num_images=1000, global_batch=50, seed=1)
    whole = order.batch(epoch=1, step=3)
    for world_size in (1, 2, 3, 7, 8):
        parts = [rank_batch(order, 1, 3, rank, world_size) for rank in range(world_size)]
        assert np.array_equal(np.concatenate(parts), whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


LABELS = np.random.default_rng(1).integers(0, 90, 997)
ORDERS = {
    "uniform over images": lambda: ImageOrder(num_images=997, global_batch=64, seed=5),
    "the last batch kept": lambda: ImageOrder(num_images=997, global_batch=64, seed=5, keep_last=True),
    "uniform over classes": lambda: ClassOrder(LABELS, global_batch=64, seed=5),
    "four images a class": lambda: ClassOrder(LABELS, global_batch=64, seed=5, images_per_class=4),
}


@pytest.mark.parametrize("num_restarts", [200, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS.keys())
def test_restarts_with_any_number_of_ranks_go_on_with_the_same_images(make, num_restarts):
    rng = np.random.default_rng(0)
    order = make()
    uninterrupted = [order.batch(epoch, step) for epoch in range(3) for step in range(order.steps_per_epoch)]
    for _ in range(num_restarts):
        start, world_size = int(rng.integers(len(uninterrupted))), int(rng.integers(1, 9))
        restarted = make()
        # Of the remaining order, the next step and any later one, on any rank.
        for position in {start, int(rng.integers(start, len(uninterrupted)))}:
            rank = int(rng.integers(world_size))
            indices = rank_batch(restarted, *divmod(position, order.steps_per_epoch), rank, world_size)
            expected = uninterrupted[position]
            assert np.array_equal(indices, expected[even_part(len(expected), rank, world_size)])


@pytest.mark.parametrize(("keep_last", "num_steps", "num_seen"), [(False, 3, 96), (True, 4, 100)])
def test_the_last_incomplete_batch_is_kept_or_dropped_by_choice(keep_last, num_steps, num_seen):
    order = ImageOrder(num_images=100, global_batch=32, keep_last=keep_last)
    assert order.steps_per_epoch == num_steps
    seen = np.concatenate([order.batch(0, step) for step in range(num_steps)])
    assert len(np.unique(seen)) == len(seen) == num_seen


def test_uneven_parts_go_to_the_first_ranks():
    order = ImageOrder(num_images=10, global_batch=10)
    assert [len(rank_batch(order, 0, 0, rank, 4)) for rank in range(4)] == [3, 3, 2, 2]


@pytest.mark.parametrize("num_images", [65, 66, 67, 95, 96, 127, 128, 129, 130, 191, 192, 193, 250])
def test_a_kept_last_batch_never_leaves_a_rank_with_one_image(num_images):
    order = ImageOrder(num_images=num_images, global_batch=64, keep_last=True)
    batches = [order.batch(0, step) for step in range(order.steps_per_epoch)]
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(num_images))
    assert min(map(len, batches)) == order.batch_size(order.steps_per_epoch - 1) >= 32 and max(map(len, batches)) <= 64
    # Up to sixteen ranks, a quarter of the batch each at least.
    assert min(len(rank_batch(order, 0, step, 15, 16)) for step in range(order.steps_per_epoch)) >= 2


def test_classes_come_equally_often_however_many_images_they_have():
    labels = np.repeat([0, 1, 2, 5], [100, 3, 1, 24])
    order = ClassOrder(labels, global_batch=16, seed=2)
    assert order.steps_per_epoch == 8
    drawn = labels[np.concatenate([order.batch(epoch, step) for epoch in range(2) for step in range(8)])]
    assert [int((drawn == label).sum()) for label in (0, 1, 2, 5)] == [64, 64, 64, 64]


def test_no_image_of_a_class_comes_twice_before_all_of_it_came_once():
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1], [60, 7]))
    order = ClassOrder(labels, global_batch=6, seed=2)
    drawn = np.concatenate([order.batch(epoch, step) for epoch in range(2) for step in range(order.steps_per_epoch)])
    rare = drawn[labels[drawn] == 1]
    for start in range(0, len(rare) - 7, 7):
        assert len(set(rare[start : start + 7])) == 7
    assert not np.array_equal(rare[:7], rare[7:14])


def test_a_batch_of_k_images_a_class_holds_k_different_images_of_each():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(30), 5))
    order = ClassOrder(labels, global_batch=24, seed=9, images_per_class=4)
    for step in range(order.steps_per_epoch):
        batch = order.batch(3, step)
        assert len(np.unique(batch)) == 24
        assert sorted(np.unique(labels[batch], return_counts=True)[1]) == [4] * 6
    with pytest.raises(DataError, match="cannot be divided into groups of 5 images of a class: use a multiple of 5"):
        ClassOrder(labels, global_batch=24, images_per_class=5)
