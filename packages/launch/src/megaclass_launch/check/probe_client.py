"""The client of a probe: starts it on a host, sends questions and waits for answers. Standard library only."""

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megaclass_launch.check.rules import Facts
from megaclass_launch.errors import LaunchError
from megaclass_launch.operating_system import readable
from megaclass_launch.wire.checks import Check, ip_address, number, or_none, text, truth, whole
from megaclass_launch.wire.protocol import MessageReader, ProtocolError, encode, greeting

_MAX_SAID = 8192
_END_S = 0.5


class ProbeClient:
    """A probe process that answers one question at a time. Its output is read while its caller waits for an answer."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts the probe."""
        token = secrets.token_hex(16)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(
                f"Cannot start {command[0]} on this machine: {error.strerror}. Set --python to an existing Python."
            ) from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stderr = self._process.stdin, self._process.stderr.fileno()
        self._stdout = self._process.stdout.fileno()
        self._open = {self._stdout, self._stderr}
        """Those of the two that have not ended."""
        self._reader = MessageReader(after=greeting(token))
        self._said = b""
        """The end of its stderr."""
        self.token = token

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Facts | None:
        """Returns the unchecked answer, or None if none came in time; ProtocolError if the output is not an answer."""
        ends_at = time.monotonic() + timeout_s
        # A probe that has ended may have said something before.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(encode(dict(question)))
        while self._stdout in self._open and (left_s := ends_at - time.monotonic()) > 0:
            answers = self._read(left_s)
            # One answer per question: a host that keeps sending must not fill the memory.
            if len(answers) > 1:
                raise ProtocolError("it sends answers without a question")
            if answers:
                return answers[0]
        return None

    def exit_status(self) -> tuple[int | None, str]:
        """Returns the probe's exit code (None while it still runs) and the end of its stderr."""
        code = None
        if self._stdout not in self._open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_END_S)
        ends_at = time.monotonic() + _END_S
        while self._stderr in self._open and (left_s := ends_at - time.monotonic()) > 0:
            self._read(left_s)
        return code, self._said.decode(errors="replace")

    def close(self) -> None:
        """Closes the probe's stdin, which ends it, and kills it if it has not ended after 2 s."""
        self._stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout and self._process.stderr
        self._process.stdout.close()
        self._process.stderr.close()

    def _read(self, timeout_s: float) -> list[Facts]:
        """Waits for output, keeps the end of stderr, and returns the answers that have come."""
        answers: list[Facts] = []
        for handle in readable(self._open, timeout_s):
            data = os.read(handle, 1 << 16)
            if not data:
                self._open.remove(handle)
            elif handle == self._stderr:
                self._said = (self._said + data)[-_MAX_SAID:]
            else:
                answers += [message for message, _ in self._reader.feed(data)]
        return answers


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
    facts: dict[str, Any] = _checked("facts", _fields(_FACTS), reply)
    if not {"Python", "torch", "megaclass-launch"} <= facts["versions"].keys():
        raise ProtocolError(
            "its answer about facts is invalid: expected the versions of Python, torch and megaclass-launch"
        )
    return {**facts, "workdir": workdir if facts["workdir"] is not None else None}


def listening_in(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the port at which the host listens, or the fault."""
    found: dict[str, Any] = _checked("listen", _fields({"port": whole(most=65535), "fault": or_none(_LINE)}), reply)
    return found


def reached_in(reply: Mapping[str, Any], peers: Collection[str]) -> dict[str, Any]:
    """Returns which peers the host could not reach. peers: exactly these must be in the answer."""
    faults = _fields(dict.fromkeys(peers, or_none(_LINE)))
    found: dict[str, Any] = _checked("reach", _fields({"towards": or_none(_INTERFACE), "faults": faults}), reply)
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


def _checked(name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ProtocolError(f"its answer about {name} is invalid: expected {error}") from None


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


def _by(key: Check, check: Check) -> Check:
    """Checks a JSON object with any fields whose names pass `key`."""

    def check_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
            raise ValueError(f"an object of at most {_MAX_ITEMS} fields")
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
    "versions": _by(_PACKAGE, _VERSION),
    "code": _by(_PACKAGE, _DIGEST),
    "config": or_none(_DIGEST),
    "torch": _fields(_TORCH),
    "driver": or_none(_LINE),
    "driver_cuda": _CUDA_VERSION,
    "num_gpus_present": whole(most=_MAX_ITEMS),
    "visible_devices": or_none(_LINE),
    "num_cpus": whole(most=1 << 20),
    "interfaces": _by(_INTERFACE, _list_of(ip_address, least=1)),
    "workdir": or_none(_LINE),
    "free_disk_bytes": or_none(whole()),
    "free_shared_bytes": or_none(whole()),
}
