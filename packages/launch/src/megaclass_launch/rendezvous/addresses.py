"""Network interfaces and addresses of this host. The only place that asks the kernel for them. Standard library only.

`rank0_address` uses it to find the address of rank 0; launch/network.py builds ports and interface choices on it.
"""

import errno
import ipaddress
import socket
import struct
from pathlib import Path

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
