"""Detects within a time limit that the network between ranks no longer carries packets. Standard library only.

gloo, NCCL over TCP, torch's store and Horovod's connections wait for minutes on a connection whose packets a firewall drops,
and their errors name neither end. All of these connections are file descriptors of this process, and for each of them the
kernel knows when the other host last answered. A thread reads that about once per second. It sends nothing itself, but it
enables TCP keep-alive, so the kernel probes connections without traffic. A process that is stopped or busy is not
affected, because its kernel answers for it.

Phases:

    joining     from start() to joined(): all connections made since the watch was created count, also those being opened
    joined      after joined(): connections to the hosts of the job count (seen while joining, or passed to joined())

State. "thread" is the watch's own thread, "caller" the thread that calls start(), joined() and stop(). There is no lock:
fields that both use are assigned whole, once, and joined() happens before any rank starts to work.

    field           written by                  read by         meaning
    reason          thread, once                caller          why connections were ended; empty while all is well
    _before         constructor                 thread          inodes of sockets that existed before the watch
    _seen           thread; caller in joined()  caller          addresses of hosts that answered while joining
    _peers          caller in joined(), once    thread          addresses that count from then on; None while joining
    _ends_process   caller in joined()          thread          whether the process ends if closing connections does not help
    _tuned          thread                      thread          inodes whose keep-alive options are set
    _silent_since   thread; caller in joined()  thread          since when connections owe an answer; keyed by inode, or by
                                                                remote address while they are being opened, because libraries
                                                                open a new socket for each attempt
    _is_over        caller in stop()            thread          ends the thread
    _excepthook     constructor                 caller          sys.excepthook as it was

A refused connection is over before the thread looks: `store` handles that case.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megaclass_launch.errors import EXIT_TRY_AGAIN, LaunchError

_log = logging.getLogger("megaclass.distributed")

LIMIT_NAME = "MEGACLASS_NETWORK_TIMEOUT"
_DEFAULT_LIMIT_S = 30.0
# Share of the limit after which a connection is ended; the rest is for the other ranks and the driver to learn of it.
JUDGED_AFTER = 0.8
# The same for attempts to connect while the ranks join: before that, each rank has spent seconds on imports.
_JOINED_AFTER = 0.5
_LEAVE_S = 2.0
_ESTABLISHED, _SYN_SENT = 1, 2
# struct tcp_info: 8 bytes (state, ca_state, retransmits, probes, backoff, …), then 13 numbers of 4 bytes each.
_TCP_INFO = struct.Struct("8B13I")
# Socket option of Linux 6.15 and later: the longest pause between two retransmissions, in ms (120 s by default).
_TCP_RTO_MAX_MS = 44
_RTO_MAX_MS = 2000

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection of this process, as the kernel reports it."""

    file: int
    inode: str
    local: Address
    remote: Address
    is_open: bool
    """False while the connection is being opened."""
    owes_answer: bool
    """True if data or a keep-alive probe was sent that the other host has not acknowledged."""
    silent_s: float
    """Seconds since the other host sent anything."""


def network_timeout(env: Mapping[str, str] = os.environ) -> float:
    """Returns MEGACLASS_NETWORK_TIMEOUT: the seconds for which a connection may go unanswered; 0 waits forever."""
    text = env.get(LIMIT_NAME, "")
    try:
        limit_s = float(text or _DEFAULT_LIMIT_S)
    except ValueError:
        limit_s = -1.0
    if not (limit_s == 0 or 1 <= limit_s < float("inf")):
        raise LaunchError(
            f"{LIMIT_NAME}={text!r} in the environment: expected a number of seconds, 1 or more, or 0 to wait forever."
        )
    return limit_s


