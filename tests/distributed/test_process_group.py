"""Joining the others: which device, how loudly idle GPUs are told, and what is said when nobody is there."""

import socket
import time

import pytest
import torch
import torch.distributed as dist
from tests.conftest import free_port

from megaclass.distributed import process_group as groups
from megaclass.distributed.process_group import choose_device, process_group, unused_gpus
from megaclass.errors import LaunchError
from megaclass.world import World

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_a_world_of_one_joins_a_group_of_one_and_leaves_it():
    with process_group(World(), device="cpu") as device:
        assert device == torch.device("cpu")
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1]
    assert not dist.is_initialized()


def test_the_group_is_left_when_the_block_raises():
    with pytest.raises(ZeroDivisionError), process_group(World(), device="cpu"):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_every_rank_says_which_device_it_uses(caplog):
    with caplog.at_level("INFO"), process_group(World(), device="cpu"):
        pass
    (record,) = caplog.records
    assert record.sender == f"rank 0 of 1 on {socket.gethostname()}"
    assert record.getMessage().startswith("cpu (") and record.getMessage().endswith(", gloo")


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


def test_a_rank_that_cannot_reach_rank_0_gives_up_in_time_and_says_where_it_looked(monkeypatch, caplog):
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
    assert f"has not reached rank 0 at 127.0.0.1 port {port} for 0.3 s and keeps trying" in caplog.text


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
