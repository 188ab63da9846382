"""Names that operations get by themselves, and names that scripts import."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from tests.forked import ended_ranks, python_script
from tests.hvd.jobs import error_of, in_job, job

import megaclass.hvd as hvd
from megaclass.hvd import mpi_ops


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
# In horovod.torch these are absent: `run` is a name of `horovod` itself, and `shims_folder` is megaclass's own.
_MORE = {"run", "shims_folder"}
# Horovod has these in horovod.torch.mpi_ops only.
_ONLY_IN_MPI_OPS = {"handle_average_backwards_compatibility", "is_homogeneous"}


def test_the_public_names_are_those_of_horovod_torch_and_each_is_listed_once():
    horovods = set(_HOROVOD_TORCH.split())
    assert len(horovods) == 66
    assert set(hvd.__all__) == horovods | _MORE
    assert len(hvd.__all__) == len(set(hvd.__all__))
    assert dir(hvd) == sorted(hvd.__all__)
    # Every name is defined in one module, whose __all__ lists it.
    assert hvd.allreduce.__module__ == "megaclass.hvd.collectives.allreduce"
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
"""


def _run_with_shims(script: str, folder: Path | str = "") -> CompletedProcess[str]:
    """Run a script on one rank, where horovod can be imported; FOLDER is the given one."""
    env = {"PYTHONPATH": hvd.shims_folder(), "FOLDER": str(folder)}
    (done,) = ended_ranks(1, python_script, script, env=env)
    return done


@pytest.mark.ranks
def test_submodules_and_private_names_that_libraries_use_are_there():
    done = _run_with_shims(_AS_LIBRARIES_IMPORT_THEM)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


_AS_TESTS_OF_HOROVODRUN_USE_THEM = """
import io, os, sys, threading
from horovod.runner import _HorovodArgs
from horovod.runner.common.util import config_parser, hosts, safe_shell_exec, secret, settings, timeout
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.common.util.host_hash import host_hash
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.gloo_run import gloo_run
from horovod.runner.js_run import generate_jsrun_rankfile, is_jsrun_installed, js_run
from horovod.runner.launch import _check_all_hosts_ssh_successful, _run, parse_args, run_controller
from horovod.runner.mpi_run import is_intel_mpi, is_mpich, mpi_available, mpi_run
from horovod.runner.util import lsf, network

def parsed(*arguments):
    sys.argv[1:] = ["-np", "2", *arguments]
    return parse_args()

args = parsed("--cycle-time-ms", "20", "--no-stall-check", "-H", "a:1,b:1", "--network-interfaces", "eth0,eth1", "cmd", "-x")
assert (args.num_proc, args.hosts, args.nics, args.command) == (2, "a:1,b:1", {"eth0", "eth1"}, ["cmd", "-x"])
assert args.min_num_proc is args.autotune is args.run_func is None and not args.use_gloo and not args.verbose
env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1800"}
assert config_parser.set_env_from_args(env, args) is env
assert env == {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "1800",
    config_parser.HOROVOD_CYCLE_TIME: "20.0",
    config_parser.HOROVOD_STALL_CHECK_DISABLE: "1",
}
with open(config := f"{os.environ['FOLDER']}/config.yaml", "w") as file:
    file.write("controller: gloo\\nparams: {fusion_threshold_mb: 32, cycle_time_ms: 10}\\nlogging: {with_timestamp: false}")
args = parsed("--cycle-time-ms", "20", "--config-file", config)
assert (args.use_gloo, args.fusion_threshold_mb, args.cycle_time_ms, args.log_with_timestamp) == (True, 32, 20, False)
try:
    parsed("--fusion-threshold-mb", "-1")
except ValueError as error:
    assert str(error) == "fusion_threshold_mb=-1 must be >= 0"

where = dict(size=3, hostname="w1", local_size=2)
assert get_host_assignments(parse_hosts("w0:1,w1:2"), 3)[1:] == [
    SlotInfo(rank=1, local_rank=0, cross_rank=1, cross_size=2, **where),
    SlotInfo(rank=2, local_rank=1, cross_rank=0, cross_size=1, **where),
]
assert [slot.rank for slot in get_host_assignments(parse_hosts("w0:2,w1:2"), 1, 2)] == [0, 1]
assert get_env_rank_and_size() == (0, 1) and host_hash() == host_hash("") != host_hash("salt")
assert network.filter_local_addresses(["localhost", "no-such-host", "127.0.0.1"]) == ["no-such-host"]

out = io.StringIO()
assert safe_shell_exec.execute("echo one; echo two >&2; exit 7", stdout=out, stderr=io.StringIO(), index=3) == 7
assert out.getvalue() == "[3]<stdout>:one\\n"
stop = threading.Event()
threading.Timer(0.5, stop.set).start()
assert safe_shell_exec.execute("sleep 600", events=[stop]) == 143

gloo_run(settings.Settings(num_proc=2, hosts="localhost:2"), ["lo"], {"WORD": "hi"}, "127.0.0.1", ["sh", "-c", "echo $WORD"])
called = []
run_controller(None, lambda: called.append("gloo"), None, None, None, None, 0)
assert called == ["gloo"] and not mpi_available()
print("all there")
"""


