import socket
from collections.abc import Sequence

from megaclass.distributed.network.addresses import own_addresses
from megaclass.launch.hosts import is_this_machine


def get_local_host_addresses() -> set[str]:
    return {*own_addresses(), "127.0.0.1"}


def resolve_host_address(host_name: str) -> str | None:
    try:
        return socket.gethostbyname(host_name)
    except socket.gaierror:
        return None


def filter_local_addresses(all_host_names: Sequence[str]) -> list[str]:
    """Returns the hosts that are not this machine."""
    return [name for name in all_host_names if not is_this_machine(name)]
