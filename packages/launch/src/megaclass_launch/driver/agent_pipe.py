"""The driver's pipes to the agents, one per host. Standard library only.

State of one pipe, as the driver sees it; the decisions about the job change it:

    STARTING --hello--> READY --"start" was sent--> RUNNING --"done"--> DONE
        |                 |                         |
        +-----------------+-------------------------+--> LOST   (it ended, fell silent, or broke the protocol)
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from typing import IO, Protocol

from megaclass_launch.driver.output import DriverIo
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.wire.agent_messages import MAX_AGENT_LINE_BYTES, MAX_OUTPUT_BYTES, AgentMessageChecker
from megaclass_launch.wire.protocol import Message, MessageReader, Outbox, encode, greeting

_READ_BYTES = 1 << 18
_KEPT_STDERR_BYTES = 8192
_PAUSED_TICK_S = 0.02
"""Interval at which the driver checks whether a full screen has room again."""


class PipeState(Enum):
    STARTING = auto()
    """ssh connects, or the agent has not answered yet."""
    READY = auto()
    """The agent has said hello and waits for "start"."""
    RUNNING = auto()
    DONE = auto()
    """No process of its ranks is left."""
    LOST = auto()
    """It ended or fell silent without saying that it is done; its ranks end by themselves."""


class Process(Protocol):
    """A subprocess.Popen, or what stands for a process on a node of Ray."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


def started_process(host: Host, command: list[str]) -> Process:
    """Starts `ssh`, or a program on this machine, for a host."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A session of its own: Ctrl-C in the terminal reaches the driver only, which decides what to send to the ranks.
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(
            f"Cannot start {command[0]!r} for {host.name}: {error.strerror}. Set --python to an existing Python."
        ) from error


class PipedProcess:
    """A process with its three pipes, none of which ever blocks. reader: of its messages."""

    def __init__(self, host: Host, process: Process, reader: MessageReader) -> None:
        self.host = host
        self.process = process
        self.stderr_text = ""
        """The end of what it wrote to stderr."""
        self.has_closed_stderr = False
        self._reader = reader
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        # One thread serves all hosts: a host that does not read, or sends without end, must not stop the others.
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._unsent = Outbox(partial(os.write, self.stdin.fileno()))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent.num_bytes)

    def send(self, message: Message) -> None:
        """Queues a message and writes as much as the pipe takes now."""
        if not self.stdin.closed:
            self._unsent.add(encode(message))

    def write(self) -> None:
        """Writes as much of the queue as the pipe takes."""
        # That the reader is gone is noticed at stdout, where messages may still wait, for example why it ended.
        if not self.stdin.closed:
            self._unsent.write()

    def read(self) -> Iterator[tuple[Message, bytes]] | None:
        """Returns the messages that arrived, or None at the end of the stream.

        Raises ProtocolError, also while iterating, for bytes that are not a message.
        """
        try:
            data = os.read(self.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return iter(())
        return self._reader.feed(data) if data else None

    def read_stderr(self) -> bytes | None:
        """Returns the bytes that arrived on stderr, or None at its end."""
        try:
            data = os.read(self.stderr.fileno(), _READ_BYTES)
        except BlockingIOError:
            return b""
        # Only the end is kept: login banners are long, and the error of ssh comes last.
        self.stderr_text = (self.stderr_text + data.decode(errors="replace"))[-_KEPT_STDERR_BYTES:]
        self.has_closed_stderr = not data
        return data or None

    def hang_up(self) -> None:
        """Closes stdin: a process that still listens ends what it has started and leaves."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def wait(self, timeout_s: float) -> int | None:
        """Closes stdin and returns the exit code; None if the process does not end in time."""
        self.hang_up()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self, *, kills_local: bool = False) -> None:
        """Closes all pipes and kills ssh. kills_local: and also a process of this machine."""
        self.hang_up()
        # A local agent is never killed: it would be kept from ending its ranks. It sees that stdin is closed and leaves.
        if self.process.poll() is None and (kills_local or not self.host.is_local):
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.stdout.close()
        self.stderr.close()


