"""Validates the answers of hosts in `megaclass check`: a host may be compromised. Standard library only.

Every field has a type and a range, and terminal control characters are removed from texts. Values that appear in advice,
which users copy into a shell, must also match a pattern: a version, an address, the name of an interface.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megaclass.launch.wire.agent_messages import ip_address
from megaclass.launch.wire.plain_text import plain_text
from megaclass.launch.wire.protocol import ProtocolError

Check = Callable[[Any], Any]

_MOST = 1 << 60
_MAX_ITEMS = 4096
_VERSION = r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,60}|not installed"


def connection_in(reply: Mapping[str, Any]) -> list[str]:
    """Returns the host's SSH_CONNECTION (client address and port, server address and port); empty if it has no such form."""
    told = _checked("ssh", _text(), reply.get("ssh")).split()
    try:
        return [ip_address(told[0]), told[1], ip_address(told[2]), told[3]] if len(told) == 4 else []
    except ValueError:
        return []


def time_in(reply: Mapping[str, Any]) -> float:
    """Returns the host's clock in seconds since 1970."""
    return float(_checked("time", _number, reply.get("time")))


def facts_in(reply: Mapping[str, Any], workdir: str) -> dict[str, Any]:
    """Returns the host's facts. workdir: the folder in the question; the answer can only confirm that it exists."""
    facts: dict[str, Any] = _checked("facts", _FACTS, reply)
    return {**facts, "workdir": workdir if facts["workdir"] is not None else None}


def listening_in(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the port at which the host listens, or the fault."""
    found: dict[str, Any] = _checked("listen", _fields(port=_whole(65535), fault=_or_none(_text())), reply)
    return found


def reached_in(reply: Mapping[str, Any], peers: Collection[str]) -> dict[str, Any]:
    """Returns which peers the host could not reach. peers: exactly these must be in the answer."""
    check = _fields(
        towards=_or_none(_text(r"[0-9A-Za-z._@:-]{1,15}")), faults=_fields(**dict.fromkeys(peers, _or_none(_text())))
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
        raise ProtocolError(f"its answer about {name} is invalid: {error}") from None


def _text(pattern: str | None = None) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("expected a string")
        if pattern is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"{ascii(value)[:80]} is not of the form {pattern}")
        return plain_text(value, 400)

    return check


def _whole(most: int = _MOST) -> Check:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError(f"expected an integer from 0 to {most}")
        return value

    return check


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MOST or not math.isfinite(value):
        raise ValueError("expected a number")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _list_of(check: Check, least: int = 0) -> Check:
    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= _MAX_ITEMS:
            raise ValueError(f"expected a list of {least} to {_MAX_ITEMS}")
        return [check(item) for item in value]

    return check_all


def _fields(optional: Sequence[str] = (), /, **checks: Check) -> Check:
    """Checks a JSON object with these fields; other fields are dropped."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        found = {}
        for name, check_one in checks.items():
            if name not in value and name in optional:
                continue
            try:
                found[name] = check_one(value.get(name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return found

    return check


def _interfaces(value: Any) -> dict[str, list[str]]:
    if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
        raise ValueError("expected addresses by interface")
    names = [_text(r"[0-9A-Za-z._@:-]{1,15}")(name) for name in value]
    return dict(zip(names, map(_list_of(ip_address, least=1), value.values()), strict=True))


_ROW = _fields(backend=_text(r"[a-z0-9_]{1,20}"), ranks=_whole(), time_us=_number, bus_gbps=_number)

_GPU = _fields(
    ("fault", "microseconds", "is_right", "free_bytes", "total_bytes"),
    name=_text(), fault=_text(), microseconds=_number, is_right=_truth, free_bytes=_whole(), total_bytes=_whole(),
)  # fmt: skip

_WORKING_TORCH = _fields(
    ("why_unusable",),
    version=_text(_VERSION), cuda=_or_none(_text(r"[0-9]{1,3}\.[0-9]{1,3}")), gloo=_truth, nccl=_or_none(_text()),
    is_usable=_truth, gpus=_list_of(_GPU), why_unusable=_text(),
)  # fmt: skip


def _torch(value: Any) -> dict[str, Any]:
    is_faulty = isinstance(value, dict) and "fault" in value
    found: dict[str, Any] = (_fields(fault=_text()) if is_faulty else _WORKING_TORCH)(value)
    for gpu in found.get("gpus", ()):
        if "fault" not in gpu and not {"microseconds", "is_right", "free_bytes", "total_bytes"} <= gpu.keys():
            raise ValueError("gpus: expected a fault or measurements of each")
    return found


_FACTS = _fields(
    hostname=_text(),
    python=_text(_VERSION),
    versions=_fields(Python=_text(_VERSION), megaclass=_text(_VERSION), torch=_text(_VERSION)),
    megaclass=_text(_VERSION),
    code=_text(r"[0-9a-f]{1,64}"),
    config=_or_none(_text(r"[0-9a-f]{1,64}")),
    torch=_or_none(_torch),
    tensorflow=_or_none(_text(_VERSION)),
    keras=_or_none(_text(_VERSION)),
    mpi=_or_none(_text()),
    driver=_or_none(_text()),
    driver_cuda=_or_none(_text(r"[0-9]{1,3}\.[0-9]{1,3}")),
    num_gpus_present=_whole(_MAX_ITEMS),
    visible_devices=_or_none(_text()),
    num_cpus=_whole(1 << 20),
    interfaces=_interfaces,
    workdir=_or_none(_text()),
    free_disk_bytes=_or_none(_whole()),
    free_shared_bytes=_or_none(_whole()),
)
