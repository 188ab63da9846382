"""Validates the answers of hosts in `check`: a host may be compromised. Standard library only.

Every field has a type and a range, and terminal control characters are removed from texts. Values that appear in advice,
which users copy into a shell, must also match a pattern: a version, an address, the name of an interface.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megaclass_launch.wire.checks import Check, ip_address, number, or_none, text, truth, whole
from megaclass_launch.wire.protocol import ProtocolError

_LINE = text(max_length=400)
_MAX_ITEMS = 4096
_MAX_PACKAGES = 16
_VERSION = r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,60}|not installed"


def connection_in(reply: Mapping[str, Any]) -> list[str]:
    """Returns the host's SSH_CONNECTION (client address and port, server address and port); empty if it has no such form."""
    told = _checked("ssh", _LINE, reply.get("ssh")).split()
    try:
        return [ip_address(told[0]), told[1], ip_address(told[2]), told[3]] if len(told) == 4 else []
    except ValueError:
        return []


def time_in(reply: Mapping[str, Any]) -> float:
    """Returns the host's clock in seconds since 1970."""
    return float(_checked("time", number, reply.get("time")))


def facts_in(reply: Mapping[str, Any], workdir: str) -> dict[str, Any]:
    """Returns the host's facts. workdir: the folder in the question; the answer can only confirm that it exists."""
    facts: dict[str, Any] = _checked("facts", _FACTS, reply)
    return {**facts, "workdir": workdir if facts["workdir"] is not None else None}


def listening_in(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the port at which the host listens, or the fault."""
    found: dict[str, Any] = _checked("listen", _fields(port=whole(most=65535), fault=or_none(_LINE)), reply)
    return found


def reached_in(reply: Mapping[str, Any], peers: Collection[str]) -> dict[str, Any]:
    """Returns which peers the host could not reach. peers: exactly these must be in the answer."""
    check = _fields(
        towards=or_none(text(r"[0-9A-Za-z._@:-]{1,15}")),
        faults=_fields(**dict.fromkeys(peers, or_none(_LINE))),
    )
    found: dict[str, Any] = _checked("reach", check, reply)
    return found


def rows_in(rows: Any) -> list[dict[str, Any]]:
    """Returns the rows of `bench allreduce`, two per backend, or no rows if they have any other form."""
    try:
        found: list[dict[str, Any]] = _list_of(_ROW)(rows)
    except ValueError:
        return []
    backends = [row["backend"] for row in found]
    if not all(backends.count(backend) == 2 for backend in backends):
        return []
    # The other columns are only shown as JSON, which escapes control characters.
    return [{**row, **checked} for row, checked in zip(rows, found, strict=True)]


def _checked(name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ProtocolError(f"its answer about {name} is invalid: expected {error}") from None


def _list_of(check: Check, least: int = 0) -> Check:
    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= _MAX_ITEMS:
            raise ValueError(f"a list of {least} to {_MAX_ITEMS} items")
        return [check(item) for item in value]

    return check_all


def _fields(optional: Sequence[str] = (), /, **checks: Check) -> Check:
    """Checks a JSON object with these fields; other fields are dropped."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("an object")
        found = {}
        for name, check_one in checks.items():
            if name not in value and name in optional:
                continue
            try:
                found[name] = check_one(value.get(name))
            except ValueError as error:
                raise ValueError(f"{error} in {name}") from None
        return found

    return check


def _interfaces(value: Any) -> dict[str, list[str]]:
    if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
        raise ValueError("addresses by interface")
    names = [text(r"[0-9A-Za-z._@:-]{1,15}")(name) for name in value]
    return dict(zip(names, map(_list_of(ip_address, least=1), value.values()), strict=True))


def _by_name(check: Check, *needed: str) -> Check:
    """Checks a JSON object of a few values keyed by names of packages."""

    def check_all(value: Any) -> dict[str, Any]:
        is_named = isinstance(value, dict) and all(re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,40}", name) for name in value)
        if not is_named or len(value) > _MAX_PACKAGES or not set(needed) <= value.keys():
            raise ValueError(f"at most {_MAX_PACKAGES} values by package")
        return {name: check(one) for name, one in value.items()}

    return check_all


_ROW = _fields(backend=text(r"[a-z0-9_]{1,20}"), ranks=whole(), time_us=number, bus_gbps=number)

_GPU = _fields(
    ("fault", "microseconds", "is_right", "free_bytes", "total_bytes"),
    name=_LINE, fault=_LINE, microseconds=number, is_right=truth, free_bytes=whole(), total_bytes=whole(),
)  # fmt: skip

_WORKING_TORCH = _fields(
    ("why_unusable",),
    version=text(_VERSION), cuda=or_none(text(r"[0-9]{1,3}\.[0-9]{1,3}")), gloo=truth, nccl=or_none(_LINE),
    is_usable=truth, gpus=_list_of(_GPU), why_unusable=_LINE,
)  # fmt: skip


def _torch(value: Any) -> dict[str, Any]:
    is_faulty = isinstance(value, dict) and "fault" in value
    found: dict[str, Any] = (_fields(fault=_LINE) if is_faulty else _WORKING_TORCH)(value)
    for gpu in found.get("gpus", ()):
        if "fault" not in gpu and not {"microseconds", "is_right", "free_bytes", "total_bytes"} <= gpu.keys():
            raise ValueError("a fault or measurements of each GPU")
    return found


_FACTS = _fields(
    hostname=_LINE,
    python=text(_VERSION),
    versions=_by_name(text(_VERSION), "Python", "torch"),
    megaclass=text(_VERSION),
    code=_by_name(text(r"[0-9a-f]{1,64}")),
    config=or_none(text(r"[0-9a-f]{1,64}")),
    torch=or_none(_torch),
    tensorflow=or_none(text(_VERSION)),
    keras=or_none(text(_VERSION)),
    mpi=or_none(_LINE),
    driver=or_none(_LINE),
    driver_cuda=or_none(text(r"[0-9]{1,3}\.[0-9]{1,3}")),
    num_gpus_present=whole(most=_MAX_ITEMS),
    visible_devices=or_none(_LINE),
    num_cpus=whole(most=1 << 20),
    interfaces=_interfaces,
    workdir=or_none(_LINE),
    free_disk_bytes=or_none(whole()),
    free_shared_bytes=or_none(whole()),
)
