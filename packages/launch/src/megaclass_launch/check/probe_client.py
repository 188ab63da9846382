"""The client of a probe: starts it on a host, sends questions and waits for answers. Standard library only."""

import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any

from megaclass_launch.check.rules import Facts
from megaclass_launch.driver.agent_pipe import PipedProcess, started_process
from megaclass_launch.hosts import Host
from megaclass_launch.operating_system import readable
from megaclass_launch.wire.checks import Check, ip_address, number, one_of, or_none, text, truth, whole
from megaclass_launch.wire.protocol import MessageReader, ProtocolError, greeting

_END_S = 0.5
_RETRY_S = 0.02


class ProbeClient(PipedProcess):
    """A probe process that answers one question at a time. Its output is read while its caller waits for an answer."""

    def __init__(self, host: Host, command: list[str]) -> None:
        """Starts the probe."""
        self.token = secrets.token_hex(16)
        self._has_ended = False
        super().__init__(host, started_process(host, command), MessageReader(after=greeting(self.token)))

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Facts | None:
        """Returns the answer, or None if none came in time; ProtocolError if the output is not a valid one."""
        ends_at = time.monotonic() + timeout_s
        # A probe that has ended may have said something before.
        self.send(dict(question))
        while not self._has_ended and (left_s := ends_at - time.monotonic()) > 0:
            # A question about very many hosts may not fit into the pipe at once.
            wait_s = min(left_s, _RETRY_S) if self.has_unsent else left_s
            readable([self.stdout] if self.has_closed_stderr else [self.stdout, self.stderr], wait_s)
            self.write()
            self.read_stderr()
            if (answers := self.read()) is None:
                self._has_ended = True
                return None
            # One answer per question: a host that keeps sending must not fill the memory.
            match [answer for answer, _ in answers]:
                case [answer]:
                    return checked(question, answer)
                case [_, _, *_]:
                    raise ProtocolError("it sends answers without a question")
        return None

    def exit_status(self) -> tuple[int | None, str]:
        """Returns the probe's exit code (None while it still runs) and the end of its stderr."""
        code = self.wait(_END_S) if self._has_ended else None
        ends_at = time.monotonic() + _END_S
        while not self.has_closed_stderr and (left_s := ends_at - time.monotonic()) > 0:
            readable([self.stderr], left_s)
            self.read_stderr()
        return code, self.stderr_text


# ---- answers ----
#
# Validates the answers of hosts in `check`: a host may be compromised.
#
# Every field has a type and a range, and terminal control characters are removed from texts. Values that appear in advice,
# which users copy into a shell, must also match a pattern: a version, an address, the name of an interface.


_MAX_ITEMS = 4096
_LINE = text(max_length=400)
_VERSION = text(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,60}|not installed")
_CUDA_VERSION = or_none(text(r"[0-9]{1,3}\.[0-9]{1,3}"))
_INTERFACE = text(r"[0-9A-Za-z._@:-]{1,15}")
_PACKAGE = text(r"[A-Za-z][A-Za-z0-9-]{0,40}")
_DIGEST = text(r"[0-9a-f]{1,64}")


def checked(question: Mapping[str, Any], reply: Any) -> dict[str, Any]:
    """Returns the fields of an answer to this question; ProtocolError if one of them is invalid."""
    match question.get("ask"):
        case "facts":
            # The answer can only confirm that the folder exists.
            fields: dict[str, Check] = {**_FACTS, "workdir": or_none(one_of([question["workdir"]]))}
        case "listen":
            fields = {"port": whole(most=65535), "fault": or_none(_LINE)}
        case "reach":
            faults = _fields({name: or_none(_LINE) for name, _, _ in question["peers"]})
            fields = {"towards": or_none(_INTERFACE), "faults": faults}
        case _:
            fields = {"ssh": _LINE}
    try:
        found: dict[str, Any] = _fields(fields)(reply)
    except ValueError as error:
        what = question.get("ask", "ssh")
        raise ProtocolError(f"its answer about {what} is invalid: expected {error}") from None
    return found


def rows_in(rows: Any) -> list[dict[str, Any]]:
    """Returns the rows of `bench allreduce`, two per backend, or no rows if they have any other form."""
    row = {"backend": text(r"[a-z0-9_]{1,20}"), "ranks": whole(), "time_us": number, "bus_gbps": number}
    try:
        found: list[dict[str, Any]] = _list_of(_fields(row))(rows)
    except ValueError:
        return []
    backends = [row["backend"] for row in found]
    if not all(backends.count(backend) == 2 for backend in backends):
        return []
    # The other columns are only shown as JSON, which escapes control characters.
    return [{**row, **checked} for row, checked in zip(rows, found, strict=True)]


def _fields(checks: Mapping[str, Check]) -> Check:
    """Checks a JSON object with these fields; other fields are dropped."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("an object")
        found = {}
        for name, check_one in checks.items():
            try:
                found[name] = check_one(value.get(name))
            except ValueError as error:
                raise ValueError(f"{error} in {name}") from None
        return found

    return check


def _list_of(check: Check, least: int = 0) -> Check:
    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= _MAX_ITEMS:
            raise ValueError(f"a list of {least} to {_MAX_ITEMS} items")
        return [check(item) for item in value]

    return check_all


def _by(key: Check, check: Check, needed: Collection[str] = ()) -> Check:
    """Checks a JSON object with any fields whose names pass `key`, the needed ones among them."""

    def check_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
            raise ValueError(f"an object of at most {_MAX_ITEMS} fields")
        if not value.keys() >= set(needed):
            raise ValueError(f"an object with {', '.join(needed)}")
        return {key(name): check(one) for name, one in value.items()}

    return check_all


_GPU = {
    "name": _LINE,
    "fault": _LINE,
    "microseconds": number,
    "is_right": truth,
    "free_bytes": whole(),
    "total_bytes": whole(),
}
_TORCH = {
    "fault": _LINE,
    "version": _VERSION,
    "cuda": _CUDA_VERSION,
    "gloo": truth,
    "nccl": or_none(_LINE),
    "is_usable": truth,
    "why_unusable": _LINE,
    "gpus": _list_of(_fields(_GPU)),
}
_FACTS = {
    "hostname": _LINE,
    "python": _VERSION,
    "versions": _by(_PACKAGE, _VERSION, ("Python", "torch", "megaclass-launch")),
    "code": _by(_PACKAGE, _DIGEST),
    "config": or_none(_DIGEST),
    "torch": _fields(_TORCH),
    "driver": or_none(_LINE),
    "driver_cuda": _CUDA_VERSION,
    "num_gpus_present": whole(most=_MAX_ITEMS),
    "visible_devices": or_none(_LINE),
    "num_cpus": whole(most=1 << 20),
    "interfaces": _by(_INTERFACE, _list_of(ip_address, least=1)),
    "free_disk_bytes": or_none(whole()),
    "free_shared_bytes": or_none(whole()),
}
