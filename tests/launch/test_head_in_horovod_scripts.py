"""Horovod scripts that have no default group of torch.distributed: with the head, and with several init()."""

import json
import sys

import pytest

SCRIPT = """
import json, sys, torch, torch.distributed as dist
import horovod.torch as hvd
from megaclass import PartialFC
from megaclass.errors import HeadError

hvd.init()
device = torch.device("cpu")
if sys.argv[1:] == ["cuda"]:
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
assert not dist.is_initialized()
if hvd.size() > 1:
    try:
        PartialFC(8, 30)
        raise SystemExit("a head without a group was built")
    except HeadError as error:
        assert f"one of {hvd.size()} processes" in str(error) and "group=hvd.global_process_set" in str(error), error
torch.manual_seed(0)
net = torch.nn.Linear(6, 8).double().to(device)
head = PartialFC(8, 30, group=hvd.global_process_set, storage="float64", sample_rate=0.5, max_batch=8,
                  device=device)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
losses = []
share = slice(hvd.rank() * 8 // hvd.size(), (hvd.rank() + 1) * 8 // hvd.size())
for step in range(6):
    generator = torch.Generator().manual_seed(step)
    images, labels = torch.randn(8, 6, generator=generator).double(), torch.randint(30, (8,), generator=generator)
    optimizer.zero_grad()
    loss = head(net(images[share].to(device)), labels[share].to(device))
    # Beside the head, whose collectives must not meet those of the engine.
    pending = hvd.allreduce_async(torch.ones(1000, device=device) * step, name=f"beside.{step}")
    loss.backward()
    optimizer.step()
    head.step(lr=0.1)
    assert hvd.synchronize(pending)[0] == step
    losses.append(loss.item())
if hvd.rank() == 0:
    print("losses", json.dumps(losses), flush=True)
hvd.shutdown()
"""


@pytest.mark.ranks
def test_a_head_in_a_horovod_script_has_the_same_curve_on_any_number_of_ranks(run, tmp_path):
    program = tmp_path / "job.py"
    program.write_text(SCRIPT)
    curves = []
    for size in (1, 2, 4):
        done = run("-np", str(size), "--horovod", sys.executable, str(program), timeout_s=120)
        assert done.code == 0, done.story()
        line = next(line for line in done.out.splitlines() if "losses" in line)
        curves.append(json.loads(line.partition("losses ")[2]))
    assert len(set(curves[0])) == 6
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-9)


REPLAY = """
import torch
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.functions import _Envelope

hvd.init()
# What a listener records of the first exchange under this name.
recorded = _Envelope("state", hvd.global_process_set).sealed({"step": 1}, 0)
hvd.shutdown()
hvd.init()
envelope = _Envelope("state", hvd.global_process_set)
assert envelope.opened(envelope.sealed({"step": 2}, 0), 0) == {"step": 2}
try:
    envelope.opened(recorded, 0)
    print("accepted", flush=True)
except HorovodInternalError as error:
    print("refused", error, flush=True)
hvd.shutdown()
"""


@pytest.mark.ranks
def test_an_object_recorded_before_shutdown_is_refused_after_the_next_init(run, tmp_path):
    program = tmp_path / "job.py"
    program.write_text(REPLAY)
    done = run("-np", "2", "--horovod", sys.executable, str(program), timeout_s=120)
    assert done.code == 0, done.story()
    assert done.out.count("refused") == 2 and "accepted" not in done.out, done.story()
