"""The place of this process in an elastic job, as its agent tells it. Standard library only; no torch.

An elastic job has generations. In one generation the number of ranks is fixed, and everything that ranks use to find each other
is new: the port, the secret, the token. A process that belongs to an old generation therefore cannot join or disturb a new one.

    worker = elastic_worker()              None outside of elastic jobs
    here = worker.rendezvous(Why.START)    blocks until the driver has published the next generation; sets os.environ
    worker.hosts_changed()                 one system call, no network: True if the driver wants another generation
    worker.committed()                     the state of this step is safe
    worker.is_broken()                     whether a member of this generation is gone
    worker.when_broken(end_connections)    a thread calls the function when a member of this generation is gone, so
                                           collectives that wait for it fail at once instead of after a time limit
    worker.rendezvous(Why.FAILED)          after a failed collective: leaves this generation, waits for the next one
    worker.rendezvous(Why.CHANGED)         after hosts_changed(), when all ranks have agreed to leave

States of a worker, with what it tells the driver:

                      ready                        published
    process started --------> waits at rendezvous -----------> trains -- exit
                                      ^   |                       |
                                      |   | dismissed: exit       |
                                      +---+-----------------------+
                                           ready (failed, changed)

Messages go through the agent of this host (Channel), and from there over ssh to the driver; each carries the token of the
generation that the worker knows. Everything happens in the caller's thread, except that
any thread may call hosts_changed(), and that when_broken() starts one.

    field                written by                   read by                    guarded by
    here                 rendezvous()                 all threads                assigned whole
    _is_changed          _take, rendezvous()          all threads                _lock
    has_only_removals    _take, rendezvous()          all threads                _lock for writing; one flag
    has_removals         _take, rendezvous()          all threads                _lock for writing; one flag
    _is_broken           _take, rendezvous()          all threads                _lock
    _has_left            rendezvous()                 thread of when_broken()    _lock
    has_committed        committed(), rendezvous()    all threads                _lock for writing; one flag
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaclass_launch.errors import LaunchError
from megaclass_launch.operating_system import readable
from megaclass_launch.wire.protocol import Message, MessageReader, Outbox, ProtocolError, encode
from megaclass_launch.wire.protocol import Why as Why
from megaclass_launch.world import World

# ---- the connection to the agent ----
#
# The connection between an agent and one worker of an elastic job: JSON lines over a pair of Unix sockets.
#
# The worker inherits its end from the agent, so nothing listens anywhere, and only the two processes, and programs that run as
# children of the worker with its open files, can write to it.


FD_NAME = "MEGACLASS_ELASTIC_FD"
MAX_LINE_BYTES = 4 << 20
"""The members of 10,000 ranks take a quarter of it."""
_READ_BYTES = 1 << 16


class Channel:
    """One end of the connection. Nothing blocks, except for `wait`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = MessageReader(max_line_bytes=MAX_LINE_BYTES, max_payload_bytes=0)
        # That the reader is gone is noticed in `receive`: lines that it wrote before may still be read.
        self._unsent = Outbox(lambda data: connection.send(data, socket.MSG_NOSIGNAL))
        self.write = self._unsent.write
        """Writes as much of what is queued as the socket takes."""
        self.is_open = True
        """False once the other end has closed the connection."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent.num_bytes)

    def send(self, message: Message) -> None:
        """Queues a message and writes as much as the socket takes now."""
        self._unsent.add(encode(message))

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived; one system call if there are none. ProtocolError for a line that is none."""
        # To the end of what has arrived, also after the other end has closed: its last lines are in there.
        found: list[Message] = []
        while self.is_open:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_open = bool(data)
            found += [message for message, _ in self._reader.feed(data)]
        return found

    def wait(self, timeout_s: float | None) -> list[Message]:
        """Returns the messages that arrive within the time; none if the time is up or the connection has ended."""
        ends_at = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        while True:
            if (found := self.receive()) or not self.is_open:
                return found
            # At least one read comes before this, so a timeout of 0 asks for what is there.
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                return []
            events = select.poll()
            # Also for room to write: the answer may depend on a message that has not fitted into the socket yet.
            events.register(self._socket, select.POLLIN | (select.POLLOUT if self.has_unsent else 0))
            events.poll(min(left_s, 3600.0) * 1000)
            self.write()

    def wait_readable(self, timeout_s: float) -> None:
        """Waits until something arrives, or until the time is up."""
        with contextlib.suppress(OSError, ValueError):
            readable([self._socket], timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        self.is_open = False


def inherited_channel(env: Mapping[str, str]) -> Channel | None:
    """Returns the channel that this process inherited from its agent; None outside of elastic jobs.

    Raises LaunchError if a program between the agent and this process has closed the connection.
    """
    number = env.get(FD_NAME, "")
    if not number.isdecimal():
        return None
    try:
        connection = socket.socket(fileno=int(number))
        if connection.family != socket.AF_UNIX:
            # Not closed with the object: the file belongs to another part of the program, which has reused the number.
            connection.detach()
            raise OSError("another file has its number")
    except OSError as error:
        raise LaunchError(
            f"The connection of this rank to its agent (file {number}, {FD_NAME}) is not open: {error}. A program between "
            f"the launcher and this process has closed it, as Python's subprocess does unless it is given close_fds=False."
        ) from error
    # Programs that this rank starts get no copy: the agent would not notice the end of the rank.
    os.set_inheritable(connection.fileno(), False)
    return Channel(connection)


IS_RUNNING_NAME = "MEGACLASS_ELASTIC_IS_RUNNING"
MAX_RANKS_NAME = "MEGACLASS_ELASTIC_MAX_RANKS"
_TICK_S = 0.2
"""How often the thread of when_broken() looks whether its generation is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One rank of a generation."""

    host: str
    slot: int
    """Place on its host, from 0. It stays the same as long as the process lives, and so does the GPU of this number."""
    previous_rank: int | None
    """Its rank in the previous generation; None for a process that was not a member of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The place of this process in one generation."""

    generation: int
    """1, 2, …"""
    token: str
    """Random, different in each generation."""
    world: World
    """Rank, size, local rank and so on, with the address and the port of the store."""
    members: tuple[Member, ...]
    """All ranks, in their order. Rank 0 was a member of the previous generation if any of them was."""
    previous_size: int
    """Number of ranks of the previous generation; 0 in the first one."""
    needs_sync: bool
    """True if a member is new or comes from a failed generation: rank 0 then has to send its state to all ranks."""
    has_progressed: bool
    """True if a rank of an earlier generation has reported a commit: a member that has not received a state then holds none."""

    @property
    def previous_rank(self) -> int | None:
        """Returns the rank of this process in the previous generation; None if it was not a member of it."""
        return self.members[self.world.rank].previous_rank

    def lost_ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the previous generation whose processes are not members any more."""
        kept = {member.previous_rank for member in self.members}
        return tuple(rank for rank in range(self.previous_size) if rank not in kept)


class Dismissed(SystemExit):
    """Raised at the rendezvous when the job continues without this process. Uncaught, the process ends with exit code 0."""

    def __init__(self, why: str) -> None:
        super().__init__(0)
        self.why = why


class ElasticWorker:
    """This process as a member of an elastic job. There is at most one, see `elastic_worker`."""

    def __init__(self, channel: Channel) -> None:
        self.here: Assignment | None = None
        """The current generation; None before the first rendezvous."""
        self.joins_running_job = os.environ.get(IS_RUNNING_NAME) == "1"
        """True if other processes of the job had made progress when this one was started."""
        self.max_ranks = int(os.environ.get(MAX_RANKS_NAME) or 0)
        """Largest number of ranks that the job may have (--max-np); 0 if it was not given."""
        self._channel = channel
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.has_only_removals = False
        """True if the change that hosts_changed() reported only removes hosts, so no new rank needs the state."""
        self.has_removals = False
        """True if the change that hosts_changed() reported removes hosts, whether or not it adds others."""
        self.has_committed = False
        """True if committed() was called in the current generation."""
        self._is_changed = False
        self._is_broken = False
        self._has_left = False

    def hosts_changed(self) -> bool:
        """Returns whether the driver wants another generation, because hosts come or go. Ranks may learn it at different times:
        they have to agree on the step at which all of them leave (a broadcast from rank 0, or an all-reduce of a flag)."""
        # A forked process (a worker of a data loader) has a copy of the socket and must not read from it.
        if os.getpid() != self._pid:
            return False
        # Called in every step: once it is known, the socket is not asked again until the next generation.
        with self._lock:
            if not self._is_changed:
                self._take(self._receive(0.0))
            return self._is_changed

    def is_broken(self, timeout_s: float = 0.0) -> bool:
        """Returns whether a member of the current generation is gone, or has left it after a failure.

        timeout_s: how long to wait for the news, if there is none yet.
        """
        ends_at = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._is_broken:
                    self._take(self._receive(0.0))
                if self._is_broken or (left_s := ends_at - time.monotonic()) <= 0:
                    return self._is_broken
            # Not for the whole time: the thread of when_broken() may receive the news.
            self._channel.wait_readable(min(left_s, _TICK_S))

    def when_broken(self, end_connections: Callable[[], None]) -> None:
        """Calls the function in a thread when a member of the current generation is gone, or has left it after a failure.

        It ends with the generation. end_connections: see rendezvous/connection_watch.py:OwnConnections.
        """
        assert self.here is not None
        arguments = (self.here.token, end_connections)
        threading.Thread(target=self._wait_until_broken, args=arguments, name="megaclass-elastic", daemon=True).start()

    def _wait_until_broken(self, token: str, end_connections: Callable[[], None]) -> None:
        while True:
            self._channel.wait_readable(_TICK_S)
            with self._lock:
                if self.here is None or self.here.token != token or self._has_left or not self._channel.is_open:
                    return
                # A lost agent is reported by the program's next call, which can raise the error.
                with contextlib.suppress(LaunchError):
                    self._take(self._receive(0.0))
                is_broken = self._is_broken
            # Without the lock, which the program's thread may need as soon as its collective has failed.
            if is_broken:
                end_connections()
                return

    def rendezvous(self, why: Why, timeout_s: float | None = None) -> Assignment:
        """Leaves the current generation and returns the next one, once the driver has published it.

        Afterwards os.environ has the variables of the new generation: rank, size, address, port, secret. Before the call, close
        everything that belongs to the old generation (process groups, stores).

        Raises:
            Dismissed: the job continues without this process.
            LaunchError: the agent is gone, or nothing was published within `timeout_s` (None: the driver's limits count).
        """
        assert os.getpid() == self._pid, "a forked process has no place in the job"
        ends_at = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        with self._lock:
            # If no generation follows, this ends the thread of when_broken().
            self._has_left = True
            self._send({"do": "ready", "why": str(why)})
            message, later = self._wait_for_answer(ends_at, timeout_s)
            if message["say"] == "dismissed":
                raise Dismissed(str(message["why"]))
            self.here = _assignment(message)
            # Announced to the old generation. What concerns the new one can only follow its assignment.
            self._is_changed = self.has_only_removals = self.has_removals = False
            self._is_broken = self._has_left = self.has_committed = False
            os.environ.update({str(name): str(value) for name, value in message["env"].items()})
            # What came together with the assignment already concerns the new generation.
            self._take(later)
            return self.here

    def _wait_for_answer(self, ends_at: float, timeout_s: float | None) -> tuple[Message, list[Message]]:
        """Returns the answer to "ready" and the messages that came with it."""
        while (left_s := ends_at - time.monotonic()) > 0:
            messages = self._receive(left_s)
            for number, message in enumerate(messages):
                if message.get("say") in ("assignment", "dismissed"):
                    return message, messages[number + 1 :]
        raise LaunchError(f"{self._name()} waited {timeout_s:g} s for the next generation of the job.")

    def committed(self) -> None:
        """Tells the driver that this generation has made progress. Only the first call in a generation sends anything."""
        with self._lock:
            if not self.has_committed and os.getpid() == self._pid:
                # Once is enough: the driver wants to know that the job makes progress after a failure, not how much.
                self.has_committed = True
                self._send({"do": "committed"})

    def failed(self, what: str) -> None:
        """Tells the driver why this process is about to leave the generation, for the message on the terminal."""
        if os.getpid() == self._pid:
            with self._lock:
                self._send({"do": "failed", "text": what[:2000]})

    def _send(self, message: Message) -> None:
        self._channel.send({**message, "token": self.here.token if self.here is not None else ""})

    def _receive(self, timeout_s: float) -> list[Message]:
        try:
            messages = self._channel.wait(timeout_s)
        except ProtocolError as error:
            raise LaunchError(f"{self._name()}: the connection to its agent carried {error}.") from error
        # What the agent wrote before it ended still counts, and comes first.
        if not self._channel.is_open and not messages:
            raise LaunchError(f"{self._name()}: its agent is gone.")
        return messages

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            # A change that was announced to an earlier generation has been taken into account.
            is_current = self.here is None or message.get("token") == self.here.token
            if message.get("say") == "changed" and is_current:
                self._is_changed = True
                self.has_only_removals = bool(message.get("only_removals"))
                self.has_removals = bool(message.get("has_removals"))
            if message.get("say") == "broken" and is_current:
                self._is_broken = True

    def _name(self) -> str:
        place = self.here.world.name() if self.here is not None else f"a process on {socket.gethostname()}"
        return f"{place} (pid {os.getpid()})"


def is_elastic(env: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process belongs to an elastic job."""
    return bool(env.get(FD_NAME))


_lock = threading.Lock()
_worker: ElasticWorker | None = None


def elastic_worker() -> ElasticWorker | None:
    """Returns this process as a member of its elastic job; None outside of elastic jobs."""
    global _worker
    with _lock:
        if _worker is None and (channel := inherited_channel(os.environ)) is not None:
            _worker = ElasticWorker(channel)
        return _worker


def _assignment(message: Message) -> Assignment:
    same = ("generation", "token", "previous_size", "needs_sync", "has_progressed")
    return Assignment(
        **{name: message[name] for name in same},
        world=World(**message["world"]),
        members=tuple(Member(**member) for member in message["members"]),
    )
