"""Process sets at their edges: no ranks, one rank, all ranks, several at once, sets of a job that is over."""

import pytest
import torch
from tests.horovod.jobs import error_of, in_job, job

import horovod.torch as hvd


def test_ranks_are_sorted_and_nothing_is_known_before_the_set_is_part_of_a_job():
    process_set = hvd.ProcessSet((3, 1, 2))
    assert process_set.ranks == [1, 2, 3] and process_set.process_set_id is None
    assert process_set.size() is None and process_set.rank() is None
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[1, 2, 3], mpi_comm=None)"
    assert hvd.ProcessSet(iter([1, 0])).ranks == [0, 1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "cannot be built from an MPI communicator"),
        (object(), "cannot be built from an MPI communicator"),
        ([0, 1.0], "should be initialized with a list of process ranks"),
        ("01", "should be initialized with a list of process ranks"),
    ],
)
def test_a_set_is_made_of_whole_numbers(given, text):
    name, said = error_of(lambda: hvd.ProcessSet(given))
    assert name == "ValueError" and text in said


@pytest.mark.parametrize("given", ["static", "", "dynamically"])
def test_a_word_for_process_sets_is_dynamic_or_wrong(given):
    assert error_of(lambda: hvd.init(process_sets=given)) == (
        "ValueError",
        f'process_sets={given!r}: expected a list of hvd.ProcessSet, "dynamic" or None.',
    )
    assert not hvd.is_initialized()


def _without_ranks(rank: int, size: int) -> None:
    hvd.shutdown()
    nobody = hvd.ProcessSet([])
    hvd.init(process_sets=[nobody])
    assert (nobody.process_set_id, nobody.size(), nobody.included()) == (1, 0, False)
    assert error_of(nobody.rank) == ("ValueError", "Process is not part of provided process set.")
    for kind, call in (
        ("Allreduce", lambda: hvd.allreduce(torch.ones(1), process_set=nobody)),
        ("Allgather", lambda: hvd.allgather(torch.ones(1), process_set=nobody)),
        ("Broadcast", lambda: hvd.broadcast(torch.ones(1), 0, process_set=nobody)),
        ("Alltoall", lambda: hvd.alltoall(torch.ones(1), process_set=nobody)),
        ("Reducescatter", lambda: hvd.reducescatter(torch.ones(1), process_set=nobody)),
        ("Barrier", lambda: hvd.barrier(process_set=nobody)),
    ):
        said = f"{kind}: Rank {rank} is not a member of the provided process set. ({nobody})"
        assert error_of(call) == ("ValueError", said)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_a_set_without_ranks_exists_and_has_no_member(run_ranks):
    run_ranks(2, in_job, _without_ranks)


def _of_one_and_of_all(rank: int, size: int) -> None:
    hvd.shutdown()
    alone = [hvd.ProcessSet([r]) for r in range(size)]
    hvd.init(process_sets=alone)
    mine, other = alone[rank], alone[rank - 1]
    given = torch.tensor([3.0, rank])
    assert (mine.rank(), mine.size()) == (0, 1)
    for result in (
        hvd.allreduce(given, process_set=mine),
        hvd.allreduce(given, op=hvd.Product, process_set=mine),
        hvd.allgather(given, process_set=mine),
        hvd.alltoall(given, process_set=mine),
        hvd.reducescatter(given, process_set=mine),
        # The root is the global rank.
        hvd.broadcast(given, rank, process_set=mine),
        hvd.sparse_allreduce_async(given.to_sparse(), "s", hvd.Average, process_set=mine)().to_dense(),
    ):
        assert torch.equal(result, given)
    assert error_of(lambda: hvd.broadcast(given, rank - 1, process_set=mine))[0] == "ValueError"
    assert "is not a member" in error_of(lambda: hvd.allreduce(given, process_set=other))[1]
    assert error_of(lambda: hvd.allreduce(given, op=hvd.Adasum, process_set=mine)) == (
        "NotImplementedError",
        "Adasum does not support non-global process sets yet.",
    )
    # The first rank that leaves ends the job for all.
    hvd.barrier()
    hvd.shutdown()
    # The set of all ranks exists already.
    name, text = error_of(lambda: hvd.init(process_sets=[hvd.ProcessSet(range(size))]))
    assert name == "ValueError" and "process_sets entry number 0 is a duplicate" in text
    assert not hvd.is_initialized()
    pair = hvd.ProcessSet([0, 1])
    name, text = error_of(lambda: hvd.init(process_sets=[pair, hvd.ProcessSet([1, 0])]))
    assert name == "ValueError" and "process_sets entry number 1 is a duplicate" in text
    hvd.init(process_sets=[pair])
    assert pair.process_set_id == 1 and hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_sets_of_one_rank_give_each_its_own_and_the_set_of_all_ranks_is_a_duplicate(run_ranks):
    run_ranks(3, in_job, _of_one_and_of_all)


