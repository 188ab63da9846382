"""How ranks find each other: the parts that need no second rank."""

from megaclass.hvd.engine import rendezvous
from megaclass.world import World


def test_rank_0_listens_at_the_first_of_several_interfaces(monkeypatch):
    """GLOO_SOCKET_IFNAME may be a list, which mpirun and torchrun pass on without HOROVOD_GLOO_IFACE."""
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,ib1")
    monkeypatch.setattr(rendezvous, "interfaces", lambda: {"ib0": ["10.0.0.1"], "ib1": ["10.0.1.1"]})
    assert rendezvous._own_address(World()) == "10.0.0.1"
