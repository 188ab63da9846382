"""init, shutdown, init; who is there; what others set up before; idle cost; modules named horovod."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.forked import ended_ranks, python_script, run_forked
from tests.horovod.jobs import error_of, in_job

import horovod.torch as hvd

_AGAIN = """
import torch, horovod.torch as hvd
for generation in range(5):
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    hvd.shutdown()
    assert not hvd.is_initialized()
print("rank", hvd.rank() if hvd.is_initialized() else "-")
"""


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_process_may_leave_and_come_back(size):
    for done in ended_ranks(size, python_script, _AGAIN):
        assert (done.returncode, done.stdout) == (0, "rank -\n"), done.stderr


@pytest.mark.ranks
def test_a_plain_python_process_is_a_world_of_one():
    script = (
        "import torch, horovod.torch as hvd; hvd.init(); print(hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1)))"
    )
    done = run_forked(python_script, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 tensor([1.])\n", "")


def test_nothing_is_known_before_init():
    assert not hvd.is_initialized()
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.stop_timeline):
        assert error_of(ask) == ("ValueError", "Horovod has not been initialized; use hvd.init().")
    assert error_of(lambda: hvd.allreduce(torch.ones(1)))[0] == "HorovodInternalError"
    assert hvd.synchronize(3) is None


def test_build_queries_tell_of_gloo_and_no_mpi():
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not any([hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()])
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert isinstance(hvd.nccl_built(), int)
    assert error_of(hvd.mpi_threads_supported)[0] == "ValueError"
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


def _topology(rank: int, size: int) -> tuple[int, ...]:
    hvd.shutdown()
    os.environ["HOROVOD_HOSTNAME"] = f"host{rank // 2}"
    try:
        hvd.init()
        return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    finally:
        del os.environ["HOROVOD_HOSTNAME"]


def test_local_and_cross_ranks_count_hosts(run_ranks):
    assert run_ranks(3, in_job, _topology) == [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]


def _beside_others(rank: int, size: int) -> None:
    """The default group is somebody else's: it is used, and left alone."""
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == total.item() == size
        hvd.shutdown()
        assert dist.is_initialized()
        hvd.init()
    hvd.shutdown()
    if rank < 2:
        hvd.init(comm=[0, 1])
        assert hvd.size() == 2
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum).item() == 1
    else:
        assert error_of(lambda: hvd.init(comm=[0, 1]))[0] == "ValueError"
    hvd.shutdown()
    if rank == 2:
        hvd.init(comm=[2])
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    hvd.shutdown()


def test_a_default_group_of_somebody_elses_is_used_and_left_alone(run_ranks):
    run_ranks(3, in_job, _beside_others)


@pytest.mark.ranks
def test_an_idle_job_costs_less_than_a_hundredth_of_a_core():
    script = """
    import resource, time, torch, horovod.torch as hvd
    hvd.init(); hvd.allreduce(torch.ones(1)); time.sleep(0.2)
    used = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    begun = used(); time.sleep(3); print((used() - begun) / 3)
    """
    for done in ended_ranks(2, python_script, textwrap.dedent(script)):
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 0.01


@pytest.mark.ranks
def test_when_one_rank_ends_the_operations_of_the_others_fail():
    script = """
    import torch, horovod.torch as hvd
    hvd.init()
    if hvd.rank():
        try:
            hvd.allreduce(torch.ones(1))
        except hvd.HorovodInternalError as error:
            print("Horovod has been shut down" in str(error))
    """
    _, second = ended_ranks(2, python_script, textwrap.dedent(script))
    assert (second.returncode, second.stdout) == (0, "True\n"), second.stderr


