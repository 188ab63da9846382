"""Checks the messages of an agent: every field of every message, before the driver acts on it. Standard library only.

An agent runs on another host, which an attacker may control. It may report about its own ranks only, each field has a type
and a range, control characters are removed from texts, and the number of remarks that are shown is limited. Everything else
is a ProtocolError, upon which the driver treats the host as failed.
"""

import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megaclass.launch.wire.plain_text import plain_text
from megaclass.launch.wire.protocol import Message, ProtocolError

STREAMS = ("stdout", "stderr")
MAX_AGENT_LINE_BYTES = 1 << 20
"""The pids of 10,000 ranks take a fifth of it."""
MAX_OUTPUT_BYTES = 1 << 16
"""An agent reads its workers' pipes in pieces of at most this size."""
MAX_REMARKS = 1000
"""Maximum number of an agent's remarks in one start; each becomes a message of the driver."""
_MAX_PID = 1 << 22
MAX_STEP = 1 << 62
_MAX_VERSIONS = 32
_REMARKS = ("note", "refuse", "stopped")
_ONLY_WHILE_RUNNING = ("started", "output", "exit", "stopped", "progress")

Check = Callable[[Any], Any]


class AgentMessageChecker:
    """Checks the messages of one agent during one start. ranks: those that the agent was given."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = set(ranks)
        self._exited: set[int] = set()
        self._has_introduced_itself = False
        self._num_remarks = 0

    def checked(self, message: Message, payload: bytes, *, is_running: bool) -> Message:
        """Returns the message with its known fields only. is_running: the agent was told to start its ranks.

        Raises ProtocolError if no agent of this version would send the message now.
        """
        kind = message.get("say")
        fields = self._fields().get(kind) if isinstance(kind, str) else None
        if fields is None:
            raise ProtocolError(f"an unknown message {_shown(kind)}")
        if kind in _ONLY_WHILE_RUNNING and not is_running:
            raise ProtocolError(f"{kind!r} before its ranks were started")
        if payload and kind != "output":
            raise ProtocolError(f"{kind!r} with {len(payload)} bytes of output")
        found: Message = {"say": kind}
        for name, (check, is_needed) in fields.items():
            if name not in message:
                if is_needed:
                    raise ProtocolError(f"{kind!r} without {name!r}")
                continue
            try:
                found[name] = check(message[name])
            except ValueError as error:
                raise ProtocolError(f"{kind!r} with {name} = {_shown(message[name])}, not {error}") from None
        self._note_order(found)
        return found

    def _fields(self) -> Mapping[str, Mapping[str, tuple[Check, bool]]]:
        """Returns the fields of each kind of message: a check, and whether the field is required.

        A check returns the value, or raises ValueError with what is allowed.
        """
        rank = (self._rank, True)
        pid = (whole_number(1, _MAX_PID), True)
        return {
            "beat": {},
            "done": {},
            "hello": {
                "pid": pid,
                "ssh": (text, False),
                "address": (ip_address, False),
                "port": (whole_number(1, 65535), 0 in self._ranks),
                "store_port": (whole_number(0, 65535), False),
                "versions": (_versions, False),
            },
            "refuse": {"why": (text, True)},
            "note": {"text": (text, True)},
            "started": {"pids": (self._pids, True)},
            "output": {"rank": rank, "stream": (one_of(STREAMS), True)},
            # Signals 1 to 64 are negative; an exit code is one byte.
            "exit": {"rank": rank, "pid": pid, "code": (whole_number(-64, 255), True)},
            "stopped": {"rank": rank, "pid": pid},
            "progress": {"step": (whole_number(0, MAX_STEP), True)},
        }

    def _note_order(self, message: Message) -> None:
        kind = message["say"]
        if kind == "hello":
            if self._has_introduced_itself:
                raise ProtocolError("a second 'hello'")
            self._has_introduced_itself = True
        if kind == "exit":
            if message["rank"] in self._exited:
                raise ProtocolError(f"a second 'exit' of rank {message['rank']}")
            self._exited.add(message["rank"])
        if kind in _REMARKS:
            self._num_remarks += 1
            if self._num_remarks > MAX_REMARKS:
                raise ProtocolError(f"more than {MAX_REMARKS} remarks")

    def _rank(self, value: Any) -> int:
        if not _is_whole(value) or value not in self._ranks:
            raise ValueError("a rank of this host")
        return int(value)

    def _pids(self, value: Any) -> dict[int, int]:
        return self._pids_of(value, self._ranks)

    def _pids_of(self, value: Any, ranks: Collection[int]) -> dict[int, int]:
        what = "a pid for each rank of this host"
        if not isinstance(value, dict) or value.keys() != {str(rank) for rank in ranks}:
            raise ValueError(what)
        if not all(_is_whole(pid) and 1 <= pid <= _MAX_PID for pid in value.values()):
            raise ValueError(what)
        return {int(rank): pid for rank, pid in value.items()}


def ip_address(value: Any) -> str:
    """Returns a numeric address; raises ValueError for anything else."""
    try:
        if not isinstance(value, str):
            raise ValueError
        return str(ipaddress.ip_address(value.partition("%")[0]))
    except ValueError:
        raise ValueError("a numeric IP address") from None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole_number(least: int, most: int) -> Check:
    """Returns a check for whole numbers of a range."""

    def check(value: Any) -> int:
        if not _is_whole(value) or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(value)

    return check


def one_of(allowed: Collection[str]) -> Check:
    """Returns a check for one of several texts."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value

    return check


def text(value: Any) -> str:
    """Returns a text without control characters; raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError("a text")
    return plain_text(value)


def _versions(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > _MAX_VERSIONS:
        raise ValueError(f"at most {_MAX_VERSIONS} versions by name")
    if not all(isinstance(version, str) for version in value.values()):
        raise ValueError("texts")
    return {plain_text(name, 40): plain_text(version, 80) for name, version in value.items()}


def _shown(value: Any) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
