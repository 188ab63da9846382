"""How ranks find each other: the parts that need no second rank."""

import pytest

from horovod.engine import rendezvous
from megaclass_launch.world import World


def test_rank_0_listens_at_the_first_of_several_interfaces(monkeypatch):
    """GLOO_SOCKET_IFNAME may be a list, which mpirun and torchrun pass on without HOROVOD_GLOO_IFACE."""
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,ib1")
    monkeypatch.setattr(rendezvous, "interfaces", lambda: {"ib0": ["10.0.0.1"], "ib1": ["10.0.1.1"]})
    assert rendezvous._own_address(World()) == "10.0.0.1"


@pytest.mark.parametrize(
    ("machines", "gpus", "uses_nccl"),
    [
        # Each rank sees all GPUs of its machine, and takes that of its local rank.
        ("aabb", [["0", "1"], ["0", "1"], ["2", "3"], ["2", "3"]], True),
        # Each rank sees only its own GPU: srun --gpus-per-task=1, MIG, CUDA_VISIBLE_DEVICES per rank.
        ("aab", [["0"], ["1"], ["2"]], True),
        ("aab", [["0"], ["0"], ["2"]], False),
        ("ab", [["0"], ["1"]], True),
        # Three ranks share two GPUs; one rank has none; no rank has one.
        ("aaa", [["0", "1"]] * 3, False),
        ("aa", [["0"], []], False),
        ("aa", [[], []], False),
        # NCCL takes ranks with different values of NCCL_HOSTID for different hosts.
        ("aa", [["0 on NCCL host 1"], ["0 on NCCL host 2"]], True),
    ],
)
def test_nccl_is_used_if_no_two_ranks_share_a_gpu(machines, gpus, uses_nccl):
    assert rendezvous._has_gpu_per_rank(list(machines), gpus) is uses_nccl
