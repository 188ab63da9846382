"""Names that operations get by themselves, and names that scripts import."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from tests.forked import ended_ranks, python_script
from tests.horovod.jobs import error_of, in_job, job

import horovod.torch as hvd
from horovod.torch import mpi_ops


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


def _after_uneven_epochs(rank: int, size: int) -> None:
    for _ in range(2):
        # Rank 0 has more data than the others, and uses barriers and objects while they have joined.
        if rank == 0:
            hvd.barrier()
            kind, text = error_of(lambda: hvd.broadcast_object("while others have joined"))
            assert kind == "HorovodInternalError", (kind, text)
        hvd.join()
        hvd.barrier()
        assert hvd.broadcast_object(rank) == 0
        assert hvd.broadcast_object(rank, name="named") == 0


def test_barriers_and_objects_meet_again_after_a_join(run_ranks):
    run_ranks(2, in_job, _after_uneven_epochs)


_HOROVOD_TORCH = """
Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async
grouped_allgather grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_
alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter
grouped_reducescatter_async join barrier poll synchronize init shutdown is_initialized
start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum
Adasum Min Max Product HorovodInternalError DistributedOptimizer SyncBatchNorm
"""
# Horovod has these in horovod.torch.mpi_ops only.
_ONLY_IN_MPI_OPS = {"handle_average_backwards_compatibility", "is_homogeneous"}


def test_the_public_names_are_those_of_horovod_torch_and_each_is_listed_once():
    horovods = set(_HOROVOD_TORCH.split())
    assert len(horovods) == 66
    assert set(hvd.__all__) == horovods
    assert len(hvd.__all__) == len(set(hvd.__all__))
    assert dir(hvd) == sorted(hvd.__all__)
    # Every name is defined in one module, whose __all__ lists it.
    assert hvd.allreduce.__module__ == "horovod.collectives.operations"
    elsewhere = {"Compression", "DistributedOptimizer", "SyncBatchNorm", "allgather_object", "broadcast_object"}
    elsewhere |= {"broadcast_optimizer_state", "broadcast_parameters"}
    assert set(mpi_ops.__all__) == horovods - elsewhere | _ONLY_IN_MPI_OPS
    assert not _ONLY_IN_MPI_OPS & set(dir(hvd))


def test_a_name_that_horovod_does_not_have_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = hvd.no_such_name


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
import torch
hvd.init()
wrapped = hvd.DistributedOptimizer(torch.optim.Adam([torch.ones(1, requires_grad=True)]))
assert "horovod" in str(wrapped.__class__) and wrapped.__module__ == DistributedOptimizer.__module__
hvd.shutdown()
asked = _HorovodArgs()
asked.num_proc, asked.command = 2, ["true"]
assert asked.hosts is None and _run(asked) is None
asked.command = ["false"]
try:
    _run(asked)
except RuntimeError as error:
    print("non-zero status" in str(error))
asked.cycle_time_ms = -1
try:
    _run(asked)
except ValueError as error:
    print(error)
"""


def _run_on_one_rank(script: str, folder: Path | str = "") -> CompletedProcess[str]:
    """Runs a script on one rank; FOLDER is the given one."""
    env = {"FOLDER": str(folder)}
    (done,) = ended_ranks(1, python_script, script, env=env)
    return done


@pytest.mark.ranks
def test_submodules_and_private_names_that_libraries_use_are_there():
    done = _run_on_one_rank(_AS_LIBRARIES_IMPORT_THEM)
    assert (done.returncode, done.stdout) == (0, "True\ncycle_time_ms=-1 must be >= 0\n"), done.stderr


_SMALL_MODULES = """
import horovod
from horovod.common.util import _cache
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from horovod.runner.common.util import env, hosts

assert horovod.__version__ == "0.28.1"

calls = []
twice = _cache(lambda x: calls.append(x) or 2 * x)
assert (twice(3), twice(3), calls) == (6, 6, [3])

assert env.get_env_rank_and_size() == (0, 1)
assert [slot.rank for slot in hosts.get_host_assignments(hosts.parse_hosts("w0:2,w1:2"), 1, 2)] == [0, 1]

class Numbers(BaseDataLoader):
    def __init__(self, last):
        self.last = last
    def __len__(self):
        return self.last
    def _iterate(self):
        for number in range(self.last):
            if number == 7:
                raise KeyError(number)
            yield number
    def _process_batch(self, batch):
        return -batch

class Ahead(AsyncDataLoaderMixin, Numbers):
    pass

for size in (0, 1, 5):
    loader = Ahead(size, 4)
    assert [list(loader), list(loader)] == [[0, -1, -2, -3]] * 2 and len(loader) == 4
    loader.close_async_loader()
    loader.close_async_loader()
    assert not loader.thread.is_alive()
    broken, seen = Ahead(size, 9, debug_data_loader=True), []
    try:
        seen.extend(broken)
    except KeyError:
        pass
    assert len(list(Numbers(3))) == 3 and broken.debug_data_loader
from horovod.torch import check_extension
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", horovod.__file__)
print("all there")
"""


@pytest.mark.ranks
def test_the_small_modules_that_scripts_import_are_there(tmp_path):
    done = _run_on_one_rank(_SMALL_MODULES, tmp_path)
    assert (done.returncode, done.stdout) == (0, "all there\n"), done.stderr


_WHAT_IS_NOT_THERE = """
import importlib, horovod.torch as hvd
for name in ("mxnet", "spark", "ray"):
    try:
        importlib.import_module(f"horovod.{name}")
    except ImportError as error:
        print(name, type(error).__name__, error)
from horovod.common.elastic import HostUpdateResult, ObjectState, State, WorkerNotificationManager, run_fn
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState, get_handler_registry
assert hvd.elastic.TorchState is TorchState and hvd.elastic.run and hvd.elastic.state and hvd.elastic.sampler
"""


@pytest.mark.ranks
def test_what_is_not_there_says_so():
    done = _run_on_one_rank(_WHAT_IS_NOT_THERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mxnet ImportError Extension horovod.mxnet has not been built: Apache MXNet is retired since 2023, "
        "and horovod.torch does not support it. It supports PyTorch, TensorFlow and Keras.",
        "spark ImportError horovod.spark is not supported by megaclass: "
        "`horovod.run(fn, num_proc=…, hosts=…)` runs a function on the hosts.",
        "ray ImportError horovod.ray is not supported by megaclass: "
        "`megaclass run --launcher ray` starts a command on a Ray cluster.",
    ]


def _sets_that_cannot_be(rank: int, size: int) -> None:
    for ranks, text in (([0, size], "ranks must lie in"), ([0, 0], "each rank may appear only once")):
        name, said = error_of(lambda ranks=ranks: hvd.add_process_set(ranks))
        assert (name, text in said) == ("ValueError", True), said
        # The job continues.
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        hvd.shutdown()
        name, said = error_of(lambda ranks=ranks: hvd.init(process_sets=[hvd.ProcessSet(ranks)]))
        assert (name, text in said) == ("ValueError", True), said
        hvd.init()


def test_a_process_set_of_ranks_that_are_not_there_or_stand_twice_is_refused(run_ranks):
    run_ranks(2, _with_dynamic_sets, _sets_that_cannot_be)
