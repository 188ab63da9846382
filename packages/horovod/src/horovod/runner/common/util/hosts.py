"""Hosts with their slots, and the ranks on them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megaclass_launch.hosts import Host, hosts_from_file
from megaclass_launch.placement import place_ranks, places_on, worlds_of


@dataclass
class HostInfo:
    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> "HostInfo":
        hostname, slots = host_string.strip().split(":")
        return HostInfo(hostname, int(slots))


@dataclass
class SlotInfo:
    """The host and the numbers of a rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def parse_host_files(filename: str) -> str:
    """Reads lines such as `gpu-1 slots=8` and returns them as gpu-1:8,gpu-2:8."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts_from_file(Path(filename)))


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    if any(not re.fullmatch(r"[\w.-]+:[0-9]+", part.strip()) for part in hosts.split(",")):
        raise ValueError("Invalid host input, please make sure it has format as : worker-0:2,worker-1:2.")
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    return [HostInfo.from_string(part) for part in hosts_string.split(",")]


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Assigns a rank to each slot, host by host, up to `max_num_proc`; raises ValueError for fewer than `min_num_proc`."""
    num_slots = sum(host.slots for host in hosts)
    size = num_slots if max_num_proc is None else min(num_slots, max_num_proc)
    if size < min_num_proc:
        raise ValueError(f"Requested more processes ({min_num_proc}) than there are available slots ({size})")
    places = places_on(place_ranks([Host(name=host.hostname, slots=host.slots) for host in hosts], size))
    return [
        SlotInfo(name, *(getattr(world, field.name) for field in fields(SlotInfo)[1:]))
        for (name, _), world in zip(places, worlds_of(places), strict=True)
    ]
