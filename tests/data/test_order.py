"""The order of images: a pure function of (seed, epoch, position)."""

import numpy as np
import pytest

from megaclass.data.order import Order, epoch_order, rank_part, shuffled


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
    order = Order(num_images=40_000_000, global_batch=256)
    assert len(np.unique(order.batch(epoch=9, step=order.steps_per_epoch - 1))) == 256


def test_ranks_share_a_global_batch_that_does_not_depend_on_their_number():
    order = Order(num_images=1000, global_batch=50, seed=1)
    whole = order.batch(epoch=1, step=3)
    for world_size in (1, 2, 3, 7, 8):
        parts = [order.rank_batch(1, 3, rank, world_size) for rank in range(world_size)]
        assert np.array_equal(np.concatenate(parts), whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_thousand_restarts_at_random_steps_go_on_with_the_same_images():
    rng = np.random.default_rng(0)
    uninterrupted = {}
    order = Order(num_images=997, global_batch=64, seed=5, keep_last=True)
    for epoch in range(3):
        uninterrupted[epoch] = np.concatenate([order.batch(epoch, step) for step in range(order.steps_per_epoch)])
    for _ in range(1000):
        epoch, step, world_size = rng.integers(3), rng.integers(order.steps_per_epoch), rng.integers(1, 9)
        restarted = Order(num_images=997, global_batch=64, seed=5, keep_last=True)
        parts = [restarted.rank_batch(epoch, step, rank, world_size) for rank in range(world_size)]
        expected = uninterrupted[epoch][step * 64 : (step + 1) * 64]
        assert np.array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize(("keep_last", "num_steps", "num_seen"), [(False, 3, 96), (True, 4, 100)])
def test_the_last_incomplete_batch_is_kept_or_dropped_by_choice(keep_last, num_steps, num_seen):
    order = Order(num_images=100, global_batch=32, keep_last=keep_last)
    assert order.steps_per_epoch == num_steps
    seen = np.concatenate([order.batch(0, step) for step in range(num_steps)])
    assert len(np.unique(seen)) == len(seen) == num_seen


def test_uneven_parts_go_to_the_first_ranks():
    assert [rank_part(10, rank, 4) for rank in range(4)] == [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]
