"""Network interfaces, addresses and ports of this host. The only place that asks the kernel for them. Standard library only.

`rank0_address` uses it to find the address of rank 0.
"""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from megaclass_launch.errors import LaunchError
from megaclass_launch.rendezvous.job_secret import LocalOffer, user_of

_SIOCGIFADDR = 0x8915


def own_addresses() -> list[str]:
    """Returns the addresses of this host that other hosts may reach, IPv4 first."""
    addresses = [address for held in interfaces().values() for address in held]
    usable = [
        a for a in addresses if not (ipaddress.ip_address(a).is_loopback or ipaddress.ip_address(a).is_link_local)
    ]
    return sorted(usable, key=lambda address: ":" in address)


def source_towards(address: str) -> str | None:
    """Returns the local address from which packets to `address` leave, or None without a route. Sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # connect() of a datagram socket only asks the routing table, and fixes the address that packets would leave from.
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def is_own(address: str) -> bool:
    """Returns whether the address belongs to this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError as error:
        # Only this error says that the address is another host's; any other leaves the question open.
        return error.errno != errno.EADDRNOTAVAIL
    return True


def interface_holding(address: str) -> str | None:
    """Returns the name of the interface that has this address, or None."""
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of each interface that has any, IPv4 first, keyed by the interface's name."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                import fcntl  # not on Windows

                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            # struct ifreq: 16 bytes of name, then struct sockaddr_in, whose address starts at its byte 4.
            found.setdefault(name, []).append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


# ---- the socket of the store ----
#
# Hands the listening socket of the job's store from the launcher to rank 0.
#
# The launcher listens before it starts any rank, so the port cannot become another user's. Rank 0 asks for the socket at an
# abstract Unix socket, whose name is in its environment. Inheritance would be simpler, but programs between launcher and rank 0
# that close files for their children (Python's subprocess does) would keep the listening socket without ever accepting.


OFFER_NAME = "MEGACLASS_STORE_SOCKET"
_WAIT_S = 10.0


class SocketOffer(LocalOffer):
    """Gives copies of a socket to processes of the same user. `serve` is called once the ranks have started: it is a thread."""

    def __init__(self, offered: socket.socket) -> None:
        super().__init__(self._send)
        self._offered = offered

    def close(self) -> None:
        super().close()
        self._offered.close()

    def _send(self, caller: socket.socket) -> bool:
        # At least one byte has to go with the descriptor, or the kernel drops it.
        socket.send_fds(caller, [b"."], [self._offered.fileno()])
        return True


def take_socket(name: str) -> socket.socket | None:
    """Returns the socket that a process of this user offers at `name`; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_WAIT_S)
        try:
            caller.connect(f"\0{name}")
            # Also checked on this side: another user could have bound the name after the launcher ended.
            files = socket.recv_fds(caller, 1, 1)[1] if user_of(caller) == os.geteuid() else []
        except OSError:
            return None
    return socket.socket(fileno=files[0]) if files else None


# ---- interfaces and ports ----

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


def bound_socket(port: int, address: str = "", *, option: int = socket.SO_REUSEADDR) -> socket.socket:
    """Returns a socket bound to the port of the address, or of every interface, IPv4 and IPv6; 0 takes a free one.

    Raises OSError if it is in use, or not an address of this host.
    """
    is_any = not address and socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if is_any or ":" in address else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        if is_any:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def hold_store_port(address: str = "") -> socket.socket:
    """Holds a free port of the address, or of every interface, on which only processes of this user can listen meanwhile.

    The socket is bound with SO_REUSEPORT and never listens: the kernel gives the port to another socket only if that has
    the same option and belongs to the same user, as that of `offer_store_socket` does.
    """
    return bound_socket(0, address, option=socket.SO_REUSEPORT)


def offer_store_socket(held: socket.socket, address: str) -> SocketOffer:
    """Listens at the held port of one address and offers that socket to rank 0. OSError if it is not an address of this host.

    Ranks that start before rank 0 then connect at once and wait for it, and no other process ever gets the port.
    """
    listener = bound_socket(held.getsockname()[1], address, option=socket.SO_REUSEPORT)
    listener.listen(_BACKLOG)
    return SocketOffer(listener)
