"""hvd leaves torch.distributed's default group to the script, as Horovod does."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.forked import ended_ranks, python_script, torchrun

pytestmark = pytest.mark.ranks

_LEFT_ALONE = """
import torch, torch.distributed as dist, horovod.torch as hvd
hvd.init(process_sets="dynamic")
some = hvd.add_process_set([0])
assert not dist.is_initialized()
total = torch.full((3,), float(hvd.rank()))
if hvd.rank() == 0:
    assert hvd.allreduce(total, op=hvd.Sum, process_set=some).tolist() == [0.0] * 3
assert hvd.allgather(torch.ones(hvd.rank() + 1, 2)).shape == (3, 2)
assert hvd.broadcast(total, root_rank=1).tolist() == [1.0] * 3
assert hvd.allreduce(total.clone(), op=hvd.Adasum).isfinite().all()
assert hvd.allreduce(total, op=hvd.Sum, compression=hvd.Compression.fp16).tolist() == [1.0] * 3
assert not dist.is_initialized()
hvd.shutdown()
assert not dist.is_initialized()
print("ok")
"""


@pytest.mark.ranks
def test_init_and_operations_leave_the_default_group_alone():
    for done in ended_ranks(2, python_script, _LEFT_ALONE):
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


_TORCHMETRICS = """
import torch, torchmetrics, horovod.torch as hvd
hvd.init()
metric = torchmetrics.SumMetric()
metric.update(10.0)
# Were torch.distributed initialised, compute() would sum over the ranks, and wait for all of them.
print(hvd.allreduce(metric.compute(), op=hvd.Sum).item())
if hvd.rank() == 0:
    print(metric.compute().item())
"""


@pytest.mark.ranks
@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
def test_metrics_of_torchmetrics_stay_those_of_the_rank():
    ranks = ended_ranks(2, python_script, _TORCHMETRICS)
    expected = [(0, "20.0\n10.0\n"), (0, "20.0\n")]
    assert [(rank.returncode, rank.stdout) for rank in ranks] == expected, ranks


_IGNITE = """
import torch, horovod.torch as hvd
hvd.init()
import ignite.distributed as idist
from ignite.engine import Engine
from ignite.metrics import Average
assert idist.model_name() == "horovod-dist", idist.model_name()
engine = Engine(lambda engine, batch: batch)
Average().attach(engine, "mean")
mean = engine.run([float(hvd.rank()), float(hvd.rank()) + 2.0]).metrics["mean"]
assert torch.distributed.is_initialized() is False
print(float(mean), hvd.allreduce(torch.tensor(float(mean)), op=hvd.Sum).item())
"""


@pytest.mark.ranks
@pytest.mark.skipif(find_spec("ignite") is None, reason="ignite is not installed")
def test_ignite_finds_horovod_and_averages_its_metrics_over_ranks():
    ranks = ended_ranks(2, python_script, _IGNITE)
    # Alone, rank 0 has the mean 1.0 and rank 1 the mean 2.0.
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "1.5 3.0\n")] * 2, ranks


_OWN_GROUP = """
import os, sys, torch, torch.distributed as dist, horovod.torch as hvd

def sums():
    own = torch.ones(1)
    dist.all_reduce(own)
    return own.item(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

if sys.argv[1] == "before":
    dist.init_process_group("gloo")
    hvd.init()
else:
    hvd.init()
    dist.init_process_group("gloo")
assert sums() == (2.0, 2.0)
hvd.shutdown()
dist.barrier()
hvd.init()
assert sums() == (2.0, 2.0)
# Whichever goes first, the other one stays.
if sys.argv[2] == "hvd":
    hvd.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
else:
    dist.destroy_process_group()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
print("ok", flush=True)
hvd.shutdown()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(("when", "first_to_go"), [("before", "torch"), ("after", "hvd")])
def test_a_script_may_initialise_torch_distributed_itself(tmp_path: Path, when, first_to_go):
    (tmp_path / "both.py").write_text(_OWN_GROUP)
    command = [sys.executable, "-m", "megaclass", "run", "-np", "2", sys.executable, "both.py", when, first_to_go]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ok") == 2


@pytest.mark.ranks
def test_under_torchrun_a_script_may_initialise_torch_distributed_itself(tmp_path: Path):
    (tmp_path / "both.py").write_text(_OWN_GROUP)
    for when, first_to_go in (("before", "hvd"), ("after", "torch")):
        run = torchrun(2, python_script, tmp_path / "both.py", when, first_to_go)
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.count("ok") == 2
