"""Addresses, interfaces and ports of this host. Standard library only."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from megaclass.errors import LaunchError

_SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, list[str]]:
    """Name of each interface that has an address, with its addresses, IPv4 first."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            found.setdefault(name, []).append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def interface_towards(address: str) -> str | None:
    """The interface over which packets for the address leave; None when there is no route. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    return next((name for name, addresses in interfaces().items() if own in addresses), None)


def present(wanted: Sequence[str]) -> list[str]:
    """Those of the interfaces that this host has; LaunchError when it has none of them."""
    found = interfaces()
    if not any(name in found for name in wanted):
        raise LaunchError(
            f"There is no network interface {' or '.join(map(repr, wanted))} with an address: "
            f"the host has {', '.join(sorted(found))}."
        )
    return [name for name in wanted if name in found]


def reserve_port(port: int) -> socket.socket:
    """A port of every interface, held for the run; 0 takes a free one. LaunchError when it is taken.

    The socket is bound but never listens: the kernel then gives the port to nobody who asks for any free one, while rank 0,
    which asks for this very port with SO_REUSEADDR as torch's store does, gets it.
    """
    held = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if held.family == socket.AF_INET6:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        held.bind(("", port))
    except OSError as error:
        held.close()
        raise LaunchError(
            f"Port {port} is taken on {socket.gethostname()} ({error.strerror}): "
            f"leave --master-port out, and a free one is chosen."
        ) from error
    return held
