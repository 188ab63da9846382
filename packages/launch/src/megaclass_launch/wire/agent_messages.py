"""Checks the messages of an agent: every field of every message, before the driver acts on it. Standard library only.

    of every job           hello, refuse, started, output, exit, stopped, progress, status, stacks, kept, note, beat, done
    of elastic jobs only   ready, committed and failed, which come from workers by way of their agent; spare: ports for
                           the next generation

A worker has a number that no other worker of the job ever has; messages name it in the field `rank`. In a job that is not
elastic it is the rank. In an elastic job the rank may change with every generation, and only the driver knows it.

An agent runs on another host, which an attacker may control. It may report about its own ranks only, each field has a type
and a range, control characters are removed from texts, and the number of remarks that are shown is limited. Everything else
is a ProtocolError; the driver then treats the host as failed.
"""

from collections.abc import Collection, Mapping
from typing import Any

from megaclass_launch.wire.checks import Check, ip_address, is_whole, number, one_of, plain_text, text, truth, whole
from megaclass_launch.wire.protocol import Message, ProtocolError, Why

STREAMS = ("stdout", "stderr")
RESULT_STREAM = "result"
"""Third stream of ranks that were given a function: the pickled result, which only the caller reads."""
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
_ONLY_WHILE_RUNNING = ("started", "output", "exit", "stopped", "progress", "status", "stacks", "kept")
_WITH_BYTES = ("output", "stacks")
_MAX_TOKEN = 64
_STATES = ("answered", "stopped", "kernel", "silent", "ended")


class AgentMessageChecker:
    """Checks the messages of one agent during one start.

    ranks: those that the agent will be told to start; in an elastic job `expect` names them. holds_ports: its hello has to
    name the ports of rank 0. has_call: it was given a function, so its ranks send results.
    """

    def __init__(
        self,
        ranks: Collection[int] = (),
        *,
        is_elastic: bool = False,
        holds_ports: bool = False,
        has_call: bool = False,
    ) -> None:
        self._ranks: set[int] = set()
        self._starting: list[set[int]] = []
        """Ranks of each order to start, until the agent has told their pids."""
        self._is_elastic = is_elastic
        self._holds_ports = holds_ports or is_elastic
        self._streams = (*STREAMS, RESULT_STREAM) if has_call else STREAMS
        self._exited: set[int] = set()
        self._has_introduced_itself = False
        self._num_remarks = 0
        if ranks:
            self.expect(set(ranks))

    def expect(self, ranks: set[int]) -> None:
        """Notes that the agent is told to start these ranks: a message about any other one breaks the protocol."""
        self._ranks |= ranks
        self._starting.append(ranks)

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
        if payload and kind not in _WITH_BYTES:
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
        """Returns the fields of each kind of message: a check, and whether the field is required."""
        rank = (self._rank, True)
        pid = (whole(1, _MAX_PID), True)
        words = dict.fromkeys(("missing", "setting"), (text(max_length=40), False))
        port, store_port = whole(1, 65535), whole(0, 65535)
        of_elastic_jobs: dict[str, dict[str, tuple[Check, bool]]] = {
            # The first three come from workers by way of their agent, and the driver trusts neither.
            "ready": {"rank": rank, "token": (_token, True), "why": (one_of(tuple(Why)), True)},
            "committed": {"rank": rank, "token": (_token, True)},
            "failed": {"rank": rank, "token": (_token, True), "text": (text(), True)},
            "spare": {"port": (port, True), "store_port": (store_port, True)},
        }
        return {
            **(of_elastic_jobs if self._is_elastic else {}),
            "beat": {},
            "done": {},
            "hello": {
                "pid": pid,
                "ssh": (text(), False),
                "address": (ip_address, False),
                "port": (port, self._holds_ports),
                "store_port": (store_port, self._is_elastic),
                "versions": (_versions, False),
            },
            "refuse": {"why": (text(), True)},
            "note": {"text": (text(), True)},
            "started": {"pids": (self._pids, True)},
            "output": {"rank": rank, "stream": (one_of(self._streams), True)},
            # Signals 1 to 64 are negative; an exit code is one byte.
            "exit": {"rank": rank, "pid": pid, "code": (whole(-64, 255), True)},
            "stopped": {"rank": rank, "pid": pid},
            "progress": {"step": (whole(0, MAX_STEP), True)},
            # Where the ranks are: seconds since the last progress of any, and of one that is late, with its words for that.
            "status": {"idle_s": (number, True), "silent_s": (number, False), **words},
            "kept": {"folder": (text(), True)},
            "stacks": {
                "rank": rank,
                "pid": pid,
                "state": (one_of(_STATES), True),
                "step": (whole(-1, MAX_STEP), True),
                **dict.fromkeys(("is_late", "is_still_late"), (truth, True)),
                "main_thread": (whole(0, (1 << 64) - 1), True),
                **dict.fromkeys(("phase", "detail", "waits_for", "file_wait", "package"), (text(), True)),
            },
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
        if not is_whole(value) or value not in self._ranks:
            raise ValueError("a rank of this host")
        return int(value)

    def _pids(self, value: Any) -> dict[int, int]:
        what = "a pid for each rank of this host"
        if not isinstance(value, dict):
            raise ValueError(what)
        # All ranks of one order: in an elastic job there may be several, and each is answered once.
        started = next((ranks for ranks in self._starting if value.keys() == {str(rank) for rank in ranks}), None)
        if started is None or not all(is_whole(pid) and 1 <= pid <= _MAX_PID for pid in value.values()):
            raise ValueError(what)
        self._starting.remove(started)
        return {int(rank): pid for rank, pid in value.items()}


def _versions(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > _MAX_VERSIONS:
        raise ValueError(f"at most {_MAX_VERSIONS} versions by name")
    if not all(isinstance(version, str) for version in value.values()):
        raise ValueError("texts")
    return {plain_text(name, 40): plain_text(version, 80) for name, version in value.items()}


def _token(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TOKEN or not value.isascii():
        raise ValueError("a token")
    return value


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