class ConnectionWatch:
    """Watches this process's connections to other hosts; closes dead ones, and ends the process if that does not help."""

    def __init__(
        self,
        name: str,
        limit_s: float,
        *,
        describe: Callable[[Address], str] = lambda address: "",
        ends_process: bool = True,
    ) -> None:
        """Creates the watch without starting it.

        Args:
            name: name of this rank, for messages.
            limit_s: MEGACLASS_NETWORK_TIMEOUT; 0 disables the watch.
            describe: returns which rank listens at an address, in parentheses, or an empty text.
            ends_process: whether this process may be ended while joining. In an elastic job it joins again instead.
        """
        self.reason = ""
        self._name, self._limit_s, self._describe = name, limit_s, describe
        self._before = {inode for _, inode in _sockets()}
        self._seen: set[str] = set()
        self._peers: frozenset[str] | None = None
        self._tuned: set[str] = set()
        self._silent_since: dict[str | Address, float] = {}
        self._is_over = threading.Event()
        self._ends_process = ends_process
        self._excepthook = sys.excepthook
        self._thread = threading.Thread(target=self._run, daemon=True, name="megaclass-connections")

    def start(self) -> "ConnectionWatch":
        """Starts the thread; returns self."""
        if self._limit_s:
            self._thread.start()
        return self

    def joined(self, peers: Collection[str] = (), *, ends_process: bool) -> None:
        """Ends the joining phase: all ranks have connected. From here on only connections to their hosts count.

        Args:
            peers: addresses of the other hosts.
            ends_process: whether this process exits if it still runs 2 s after its connections were closed. In a user's own
                training loop the closed connections raise errors, which the user may handle; uncaught, they end the
                process with the same code.
        """
        # Once more in the caller's thread, so connections of the last moment are among those seen.
        self._find_dead(time.monotonic())
        self._ends_process = ends_process
        self._peers = frozenset(self._seen | set(map(_plain, peers)))

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        # An elastic job continues: a later error is not one of the network.
        if sys.excepthook == self._end_uncaught:
            sys.excepthook = self._excepthook

    def _end_uncaught(self, kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        """Is sys.excepthook once a connection was ended: the program ends after its traceback, with a code that says so."""
        self._excepthook(kind, error, at)
        if issubclass(kind, Exception):
            # Python ends with the code of a SystemExit that leaves the hook; it still calls what is registered with atexit.
            raise SystemExit(EXIT_TRY_AGAIN)

    def _run(self) -> None:
        interval_s = min(1.0, self._limit_s / 20)
        while not self._is_over.wait(interval_s):
            try:
                dead = self._find_dead(time.monotonic())
            except OSError:
                continue  # the process has no free file descriptor at the moment
            # The first dead connection decides: closing the others makes them look dead as well.
            if dead and not self.reason:
                self._end(dead)

    def _find_dead(self, now: float) -> list[Connection]:
        """Returns the connections that have gone unanswered for too long, and updates the state."""
        judged_s = JUDGED_AFTER * self._limit_s
        joined_s = (_JOINED_AFTER if self._peers is None else JUDGED_AFTER) * self._limit_s
        dead: list[Connection] = []
        silent: dict[str | Address, float] = {}
        for connection in self._watched():
            if not connection.is_open:
                key: str | Address = connection.remote
                since = silent[key] = self._silent_since.get(key, now)
                is_dead = now - since >= joined_s
            else:
                self._seen.add(connection.remote[0])
                self._tune(connection)
                # An idle connection owes an answer for a moment whenever data is sent on it: silence alone means nothing.
                if not connection.owes_answer or connection.silent_s < judged_s / 4:
                    continue
                since = silent[connection.inode] = self._silent_since.get(connection.inode, now)
                is_dead = connection.silent_s >= judged_s and now - since >= judged_s / 2
            if is_dead:
                dead.append(connection)
        # Only what is silent now: a connection that was answered, or is gone, starts from zero when it falls silent again.
        self._silent_since = silent
        return dead

    def _watched(self) -> Iterator[Connection]:
        """Yields the connections to other hosts that count in the current phase."""
        for connection in connections():
            address = connection.remote[0]
            if address == connection.local[0] or ipaddress.ip_address(address).is_loopback:
                continue
            if connection.inode not in self._before if self._peers is None else address in self._peers:
                yield connection

    def _tune(self, connection: Connection) -> None:
        """Makes the kernel probe the connection when no data flows, and retransmit at short intervals."""
        if connection.inode in self._tuned:
            return
        self._tuned.add(connection.inode)
        # Frequent enough that one probe after an outage of 20 s is answered before the connection is judged.
        probe_s = max(1, round(self._limit_s / 15))
        with contextlib.suppress(OSError), _borrowed(connection.file) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
            # The kernel would close the connection after this many probes; this thread decides earlier.
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 100)
            # By default the pauses between retransmissions double without end, and a network that works again is noticed
            # only after as long a time as it was interrupted.
            held.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)

    def _end(self, dead: list[Connection]) -> None:
        """Reports the dead connections and closes all connections to their hosts."""
        first = dead[0]
        share = _JOINED_AFTER if self._peers is None and not first.is_open else JUDGED_AFTER
        what = f"has not been answered for {share * self._limit_s:g} s"
        kind = "connection" if first.is_open else "attempt to connect"
        more = f", and {len(dead) - 1} other connection(s) likewise" if len(dead) > 1 else ""
        self.reason = (
            f"{self._name}: the {kind} from {first.local[0]} port {first.local[1]} to {first.remote[0]} port "
            f"{first.remote[1]}{self._describe(first.remote)} {what}{more}. Does a firewall drop the packets, or is a host or "
            f"cable down? {LIMIT_NAME}={self._limit_s:g} is the limit in seconds."
        )
        _log.error(self.reason)
        if not self._ends_process:
            sys.excepthook = self._end_uncaught
        hosts = {connection.remote[0] for connection in dead}
        for connection in [connection for connection in self._watched() if connection.remote[0] in hosts]:
            # Threads that wait for the connection get an error; the other ranks learn of it when this rank ends.
            with contextlib.suppress(OSError), _borrowed(connection.file) as held:
                held.shutdown(socket.SHUT_RDWR)
        if self._ends_process and not self._is_over.wait(_LEAVE_S):
            os._exit(EXIT_TRY_AGAIN)


