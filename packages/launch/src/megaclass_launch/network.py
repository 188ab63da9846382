"""Addresses, interfaces and ports of this host. Standard library only."""

import socket
from collections.abc import Sequence

from megaclass_launch.errors import LaunchError
from megaclass_launch.rendezvous.addresses import interface_holding, interfaces, source_towards
from megaclass_launch.rendezvous.socket_offer import SocketOffer

_BACKLOG = 4096


def interface_towards(address: str) -> str | None:
    """Returns the interface over which packets for the address leave, or None without a route. Nothing is sent."""
    own = source_towards(address)
    return interface_holding(own) if own is not None else None


def present(wanted: Sequence[str]) -> list[str]:
    """Returns those of the interfaces that this host has. Raises LaunchError if it has none of them."""
    found = interfaces()
    if not any(name in found for name in wanted):
        raise LaunchError(
            f"There is no network interface {' or '.join(map(repr, wanted))} with an address: "
            f"the host has {', '.join(sorted(found))}."
        )
    return [name for name in wanted if name in found]


def reserve_port(port: int) -> socket.socket:
    """Holds a port of every interface for the run; 0 takes a free one. Raises LaunchError if it is in use.

    The socket is bound but never listens. The kernel therefore gives the port to no process that asks for any free one,
    while rank 0, which asks for this port with SO_REUSEADDR as torch's store does, gets it.
    """
    try:
        return bound_socket(port)
    except OSError as error:
        host = socket.gethostname()
        if not port:
            raise LaunchError(
                f"{host} has no free port for rank 0 ({error.strerror}): other programs hold all of them, or all open files. "
                f"See `ss -s` and `cat /proc/sys/net/ipv4/ip_local_port_range` there, or name one with --master-port."
            ) from error
        raise LaunchError(
            f"Port {port} is in use on {host} ({error.strerror}): leave --master-port out, and a free one is chosen."
        ) from error


def bound_socket(port: int) -> socket.socket:
    """Returns a socket bound to the port of every interface, IPv4 and IPv6; 0 takes a free one. OSError if it is in use."""
    bound = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


def hold_store_port(address: str = "") -> socket.socket:
    """Holds a free port of the address, or of every interface, on which only processes of this user can listen meanwhile.

    The socket is bound with SO_REUSEPORT and never listens: the kernel gives the port to another socket only if that has
    the same option and belongs to the same user, as that of `offer_store_socket` does.
    """
    is_any = not address and socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if is_any or ":" in address else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if is_any:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind((address, 0))
    return held


def offer_store_socket(held: socket.socket, address: str) -> SocketOffer:
    """Listens at the held port of one address and offers that socket to rank 0. OSError if it is no address of this host.

    Ranks that start before rank 0 then connect at once and wait for it, and no other process ever gets the port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, held.getsockname()[1]))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return SocketOffer(listener)
