"""The end of gloo's threads before the interpreter finalises (distributed/gloo_exit.py)."""

import subprocess
import sys

import pytest
from tests.forked import ended_ranks, python_script, run_forked

SCRIPT_OF_A_USER = """
import atexit, os, pathlib, sys, torch, torch.distributed as dist

def show_threads():  # registered first, called last
    names = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("gloo threads left:", any(name.startswith("pt_gloo") for name in names), "group:", dist.is_initialized(), flush=True)
    if dist.is_initialized():
        os._exit(0)  # Such a process aborts now and then while it finalises, which is not what is tested here.

atexit.register(show_threads)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "head":
    from megaclass import PartialFC
    head = PartialFC(8, 20)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(("has_head", "shown"), [("head", "left: False group: False"), ("none", "group: True")])
def test_a_script_with_a_head_ends_the_group_that_it_forgot_to_destroy(has_head, shown):
    ended = run_forked(python_script, SCRIPT_OF_A_USER, has_head)
    assert ended.returncode == 0 and shown in ended.stdout, ended.stderr


MANY_EXITS = """
import os, sys, tempfile, torch, torch.distributed as dist

# Forked from one process that has imported torch: a pair of ranks then takes a second instead of ten.
codes, is_rank = [], False
for _ in range(int(sys.argv[1])):
    path = tempfile.mktemp(dir=sys.argv[2])
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            is_rank = True
            break
        children.append(child)
    if is_rank:
        break
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
else:
    print({code: codes.count(code) for code in codes})
    sys.exit()

from megaclass_launch.ranks.gloo_exit import end_gloo_at_exit
end_gloo_at_exit()
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
sys.setswitchinterval(100)  # the main thread keeps the GIL, as a busy one does
for _ in range(100):
    work = dist.all_reduce(torch.ones(1000), async_op=True)
work.wait()
"""


@pytest.mark.soak
def test_no_rank_aborts_at_its_end_while_gloo_releases_tensors(tmp_path):
    """Without end_gloo_at_exit, 5 of 16 ranks aborted here (torch 2.13, Python 3.11, two busy cores)."""
    ended = subprocess.run(
        [sys.executable, "-c", MANY_EXITS, "20", str(tmp_path)], capture_output=True, text=True, check=True, timeout=600
    )
    assert ended.stdout.strip() == "{0: 40}", ended.stdout + ended.stderr


GARBAGE_THAT_KEEPS_THE_GROUP = """
import os, sys, torch, torch.distributed as dist
from megaclass_launch.ranks.gloo_exit import end_gloo

rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)
for number in range(20):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(4, 8)).sum().backward()
    model.itself = model
    del model
    sys.setswitchinterval(100)  # the main thread keeps the GIL, as a busy one does
    for _ in range(100):
        work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.wait()
    del work
    end_gloo()
    sys.setswitchinterval(0.005)
print("left 20 groups", flush=True)
"""


@pytest.mark.ranks
def test_leaving_a_group_that_garbage_still_refers_to_does_not_hang():
    """A rank that collects the garbage at once joins a thread that waits for the GIL; it did within 20 groups in each trial."""
    for rank in ended_ranks(2, python_script, GARBAGE_THAT_KEEPS_THE_GROUP, timeout_s=100):
        assert (rank.returncode, rank.stdout) == (0, "left 20 groups\n"), rank.stdout + rank.stderr
