"""Names that operations get by themselves, and names that scripts import."""

import pytest
import torch
from tests.conftest import free_port
from tests.hvd.jobs import error_of, in_job, job, outputs_of, start_script

import megaclass.hvd as hvd


def _only_some_ranks_use_a_set(rank: int, size: int) -> None:
    alone = hvd.add_process_set([0])
    pair = hvd.add_process_set([0, size - 1])
    for _ in range(3):
        if rank == 0:
            assert hvd.allgather(torch.tensor([7]), process_set=alone).tolist() == [7]
        if pair.included():
            hvd.allreduce(torch.ones(1), name="only two ranks submit this", process_set=pair)
            assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=pair).item() == size - 1
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Max).item() == size - 1
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


@pytest.mark.parametrize("size", [3, 4])
def test_unnamed_operations_of_a_process_set_leave_the_names_of_the_others_alone(run_ranks, size):
    run_ranks(size, _with_dynamic_sets, _only_some_ranks_use_a_set)


def _with_dynamic_sets(function) -> None:
    with job(DYNAMIC_PROCESS_SETS="1") as (rank, size):
        function(rank, size)


def _names_after_join(rank: int, size: int) -> None:
    for generation in range(3):
        for _ in range(rank + generation):
            hvd.allreduce(torch.ones(2))
        assert hvd.join() in range(size)
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def test_unnamed_operations_meet_again_after_every_join(run_ranks):
    run_ranks(3, in_job, _names_after_join)


_AS_LIBRARIES_IMPORT_THEM = """
import horovod, horovod.torch as hvd
from horovod.torch.optimizer import _DistributedOptimizer, _DistributedAdasumOptimizer, DistributedOptimizer, Average
from horovod.torch.functions import broadcast_object, broadcast_, global_process_set
from horovod.torch.mpi_ops import ProcessSet, is_homogeneous, gpu_available, num_rank_is_power_2, _basics
from horovod.common.process_sets import ProcessSet as the_same
from horovod.runner import _HorovodArgs, run
from horovod.runner.launch import _run, gloo_built
try:
    from horovod.run.runner import run as spawn
except ImportError:
    from horovod import run as spawn
assert ProcessSet is the_same is hvd.ProcessSet and callable(spawn) and gloo_built()
assert hvd.mpi_ops.Sum == hvd.Sum == 1 and hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
assert hvd.functions.broadcast_object is hvd.broadcast_object and hvd.compression.Compression is hvd.Compression
asked = _HorovodArgs()
asked.num_proc, asked.command = 2, ["true"]
assert asked.hosts is None and _run(asked) is None
asked.command = ["false"]
try:
    _run(asked)
except RuntimeError as error:
    print("non-zero status" in str(error))
"""


def test_submodules_and_private_names_that_libraries_use_are_there():
    script = start_script(_AS_LIBRARIES_IMPORT_THEM, 1, free_port(), PYTHONPATH=hvd.shims_folder())
    [(code, out, err)] = outputs_of(script)
    assert (code, out) == (0, "True\n"), err


def _sets_that_cannot_be(rank: int, size: int) -> None:
    for ranks, text in (([0, size], "ranks must lie in"), ([0, 0], "each rank may stand there once")):
        name, said = error_of(lambda ranks=ranks: hvd.add_process_set(ranks))
        assert (name, text in said) == ("ValueError", True), said
        # The job goes on.
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        hvd.shutdown()
        name, said = error_of(lambda ranks=ranks: hvd.init(process_sets=[hvd.ProcessSet(ranks)]))
        assert (name, text in said) == ("ValueError", True), said
        hvd.init()


def test_a_process_set_of_ranks_that_are_not_there_or_stand_twice_is_refused(run_ranks):
    run_ranks(2, _with_dynamic_sets, _sets_that_cannot_be)