def _several_at_once(rank: int, size: int) -> None:
    hvd.shutdown()
    sets = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [1, 2], [0, 2], [1])]
    hvd.init(process_sets=sets)
    handles = {}
    # The same name in every set and an order of its own on each rank: 40 operations per set are in flight together.
    for step in range(40):
        for number in sorted(range(4), key=lambda n: (n * (rank + 1) + step) % 5):
            if sets[number].included():
                given = torch.full((step + 1,), float(10 * rank + number))
                handles[number, step] = hvd.allreduce_async(
                    given, op=hvd.Sum, name=f"x.{step}", process_set=sets[number]
                )
    for (number, step), handle in handles.items():
        members = sets[number].ranks
        expected = sum(10.0 * member + number for member in members)
        assert hvd.synchronize(handle).tolist() == [expected] * (step + 1)
    for process_set in sets:
        if process_set.included():
            hvd.barrier(process_set=process_set)
            assert hvd.broadcast_object(rank, process_set.ranks[-1], process_set=process_set) == process_set.ranks[-1]
    hvd.barrier()


def test_overlapping_sets_run_operations_of_one_name_at_the_same_time(run_ranks):
    run_ranks(3, in_job, _several_at_once)


def _of_an_earlier_job(rank: int, size: int) -> None:
    hvd.shutdown()
    old, new = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[old])
    assert old.process_set_id == 1
    hvd.shutdown()
    assert error_of(old.size)[1] == "Horovod has not been initialized; use hvd.init()."
    hvd.init(process_sets=[new])
    # The new set has the number that the old one had: it must not stand in for it.
    assert new.process_set_id == old.process_set_id == 1
    assert error_of(old.size) == ("ValueError", "Process set does not exist or has not been registered.")
    assert not hvd.remove_process_set(old) and new.size() == 2
    # A removal that is refused leaves the set as it is.
    assert "HOROVOD_DYNAMIC_PROCESS_SETS=1" in error_of(lambda: hvd.remove_process_set(new))[1]
    name, text = error_of(lambda: hvd.allreduce(torch.ones(1), process_set=old))
    assert name == "ValueError" and "does not exist, or has not been registered" in text
    if new.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=new).item() == 2
    hvd.barrier()
    hvd.shutdown()
    # Given to init() again, it is a set of the new job.
    hvd.init(process_sets=[new, old])
    assert old.process_set_id == 2
    if old.included():
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=old).item() == 1
    hvd.barrier()


def test_a_set_of_an_earlier_job_is_refused_until_it_is_given_to_init_again(run_ranks):
    run_ranks(3, in_job, _of_an_earlier_job)


def _changed_while_running() -> list[int]:
    numbers = []
    with job(DYNAMIC_PROCESS_SETS="1") as (rank, size):
        for generation in range(5):
            pair = hvd.add_process_set([generation % size, (generation + 1) % size])
            numbers.append(pair.process_set_id)
            # Operations of all ranks are under way while the sets change.
            handle = hvd.allreduce_async(torch.full((5000,), 1.0), op=hvd.Sum)
            if pair.included():
                total = hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=pair)
                assert total.item() == sum(pair.ranks)
            assert hvd.remove_process_set(pair)
            assert hvd.synchronize(handle).unique().tolist() == [size]
            name, text = error_of(lambda pair=pair: hvd.allreduce(torch.ones(1), process_set=pair))
            assert name == "ValueError" and "has not been registered" in text
        # Ranks that want to remove different sets are told, and nothing is removed.
        one, two = hvd.add_process_set([0]), hvd.add_process_set([1])
        chosen = one if rank == 0 else two
        name, text = error_of(lambda: hvd.remove_process_set(chosen))
        assert name == "HorovodInternalError" and "process sets" in text
        assert hvd.remove_process_set(one)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    return numbers


def test_numbers_of_removed_sets_are_not_used_again(run_ranks):
    assert run_ranks(3, _changed_while_running) == [[1, 2, 3, 4, 5]] * 3


def _group_of_torch(rank: int, size: int) -> None:
    group = hvd.global_process_set.group
    value = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(value, group=group)
    assert value.item() == sum(range(1, size + 1))
    assert error_of(lambda: hvd.ProcessSet([0]).group)[0] == "ValueError"


def test_the_group_of_a_set_takes_part_in_the_collectives_of_torch(run_ranks):
    run_ranks(2, in_job, _group_of_torch)
