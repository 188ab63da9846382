"""Which commit of an elastic training can be restored, from whom, and where copies of centres are kept."""

from itertools import combinations

import pytest

from megaclass.head.centres import class_range
from megaclass.training.commits import NO_COMMIT, HeldCommit, copy_distance, newest_whole_commit, transfers

NUM_CLASSES = 11


def held(rank: int, size: int, step: int, distance: int = 1, generation: int = 1) -> HeldCommit:
    own = class_range(NUM_CLASSES, rank, size)
    kept = class_range(NUM_CLASSES, (rank - distance) % size, size)
    copies = (kept.start, kept.stop) if size > 1 else (0, 0)
    return HeldCommit(generation, step, NUM_CLASSES, own.start, own.stop, *copies)


@pytest.mark.parametrize(
    ("hosts", "num_elsewhere"),
    [
        ("a", 0),
        ("aaa", 0),
        ("ab", 2),
        ("aabb", 4),
        ("aaabbb", 6),
        ("aabbc", 5),
        ("aaab", 2),
        ("aaaabbc", 6),
    ],
)
def test_as_many_copies_as_possible_are_on_another_host(hosts, num_elsewhere):
    distance, size = copy_distance(hosts), len(hosts)
    assert sum(hosts[rank] != hosts[(rank + distance) % size] for rank in range(size)) == num_elsewhere
    assert (distance == 0) == (size == 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_commit_is_lost_only_with_a_rank_and_the_one_that_holds_its_copy(size):
    distance = copy_distance("a" * size)
    commits = [[held(rank, size, 20, distance), NO_COMMIT] for rank in range(size)]
    for num_lost in range(size):
        for lost in combinations(range(size), num_lost):
            left = [commits[rank] for rank in range(size) if rank not in lost]
            # Processes that are new hold nothing.
            restoration = newest_whole_commit([*left, [NO_COMMIT, NO_COMMIT]])
            is_lost = any((rank + distance) % size in lost for rank in lost)
            assert (restoration is None) == is_lost, lost
            if restoration is not None:
                assert restoration.step == 20 and restoration.ranks == tuple(range(len(left)))


@pytest.mark.parametrize("new_size", [1, 2, 3, 4, 7])
def test_every_rank_gets_each_of_its_classes_once_from_a_rank_that_holds_it(new_size):
    survivors = [held(rank, 4, 20) for rank in (0, 2, 3)]
    restoration = newest_whole_commit(
        [[commit, NO_COMMIT] for commit in survivors][:new_size] + [[NO_COMMIT]] * (new_size - 3)
    )
    if new_size < 2:
        assert restoration is None
        return
    received: dict[int, list[int]] = {}
    for transfer in transfers(restoration, new_size):
        commit = survivors[transfer.source]
        assert transfer.shard in {(commit.own_start, commit.own_stop), (commit.kept_start, commit.kept_stop)}
        assert transfer.shard[0] <= transfer.start < transfer.stop <= transfer.shard[1]
        received.setdefault(transfer.target, []).extend(range(transfer.start, transfer.stop))
    for rank in range(new_size):
        own = class_range(NUM_CLASSES, rank, new_size)
        assert sorted(received[rank]) == list(range(own.start, own.stop))


def test_a_commit_under_way_counts_only_if_nothing_of_it_is_missing():
    before = [held(rank, 3, 10) for rank in range(3)]
    under_way = [held(0, 3, 20), NO_COMMIT, held(2, 3, 20)]
    # Rank 1 died before it had filled its place: rank 2 has its classes, rank 0 those of rank 2.
    assert newest_whole_commit([[before[0], under_way[0]], [before[2], under_way[2]]]).step == 20
    # Rank 2 died, which alone had the centres of rank 1, because rank 1 has not filled its place either.
    assert newest_whole_commit([[before[0], under_way[0]], [before[1], NO_COMMIT]]).step == 10


def test_a_later_generation_counts_more_than_a_later_step():
    gone_back = [held(rank, 2, 12, generation=3) for rank in range(2)]
    earlier = [held(rank, 2, 20, generation=2) for rank in range(2)]
    restoration = newest_whole_commit([[earlier[rank], gone_back[rank]] for rank in range(2)])
    assert (restoration.generation, restoration.step) == (3, 12)
