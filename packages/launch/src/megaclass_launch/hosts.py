"""Hosts with their slots: from -H, a host file, or the current batch system. Standard library only."""

import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaclass_launch.errors import LaunchError, clipped
from megaclass_launch.world import slurm_hosts, tasks_on_slurm_nodes

# ASCII only, without a dash in front: ssh would take other names for options.
# No two dots in a row: Python's name look-up raises UnicodeError for an empty part.
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*"
_NAME = re.compile(rf"(?:{_WORD}@)?(?:{_WORD}|\[[0-9A-Fa-f:.]+(?:%{_WORD})?\])")
_MAX_NAME = 255
_MAX_SLOTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    name: str
    """As ssh accepts it: a name of ssh_config or of the name service, or an address; optionally with user@ in front."""
    slots: int
    is_local: bool = False
    """This machine, which needs no ssh."""
    address: str = ""
    """Address at which other hosts reach it, if that is known in advance."""


def given_hosts(listed: str | None, hostfile: Path | None) -> list[Host]:
    """Returns the hosts of -H or --hostfile; an empty list if neither was given."""
    if listed is not None:
        return hosts_from_option(listed)
    return hosts_from_file(hostfile) if hostfile is not None else []


def hosts_from_option(text: str) -> list[Host]:
    """Parses -H gpu-1:8,gpu-2:8."""
    where = f"in --hosts {clipped(text)}"
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip(" ").rpartition(":")
        if not colon or not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            hint = "; write an IPv6 address in brackets, [fd00::1]:8" if part.count(":") > 1 else ""
            raise LaunchError(
                f"Cannot read host {clipped(part)} {where}: "
                f"expected <name>:<slots> with at least one slot, for example gpu-1:8{hint}."
            )
        hosts.append(Host(name=name, slots=_slots(slots, part, where), is_local=is_this_machine(name)))
    return _checked(hosts, where)


def hosts_from_file(path: Path) -> list[Host]:
    """Parses lines `gpu-1 slots=8`; empty lines and comments after a # are ignored."""
    hosts = []
    for number, line in enumerate(_text_of(path, str(path)).splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"in line {number} of {path}"
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\S+)", content)
        if match is None or not _NAME.fullmatch(match[1]) or len(match[1]) > _MAX_NAME:
            raise LaunchError(f"Cannot read {clipped(content)} {where}: expected for example `gpu-1 slots=8`.")
        slots = _slots(match[2], content, where)
        hosts.append(Host(name=match[1], slots=slots, is_local=is_this_machine(match[1])))
    if not hosts:
        raise LaunchError(f"The host file {path} names no host: expected lines such as `gpu-1 slots=8`.")
    return _checked(hosts, f"in {path}")


def hosts_from_batch_system(env: Mapping[str, str]) -> tuple[list[Host], str] | None:
    """Returns the hosts that Slurm, PBS or LSF gave this job and a description of the job; None outside of them."""
    if nodes := env.get("SLURM_JOB_NODELIST"):
        names = slurm_hosts(nodes)
        tasks = tasks_on_slurm_nodes(env.get("SLURM_TASKS_PER_NODE") or f"1(x{len(names)})")
        if len(tasks) != len(names):
            raise LaunchError(
                f"Slurm's variables disagree: SLURM_JOB_NODELIST={clipped(nodes)} names {len(names)} hosts, "
                f"SLURM_TASKS_PER_NODE={env.get('SLURM_TASKS_PER_NODE')!r} {len(tasks)}. Give the hosts with -H."
            )
        return _named(dict(zip(names, tasks, strict=True)), f"Slurm job {env.get('SLURM_JOB_ID', '?')}")
    for variable, system, job in (
        ("PBS_NODEFILE", "PBS", env.get("PBS_JOBID", "?")),
        ("LSB_DJOB_HOSTFILE", "LSF", env.get("LSB_JOBID", "?")),
    ):
        if path := env.get(variable):
            return _named(_lines_counted(Path(path), variable), f"{system} job {job} ({variable}={path})")
    return None


def is_this_machine(name: str) -> bool:
    """Returns whether processes for this host can be started here. Another user's login (user@) goes through ssh."""
    bare = name.strip("[]").lower()
    own = socket.gethostname().lower()
    if bare in ("localhost", own) or (bare == own.partition(".")[0]):
        return True
    is_address = re.fullmatch(r"[0-9.]+|[0-9a-f:.]+(%.+)?", bare) is not None
    # A name service that does not answer would cost seconds per host: it is asked only if the first part is our name.
    if "@" in bare or not (is_address or bare.partition(".")[0] == own.partition(".")[0]):
        return False
    try:
        family, kind, _, _, address = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)  # works for addresses of this machine alone
    except (OSError, UnicodeError):  # UnicodeError: a part of the name has more than 63 characters
        return False
    return True


def _slots(text: str, part: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= _MAX_SLOTS:
        raise LaunchError(
            f"Cannot read the slots {clipped(text)} of {clipped(part)} {where}: "
            f"expected a whole number from 1 to {_MAX_SLOTS}, for example gpu-1:8."
        )
    return int(text)


def _checked(hosts: Sequence[Host], where: str) -> list[Host]:
    """Raises LaunchError for a name that is listed twice.

    Two names of this machine are two hosts, as for horovodrun, so several hosts can be tried out on one machine.
    """
    seen: dict[str, Host] = {}
    for host in hosts:
        key = host.name.lower()
        if key in seen:
            both = seen[key].slots + host.slots
            raise LaunchError(f"Host {host.name!r} is listed twice {where}: write it once, {host.name}:{both}.")
        seen[key] = host
    return list(hosts)


def _named(slots_by_name: Mapping[str, int], what: str) -> tuple[list[Host], str]:
    for name in slots_by_name:
        if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            raise LaunchError(f"{what} names a host {clipped(name)}, which is not a host name. Give the hosts with -H.")
    hosts = [Host(name=name, slots=slots, is_local=is_this_machine(name)) for name, slots in slots_by_name.items()]
    listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    return _checked(hosts, f"in {what}"), f"{what}: {listed}"


def _lines_counted(path: Path, variable: str) -> dict[str, int]:
    """Parses a host file of PBS or LSF, with one line per slot."""
    counts = Counter(_text_of(path, f"{variable}={path}", " Give the hosts with -H.").split())
    if not counts:
        raise LaunchError(f"The host file {variable}={path} is empty. Give the hosts with -H.")
    return counts


def _text_of(path: Path, name: str, advice: str = "") -> str:
    """Returns the content of a host file. name, advice: for the error if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LaunchError(f"Cannot read the host file {name}: {reason}.{advice}") from error