class AgentPipe(PipedProcess):
    """An agent, as the driver has it. Its messages are checked."""

    def __init__(self, host: Host, process: Process, *, token: str, run_id: str, checker: AgentMessageChecker) -> None:
        self.run_id = run_id
        """By its run id in the environment, an orphan killer recognises the processes of this agent."""
        self.checker = checker
        self.state = PipeState.STARTING
        self.hello: Message = {}
        self.ports: Message = {}
        """Ports that the agent holds for the next generation with rank 0 on its host; empty once they are used."""
        self.opened_at = self.heard_at = time.monotonic()
        reader = MessageReader(
            after=greeting(token), max_line_bytes=MAX_AGENT_LINE_BYTES, max_payload_bytes=MAX_OUTPUT_BYTES
        )
        super().__init__(host, process, reader)

    @property
    def name(self) -> str:
        """Returns the host's name as the user gave it."""
        return self.host.name

    @property
    def is_over(self) -> bool:
        return self.state in (PipeState.DONE, PipeState.LOST)

    def read(self) -> Iterator[tuple[Message, bytes]] | None:
        """Returns the checked messages that arrived. ProtocolError also for one that no agent of this version sends."""
        if (messages := super().read()) is None:
            return None
        # Any byte proves that the agent lives, not only its heartbeats.
        self.heard_at = time.monotonic()
        return self._checked(messages)

    def _checked(self, messages: Iterator[tuple[Message, bytes]]) -> Iterator[tuple[Message, bytes]]:
        for message, payload in messages:
            # The state is read again for each message: handling the previous one may have changed it.
            yield self.checker.checked(message, payload, is_running=self.state is PipeState.RUNNING), payload


class AgentPipes:
    """All pipes of one job and the selector that watches them.

    opened: the agents, to which `add` adds. While `is_paused`, nothing is read: the pipes fill, the ranks wait in their
    writes, and no memory grows.
    """

    def __init__(self, opened: list[AgentPipe], on_message: Callable[[AgentPipe], None], io: DriverIo) -> None:
        self.selector = selectors.DefaultSelector()
        self.is_paused = False
        self._opened = opened
        self._on_message = on_message
        self._screen, self._messages = io.screen, io.messages

    def add(self, agent: AgentPipe) -> None:
        """Listens to an agent that was started."""
        self._opened.append(agent)
        # While paused, nothing is read; it is listened to when the screen has room again.
        if not self.is_paused:
            self._listen(agent)

    def stop_listening(self, agent: AgentPipe) -> None:
        """Stops listening to an agent that is over."""
        for pipe in (agent.stdout, agent.stderr, agent.stdin):
            # stderr may have ended before, and stdin is registered only while something is unsent.
            if not pipe.closed and pipe.fileno() in self.selector.get_map():
                self.selector.unregister(pipe)

    def handle_events(self, until: float) -> None:
        """Waits for events, until this time at the latest, and handles those that have come."""
        self._pause_if_full()
        self._watch_unsent()
        wait_s = _PAUSED_TICK_S if self.is_paused else max(0.0, until - time.monotonic())
        for key, _ in self.selector.select(wait_s):
            # An earlier event of this batch may have closed the pipe of a later one, or filled the screen.
            if self.selector.get_map().get(key.fd) is key:
                key.data()
                self._pause_if_full()

    def _pause_if_full(self) -> None:
        """Stops reading all agents while the screen is full, and resumes when it has room."""
        if self._screen.is_full == self.is_paused:
            return
        self.is_paused = not self.is_paused
        for agent in [agent for agent in self._opened if not agent.is_over]:
            if self.is_paused:
                self.selector.unregister(agent.stdout)
                if not agent.has_closed_stderr:
                    self.selector.unregister(agent.stderr)
            else:
                # Its heartbeats waited in the pipe: the silence is ours, not the agent's.
                agent.heard_at = time.monotonic()
                self._listen(agent)

    def _watch_unsent(self) -> None:
        """Waits for room in the pipes of agents that have not taken everything; a job line may be longer than a pipe."""
        for agent in self._opened:
            is_watched = not agent.stdin.closed and agent.stdin.fileno() in self.selector.get_map()
            if agent.has_unsent and not is_watched and not agent.is_over:
                self.selector.register(agent.stdin, selectors.EVENT_WRITE, agent.write)
            elif is_watched and not agent.has_unsent:
                self.selector.unregister(agent.stdin)

    def close(self) -> None:
        """Hangs up on all agents, then waits for ssh and the local agent to leave."""
        # First all, then the waits: the agents leave at the same time.
        for agent in self._opened:
            agent.hang_up()
        for agent in self._opened:
            # An agent that is done leaves at once; one that was lost may never do.
            agent.wait(2.0 if agent.state is PipeState.DONE else 0.1)
            agent.close()
        self.selector.close()

    def _listen(self, agent: AgentPipe) -> None:
        self.selector.register(agent.stdout, selectors.EVENT_READ, partial(self._on_message, agent))
        if not agent.has_closed_stderr:
            self.selector.register(agent.stderr, selectors.EVENT_READ, partial(self._on_stderr, agent))

    def _on_stderr(self, agent: AgentPipe) -> None:
        data = agent.read_stderr()
        if data is None:
            self.selector.unregister(agent.stderr)
        # Before the agent has answered, the text is only kept: it explains why a host cannot take part.
        elif agent.state is not PipeState.STARTING:
            for line in data.decode(errors="replace").splitlines():
                self._messages.detail(f"{agent.name}: {line}")