@pytest.mark.ranks
def test_a_rank_that_crashes_is_named_at_once():
    script = """
    import os, time, torch, horovod.torch as hvd
    hvd.init()
    if hvd.rank() == 1:
        os._exit(7)
    begun = time.monotonic()
    try:
        hvd.allreduce(torch.ones(1))
    except hvd.HorovodInternalError as error:
        print("Rank 1 (" in str(error), time.monotonic() - begun < 5)
    """
    ranks = ended_ranks(3, python_script, textwrap.dedent(script))
    expected = [(0, "True True\n"), (7, ""), (0, "True True\n")]
    assert [(rank.returncode, rank.stdout) for rank in ranks] == expected, ranks


_UNCHANGED = """
import horovod
import horovod.torch as hvd
from horovod.torch import mpi_ops, compression
from horovod.torch.mpi_ops import is_homogeneous, handle_average_backwards_compatibility
from horovod.common.util import env, split_list, num_rank_is_power_2
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.runner import run as run_again
from horovod.run import run as run_too
import horovod.runner.launch
import torch, os
hvd.init()
assert hvd.rank() == int(os.environ["HOROVOD_RANK"]) and hvd.size() == int(os.environ["HOROVOD_SIZE"])
assert horovod.run is run_again or callable(horovod.run)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
model(torch.ones(3, 4) * hvd.rank()).sum().backward()
optimizer.step()
weights = hvd.allgather(model.weight.detach()[None].contiguous())
assert torch.equal(weights[0], weights[-1]) and is_homogeneous()
print(horovod.__version__, issubclass(HorovodInternalError, RuntimeError))
"""


@pytest.mark.ranks
def test_a_script_that_imports_horovod_runs_unchanged():
    for done in ended_ranks(2, python_script, _UNCHANGED):
        assert (done.returncode, done.stdout) == (0, "0.28.1 True\n"), done.stderr


def _open_files(rank: int, size: int) -> list[int]:
    counts = []
    for _ in range(8):
        hvd.allreduce(torch.ones(1))
        hvd.shutdown()
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
        hvd.init()
    return counts


def test_coming_and_going_leaves_no_file_open(run_ranks):
    for counts in run_ranks(2, in_job, _open_files):
        # Connections of the generation before may still be closing.
        assert min(counts[5:]) <= max(counts[1:4]), counts


_TWO_HOROVODS = """
import importlib.metadata, pathlib, sys
folder = pathlib.Path(sys.argv[1]) / "horovod-0.28.1.dist-info"
folder.mkdir()
(folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.28.1\\n")
sys.path.append(sys.argv[1])
try:
    import horovod
except ImportError as error:
    print(error)
"""


@pytest.mark.ranks
def test_a_second_horovod_is_refused_with_the_two_lines_that_repair_it(tmp_path):
    done = subprocess.run([sys.executable, "-c", _TWO_HOROVODS, tmp_path], capture_output=True, text=True, check=True)
    assert "horovod 0.28.1 and megaclass-horovod are both installed" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "  pip uninstall -y horovod megaclass-horovod",
        "  pip install megaclass-horovod",
    ]


_ALONE = """
import sys, horovod
assert horovod.__version__ == "0.28.1" and "torch" not in sys.modules
import horovod.torch as hvd
hvd.init()
print(hvd.rank(), hvd.size(), callable(horovod.run))
"""


@pytest.mark.ranks
def test_without_a_starter_a_process_is_rank_0_of_1():
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, check=True)
    assert done.stdout == "0 1 True\n"


@pytest.mark.ranks
def test_the_old_place_of_the_api_names_the_new_one():
    done = subprocess.run([sys.executable, "-c", "import megaclass.hvd"], capture_output=True, text=True, check=False)
    assert "pip install megaclass[horovod]" in done.stderr and "import horovod.torch as hvd" in done.stderr


@pytest.mark.ranks
def test_horovodrun_works_as_typed():
    program = "import os; print(os.environ['HOROVOD_RANK'], 'RANK' in os.environ)"
    command = [Path(sys.executable).with_name("horovodrun"), "-np", "2", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:0 False", "[1]<stdout>:1 False"]
