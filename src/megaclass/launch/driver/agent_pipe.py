"""The driver's end of the line to one agent. Standard library only."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from enum import Enum, auto

from megaclass.errors import LaunchError
from megaclass.launch.plan import Placement
from megaclass.launch.wire.agent_messages import MAX_AGENT_LINE_BYTES, MAX_OUTPUT_BYTES, AgentTalk
from megaclass.launch.wire.protocol import Message, MessageReader, encode, greeting

_READ_BYTES = 1 << 18
_KEPT_STDERR_BYTES = 8192


class LinkState(Enum):
    STARTING = auto()
    READY = auto()
    """The agent has said hello and waits for "go"."""
    RUNNING = auto()
    DONE = auto()
    """Nothing of its ranks is left."""
    LOST = auto()
    """It ended or fell silent without saying so; its ranks end by themselves."""


class Link:
    """A process, `ssh` or the local agent, with its three pipes, none of which ever blocks."""

    def __init__(self, placement: Placement, command: list[str], token: str) -> None:
        self.placement = placement
        self.state = LinkState.STARTING
        self.hello: Message = {}
        self.heard_at = time.monotonic()
        self.said = ""
        """What ssh or the agent wrote to stderr, its end."""
        self.has_closed_stderr = False
        self._reader = MessageReader(
            after=greeting(token), max_line_bytes=MAX_AGENT_LINE_BYTES, max_payload_bytes=MAX_OUTPUT_BYTES
        )
        self._talk = AgentTalk([world.rank for world in placement.worlds])
        self._unsent = bytearray()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Ctrl-C in the terminal is for the driver, which decides what becomes of it.
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"Cannot start {command[0]!r} for {self.name}: {error.strerror}.") from error
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)

    @property
    def name(self) -> str:
        return self.placement.host.name

    @property
    def is_over(self) -> bool:
        return self.state in (LinkState.DONE, LinkState.LOST)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self.write()

    def write(self) -> None:
        """What the pipe takes now. A reader that is gone is noticed at the other pipe."""
        while self._unsent and not self.stdin.closed:
            try:
                written = os.write(self.stdin.fileno(), self._unsent)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._unsent.clear()
                return
            del self._unsent[:written]

    def read(self) -> Iterator[tuple[Message, bytes]] | None:
        """Messages that came, checked; None at the end of the line. ProtocolError for one that no agent of ours sends."""
        try:
            data = os.read(self.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return iter(())
        if not data:
            return None
        self.heard_at = time.monotonic()
        return self._checked(data)

    def _checked(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        for message, payload in self._reader.feed(data):
            # Asked for each message: hearing the one before may have changed the state.
            yield self._talk.checked(message, payload, is_running=self.state is LinkState.RUNNING), payload

    def read_stderr(self) -> bytes | None:
        """What was said now; None at the end."""
        try:
            data = os.read(self.stderr.fileno(), _READ_BYTES)
        except BlockingIOError:
            return b""
        self.said = (self.said + data.decode(errors="replace"))[-_KEPT_STDERR_BYTES:]
        self.has_closed_stderr = not data
        return data or None

    def hang_up(self) -> None:
        """Ends the line: an agent that still listens ends its ranks and leaves."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of ssh or the local agent after the end of the line; None when it does not end in time."""
        self.hang_up()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self.hang_up()
        # Never the local agent, which would be stopped from ending its ranks: it sees the end of the line and goes.
        if self.process.poll() is None and not self.placement.host.is_local:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.stdout.close()
        self.stderr.close()