class OwnConnections:
    """The TCP sockets that this process has opened for one generation of an elastic job, to end all of them at once.

    While joining, these are all sockets since the object was created; after note_sockets() those that existed then, so
    connections that the program makes for other purposes stay.
    """

    def __init__(self) -> None:
        self._before = {inode for _, inode in _sockets()}
        self._own: set[str] | None = None

    def note_sockets(self) -> None:
        """Notes the sockets that the generation has; later ones do not belong to it."""
        self._own = {inode for _, inode in _sockets()} - self._before

    def end(self) -> None:
        """Shuts the connections down: threads that wait for one of them get an error. May be called from any thread.

        Listening sockets stay as they are: gloo aborts the process if one of its own fails.
        """
        for file, inode in _sockets():
            if inode in self._before or (self._own is not None and inode not in self._own):
                continue
            with contextlib.suppress(OSError), _borrowed(file) as held:
                is_tcp = held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM
                if is_tcp and not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    held.shutdown(socket.SHUT_RDWR)


def connections() -> Iterator[Connection]:
    """Yields the TCP connections of this process that are open or being opened."""
    opening: dict[str, tuple[Address, Address]] | None = None
    for file, inode in _sockets():
        try:
            with _borrowed(file) as held:
                if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
                    continue
                state, _, retransmits, probes, backoff, *rest = _TCP_INFO.unpack(
                    held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                )
                if state == _ESTABLISHED:
                    local, remote = _address(held.getsockname()), _address(held.getpeername())
                    unacked, last_data_ms, last_ack_ms = rest[3 + 4], rest[3 + 11], rest[3 + 12]
                    owes = bool(unacked or retransmits or probes or backoff)
                    silent_s = min(last_data_ms, last_ack_ms) / 1000
                    yield Connection(file, inode, local, remote, True, owes, silent_s)
                elif state == _SYN_SENT:
                    # getpeername() fails until the connection is established.
                    opening = _being_opened() if opening is None else opening
                    if inode in opening:
                        yield Connection(file, inode, *opening[inode], False, True, 0.0)
        except (OSError, struct.error):
            continue  # closed in the meantime, or not TCP


@contextlib.contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    """Yields a socket object for a copy of a descriptor that belongs to other code."""
    # A copy, because closing the object must not close the descriptor of the library that owns it.
    copy = os.dup(file)
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        # Between the two calls the number may have become another kind of file.
        os.close(copy)
        raise
    with held:
        yield held


def _sockets() -> Iterator[tuple[int, str]]:
    """Yields descriptor and inode of every socket of this process."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(file.readlink())
            if target.startswith("socket:["):
                yield int(file.name), target[8:-1]


def _being_opened() -> dict[str, tuple[Address, Address]]:
    """Returns both ends of each connection of this host that is being opened, keyed by inode."""
    found: dict[str, tuple[Address, Address]] = {}
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, state, *_, inode = line.split()[:10]
                if int(state, 16) == _SYN_SENT:
                    found[inode] = (_from_hex(local), _from_hex(remote))
    return found


def _from_hex(text: str) -> Address:
    """Parses an address: '0100007F:1F90' -> ('127.0.0.1', 8080); words of 4 bytes in this machine's byte order."""
    digits, _, port = text.partition(":")
    words = [int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8)]
    return _plain(str(ipaddress.ip_address(b"".join(words)))), int(port, 16)


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return _plain(name[0]), name[1]


def _plain(address: str) -> str:
    """Returns the address without a zone, and an IPv4-mapped IPv6 address as IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
