"""Which GPU a rank takes, and when two ranks on one GPU are refused; nothing here needs a GPU."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megaclass_launch.errors import LaunchError
from megaclass_launch.ranks import process_group as groups
from megaclass_launch.ranks.devices import gpu_of_rank, ranks_sharing_a_gpu, visible_gpus
from megaclass_launch.ranks.process_group import choose_device
from megaclass_launch.world import World


def see(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """Makes torch see these GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))


@pytest.mark.parametrize(
    ("local_rank", "num_visible", "expected"),
    [(0, 1, 0), (3, 8, 3), (3, 1, 0), (3, 2, None), (2, 2, None), (0, 0, None)],
)
def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees(local_rank, num_visible, expected):
    assert gpu_of_rank(local_rank, num_visible) == expected


def test_the_device_of_a_rank_that_sees_one_gpu_is_that_one(monkeypatch):
    see(monkeypatch, "a")
    world = World(rank=3, size=4, local_rank=3, local_size=4, port=1)
    assert choose_device("auto", world) == choose_device("cuda", world) == torch.device("cuda", 0)


def test_a_rank_without_a_gpu_among_several_is_refused(monkeypatch):
    see(monkeypatch, "a", "b")
    with pytest.raises(LaunchError, match=r"local rank 2, but torch sees 2 GPU\(s\) here.*choose the device cpu"):
        choose_device("cuda", World(rank=2, size=3, local_rank=2, local_size=3, port=1))


def test_gpus_are_told_apart_by_their_uuid_and_by_nccl_s_host(monkeypatch):
    see(monkeypatch, "a", "b")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert visible_gpus() == ["a", "b"]
    monkeypatch.setenv("NCCL_HOSTID", "h1")
    assert visible_gpus() == ["a on NCCL host h1", "b on NCCL host h1"]
    see(monkeypatch)
    assert visible_gpus() == []


def test_the_first_two_ranks_on_one_gpu_are_found():
    assert ranks_sharing_a_gpu(["a", "b", "c"]) is None
    assert ranks_sharing_a_gpu(["a", "b", "c", "b", "a"]) == (1, 3)


def refusals(monkeypatch: pytest.MonkeyPatch, *gpus_W: str) -> list[str]:
    """The errors of all ranks, each a thread that uses one of these GPUs; "" for a rank that starts."""
    monkeypatch.setattr(groups, "visible_gpus", lambda: list(gpus_W))
    store, size = dist.HashStore(), len(gpus_W)

    def error_of(rank: int) -> str:
        try:
            groups._check_no_shared_gpu(store, torch.device("cuda", rank), World(rank=rank, size=size, port=1))
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(error_of, range(size)))


def test_ranks_of_one_host_that_see_one_gpu_each_start_if_the_gpus_differ(monkeypatch):
    assert refusals(monkeypatch, "a", "b", "c") == ["", "", ""]


def test_two_ranks_on_one_gpu_are_refused_on_every_rank_with_their_numbers(monkeypatch):
    errors = refusals(monkeypatch, "a", "a", "a")
    for rank, error in enumerate(errors):
        assert error.startswith(f"rank {rank} of 3 on ")
        assert "ranks 0 and 1 would share GPU a" in error and "NCCL_HOSTID" in error


def test_ranks_that_count_as_hosts_may_share_a_gpu(monkeypatch):
    assert refusals(monkeypatch, "a on NCCL host h0", "a on NCCL host h1") == ["", ""]
