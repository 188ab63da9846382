"""Joining the others: which device, how loudly idle GPUs are told, and what is said when nobody is there."""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.conftest import free_port

from megaclass_launch.errors import LaunchError
from megaclass_launch.ranks import process_group as groups
from megaclass_launch.ranks.process_group import (
    abort_nccl,
    choose_device,
    outlive_lost_ranks,
    process_group,
    unused_gpus,
)
from megaclass_launch.rendezvous.rank0_address import name_interfaces
from megaclass_launch.world import World

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_a_world_of_one_joins_a_group_of_one_and_leaves_it():
    with process_group(World(), device="cpu") as device:
        assert device == torch.device("cpu")
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1]
    assert not dist.is_initialized()


def test_after_an_error_the_group_stays_until_the_process_joins_another():
    """Destroying it may wait for the other ranks, and the error is not printed yet."""
    with pytest.raises(ZeroDivisionError), process_group(World(), device="cpu"):
        raise ZeroDivisionError
    assert dist.is_initialized()
    with process_group(World(), device="cpu"):
        dist.barrier()
    assert not dist.is_initialized()


def test_a_process_of_an_elastic_job_goes_on_after_an_error_without_its_group():
    with pytest.raises(ZeroDivisionError), process_group(World(), device="cpu", ends_process=False):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_the_interface_of_a_group_is_not_that_of_the_next_one_and_not_that_of_other_programs(monkeypatch):
    """Ranks of one machine talk over loopback. A generation with further hosts, or a job that is started later, must not."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    name_interfaces(World(rank=0, size=2, local_size=2, address="127.0.0.1"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    name_interfaces(World(rank=0, size=3, local_size=2, address="127.0.0.1"))
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    world = World(rank=1, size=2, local_rank=1, local_size=2, address="127.0.0.1", port=free_port())
    with pytest.raises(LaunchError), process_group(world, device="cpu", join_s=0.5):
        pass
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    name_interfaces(World(rank=0, size=2, local_size=2, address="127.0.0.1"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_process_of_an_elastic_job_outlives_lost_ranks_unless_the_user_says_otherwise():
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    outlive_lost_ranks(env)
    # Otherwise torch's watchdog sleeps for a minute before it aborts, and holds a lock that the training thread needs.
    expected = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
    assert env == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **expected}


class _NcclGroup:
    """Stands for a group of NCCL, which is aborted twice: the second time torch raises."""

    def __init__(self) -> None:
        self.num_aborts = 0

    def _get_backend(self, device: torch.device) -> "_NcclGroup":
        assert device.type == "cuda"
        return self

    def abort(self) -> None:
        self.num_aborts += 1
        if self.num_aborts > 1:
            raise RuntimeError("already aborted")


def test_an_abort_ends_operations_of_nccl_and_leaves_the_default_group_in_place(monkeypatch):
    """Without a default group the training thread would take this rank for a world of one and continue alone."""
    abort_nccl()
    with process_group(World(), device="cpu"):
        abort_nccl()
        # gloo's operations end with their connections.
        dist.barrier()
        group = _NcclGroup()
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda: dist.Backend.NCCL)
            patch.setattr(dist, "group", SimpleNamespace(WORLD=group))
            abort_nccl()
            abort_nccl()
        assert dist.is_initialized() and group.num_aborts == 2


def test_every_rank_says_which_device_it_uses(capsys):
    with process_group(World(), device="cpu"):
        pass
    err = capsys.readouterr().err
    assert err.startswith(f"rank 0 of 1 on {socket.gethostname()}: cpu (")
    assert err.endswith(", gloo\n")


@needs_no_gpu
def test_without_a_gpu_auto_is_the_cpu():
    assert choose_device("auto", World()) == torch.device("cpu")


@needs_no_gpu
def test_asking_for_a_gpu_where_there_is_none_names_rank_host_and_what_to_check():
    with pytest.raises(LaunchError) as caught, process_group(World(rank=1, size=2, port=1), device="cuda"):
        pass
    assert f"rank 1 of 2 on {socket.gethostname()} was asked for device 'cuda'" in str(caught.value)
    assert "nvidia-smi" in str(caught.value)


def test_an_unknown_device_is_refused():
    with pytest.raises(LaunchError, match="Unknown device 'tpu': expected auto, cpu or cuda"):
        choose_device("tpu", World())


@needs_no_gpu
def test_gpus_that_the_driver_shows_but_torch_cannot_use_are_warned_about(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    (warning,) = unused_gpus(torch.device("cpu"), World(), driver=tmp_path)
    assert f"the driver shows 2 GPU(s) on {socket.gethostname()}, but torch {torch.__version__} cannot use" in warning
    assert "training on the CPU" in warning


@needs_no_gpu
def test_where_there_is_no_gpu_nobody_is_warned(tmp_path):
    assert unused_gpus(torch.device("cpu"), World(), driver=tmp_path) == []
    assert unused_gpus(torch.device("cpu"), World(), driver=tmp_path / "no driver") == []


def test_a_rank_that_cannot_reach_rank_0_gives_up_in_time_and_says_where_it_looked(monkeypatch, capsys):
    port = free_port()
    monkeypatch.setattr(groups, "_HINT_S", 0.3)
    begun = time.monotonic()
    with (
        pytest.raises(LaunchError) as caught,
        process_group(World(rank=1, size=2, local_rank=1, local_size=2, port=port), device="cpu", timeout_s=1.5),
    ):
        pass
    assert time.monotonic() - begun < 30
    expected = f"rank 1 of 2 on {socket.gethostname()} cannot join the others at 127.0.0.1:{port} within 1.5 s"
    assert expected in str(caught.value)
    assert f"has not reached rank 0 at 127.0.0.1 port {port} for 0.3 s and keeps trying" in capsys.readouterr().err


def test_rank_0_gives_up_waiting_for_ranks_that_never_come():
    port = free_port()
    with pytest.raises(LaunchError) as caught, process_group(World(size=2, port=port), device="cpu", timeout_s=1.5):
        pass
    assert f"rank 0 of 2 on {socket.gethostname()} cannot join the others at 127.0.0.1:{port}" in str(caught.value)
    assert not dist.is_initialized()


def test_a_port_that_another_program_holds_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(LaunchError, match=str(port)),
            process_group(World(size=2, port=port), device="cpu", timeout_s=5),
        ):
            pass


FAILS = """
import sys
import torch
import torch.distributed as dist
from megaclass.cli import main as module
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import world_from_environment

destroy = dist.destroy_process_group
def recorded(group=None):
    print("destroyed", file=sys.stderr, flush=True)
    destroy(group)
dist.destroy_process_group = recorded

def main():
    world = world_from_environment()
    with process_group(world, device="cpu"):
        for step in range(3):
            # The others have work under way that this rank will never join.
            if step == 2 and world.rank == world.size - 1:
                raise RuntimeError("out of memory in forward")
            dist.all_reduce(torch.ones(1000))
    return 0

module.main = main
module.command()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_fails_says_so_before_its_group_ends_and_all_ranks_end(tmp_path, size):
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    port = str(free_port())
    ranks = []
    for rank in range(size):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
        ranks.append(subprocess.Popen([sys.executable, program], env=env, stderr=subprocess.PIPE, text=True))
    try:
        errs = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1] * size
    message, _, after = errs[-1].partition("RuntimeError: out of memory in forward\n")
    assert "destroyed" not in message and after in ("", "destroyed\n")
    assert not any("terminate called" in err for err in errs)