@pytest.mark.ranks
def test_what_tests_of_horovodrun_import_is_there(tmp_path):
    done = _run_with_shims(_AS_TESTS_OF_HOROVODRUN_USE_THEM, tmp_path)
    *said, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "all there"), done.stderr
    assert sorted(said) == ["[0]<stdout>:hi", "[1]<stdout>:hi"]


_SMALL_MODULES = """
import importlib.metadata, threading
import horovod
from horovod.common.util import _cache
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from horovod.runner.common.util import codec
from horovod.runner.util import cache
from horovod.runner.util.streams import Pipe

assert importlib.metadata.version("horovod") == horovod.__version__ == "0.28.1"

calls = []
twice = _cache(lambda x: calls.append(x) or 2 * x)
assert (twice(3), twice(3), calls) == (6, 6, [3])

for to_ascii in (True, False):
    encoded = codec.dumps_base64({"f": lambda: 5}, to_ascii=to_ascii)
    assert isinstance(encoded, str if to_ascii else bytes) and codec.loads_base64(encoded)["f"]() == 5

pipe = Pipe()
pipe.write("abcdefg")
assert (pipe.read(3), pipe.read(3), pipe.read(3)) == ("abc", "def", "g")
writer = threading.Thread(target=lambda: [pipe.write(text) for text in ("one", "two")] and pipe.close())
writer.start()
assert (pipe.read(), pipe.read(), pipe.read()) == ("one", "two", None)
try:
    pipe.write("late")
except RuntimeError as error:
    assert str(error) == "Pipe is closed"

folder = __import__("os").environ["FOLDER"]
@cache.use_cache()
def doubled(numbers):
    calls.append("doubled")
    return [2 * number for number in numbers]
del calls[:]
for parameters in ("a", "a", "b"):
    assert doubled([1, 2], fn_cache=cache.Cache(folder, 60, parameters)) == [2, 4]
assert len(calls) == 2 and doubled([1], fn_cache=None) == [2]
assert cache.Cache(folder, 0, "b").get("anything") is None

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
    broken, seen = Ahead(size, 9), []
    try:
        seen.extend(broken)
    except KeyError:
        pass
    assert len(list(Numbers(3))) == 3
print("all there")
"""


@pytest.mark.ranks
def test_the_small_modules_that_scripts_import_are_there(tmp_path):
    done = _run_with_shims(_SMALL_MODULES, tmp_path)
    assert (done.returncode, done.stdout) == (0, "all there\n"), done.stderr


_LOG_OF_A_STATIC_RUN = """
import os, stat, sys
from unittest import mock
from horovod.runner import _HorovodArgs
from horovod.runner.launch import _run
# An ssh that gets nowhere but to this machine.
folder = os.environ["FOLDER"]
with open(f"{folder}/ssh", "w") as file:
    file.write("#!/bin/sh\\nexit 255\\n" if "broken" in folder else "#!/bin/sh\\nexit 0\\n")
os.chmod(f"{folder}/ssh", 0o755)
os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
args = _HorovodArgs()
args.np, args.hosts, args.use_gloo, args.verbose, args.command = 1, "localhost:1", True, 2, ["true"]
with mock.patch("horovod.runner.launch.network.filter_local_addresses", lambda hosts: list(hosts)):
    _run(args)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["good", "broken"])
def test_a_static_run_says_what_horovods_does_about_ssh(tmp_path, how):
    folder = tmp_path / how
    folder.mkdir()
    done = _run_with_shims(_LOG_OF_A_STATIC_RUN, folder)
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "Filtering local host names.",
        "Remote host found: localhost",
        "Checking ssh on all remote hosts.",
    ], done.stderr
    if how == "good":
        assert done.returncode == 0 and lines[3] == "SSH was successful into all the remote hosts.", done.stderr
    else:
        assert done.returncode == 1 and "RuntimeError: could not connect to some hosts via ssh" in done.stderr


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
    done = _run_with_shims(_WHAT_IS_NOT_THERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mxnet ImportError Extension horovod.mxnet has not been built: Apache MXNet is retired since 2023, "
        "and megaclass.hvd does not support it. It supports PyTorch, TensorFlow and Keras.",
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
