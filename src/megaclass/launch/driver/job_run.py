"""One start of all ranks on all hosts, from the first connection to the last process gone. Standard library only."""

import contextlib
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

from megaclass.distributed.network.addresses import is_own
from megaclass.distributed.network.job_secret import new_secret
from megaclass.errors import LaunchError
from megaclass.launch.driver.agent_pipe import Link, LinkState
from megaclass.launch.driver.failure_report import exit_status, how_it_ended, signal_name, stopped
from megaclass.launch.driver.output import RankOutput, Screen
from megaclass.launch.driver.rank_table import Roll
from megaclass.launch.driver.remote_orphan_killer import RemoteSweep, start_sweep
from megaclass.launch.driver.ssh import SshSettings, agent_command, why_not_started
from megaclass.launch.launchers.local import EXIT_RESUME_ME
from megaclass.launch.plan import Placement
from megaclass.launch.signals import SignalInbox
from megaclass.launch.versions import differences
from megaclass.launch.wire.agent_messages import ip_address
from megaclass.launch.wire.heartbeat import beat_interval, silence_limits
from megaclass.launch.wire.protocol import Message, ProtocolError

EXIT_HOST_LOST = 255
"""As ssh's own: a host or its agent was lost, no rank failed before."""
_EXIT_NOT_STARTED = 2
EXIT_USER_ERROR = 2
"""Of a rank: by convention a wrong command line, a setting, a folder that is taken. A second try meets it again."""
_SAVE_S = 60.0
"""After the first rank has left with 75, "resume me": for the others to save and leave, too."""
_SETTLE_S = 1.0
"""After a host could not be reached, others may fail for the same reason: all are named at once."""
_LEAVE_S = 4.0
"""Beyond the grace: for the processes to vanish and the news of it to arrive."""
_STDERR_READS = 16
"""At the end of a line: of what the other side goes on writing to stderr, only so much is waited for."""
_MAX_SWEEPS = 64
"""Where more hosts are lost at once, the network is; agents then end their ranks themselves."""
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class GangSettings:
    command: tuple[str, ...]
    workdir: str
    ssh: SshSettings
    given: dict[str, str] = field(default_factory=dict)
    """Variables the user gave: they win over everything but a rank's place."""
    passed: dict[str, str] = field(default_factory=dict)
    """Part of the driver's environment for other hosts; the local agent inherits all of it."""
    interfaces: tuple[str, ...] = ()
    master_port: int = 0
    start_timeout_s: float = 30.0
    heartbeat_s: float = 40.0
    grace_s: float = 3.0
    hang_timeout_s: float = 0.0
    allows_mixed_versions: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    exit_code: int
    failed_hosts: tuple[str, ...] = ()
    """Hosts that could not be reached, were lost, or on which the first rank failed."""
    may_restart: bool = True
    """False after Ctrl-C, exit code 75 and the like: somebody wants it to end."""


class Voice(Protocol):
    """Where sentences of the driver go."""

    def say(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...


_RESUME_ME = Outcome(exit_code=EXIT_RESUME_ME, may_restart=False)


class Gang:
    """All ranks of one start. They begin together and end together."""

    def __init__(
        self,
        placements: Sequence[Placement],
        settings: GangSettings,
        *,
        restart: int,
        restarts_left: int,
        output: RankOutput,
        screen: Screen,
        voice: Voice,
        inbox: SignalInbox,
    ) -> None:
        self._settings = settings
        self._placements = placements
        self._restart = restart
        self._restarts_left = restarts_left
        self._output = output
        self._screen = screen
        self._voice = voice
        self._inbox = inbox
        self._run_id = secrets.token_hex(8)
        self._token = secrets.token_hex(16)
        self._secret = new_secret()
        self._selector = selectors.DefaultSelector()
        self._links: list[Link] = []
        self._sweeps: list[RemoteSweep] = []
        self._roll = Roll(placements)
        self._outcome: Outcome | None = None
        self._verdict = ""
        self._num_interrupts = 0
        self._gives_up_at = float("inf")
        # Once a rank has left with 75: when those that have not are ended.
        self._left_by: float | None = None
        # Of the last checkpoint that a rank reported.
        self._step: int | None = None
        self._beat_at = 0.0
        self._is_paused = False
        self._printed_at = time.monotonic()
        self._problems: list[tuple[str, str]] = []

    def run(self) -> Outcome:
        """Starts everything, waits, and leaves nothing behind."""
        self._selector.register(self._inbox, selectors.EVENT_READ, self._on_signals)
        try:
            for placement in self._placements:
                self._connect(placement)
            self._loop(until=self._is_everybody_here, is_start=True)
            if self._outcome is None and not self._problems:
                self._check_versions()
            if self._outcome is not None:
                self._drop_late_comers()
            elif self._problems:
                self._fail_to_start()
            else:
                self._go()
            self._loop(until=lambda: all(link.is_over for link in self._links))
        finally:
            self._close()
        if self._outcome is None and self._left_by is not None:
            return _RESUME_ME
        return self._outcome or Outcome(exit_code=0)

    # ---- the start ----

    def _connect(self, placement: Placement) -> None:
        command = agent_command(placement.host, self._settings.ssh)
        self._voice.detail(f"{placement.host.name}: {placement.ranks()}, {command}")
        link = Link(placement, command, self._token)
        self._links.append(link)
        self._listen(link)
        s = self._settings
        link.send(
            {
                "token": self._token,
                "secret": self._secret,
                # One for each agent: two names may be one machine, where an agent must not end the other one's ranks.
                "run_id": self._run_id_of(len(self._links)),
                "restart": self._restart,
                "host": placement.host.name,
                "worlds": [asdict(world) for world in placement.worlds],
                "command": s.command,
                "workdir": s.workdir,
                "passed": {} if placement.host.is_local else s.passed,
                "given": s.given,
                "interfaces": s.interfaces,
                "master_port": s.master_port,
                "needs_versions": len(self._placements) > 1,
                "heartbeat_s": s.heartbeat_s,
                "grace_s": s.grace_s,
            }
        )

    def _run_id_of(self, number: int) -> str:
        return f"{self._run_id}-{number}"

    def _listen(self, link: Link) -> None:
        self._selector.register(link.stdout, selectors.EVENT_READ, partial(self._on_message, link))
        if not link.has_closed_stderr:
            self._selector.register(link.stderr, selectors.EVENT_READ, partial(self._on_stderr, link))

    @property
    def has_started(self) -> bool:
        """Whether any rank ran."""
        return bool(self._roll.pids)

    @property
    def step(self) -> int | None:
        """Of the last checkpoint that this start has published, as far as it was reported."""
        return self._step

    def _is_everybody_here(self) -> bool:
        return self._outcome is not None or all(link.state is not LinkState.STARTING for link in self._links)

    def _check_versions(self) -> None:
        if len(self._links) == 1:
            return
        found = differences({link.name: link.hello.get("versions", {}) for link in self._links})
        if found and not self._settings.allows_mixed_versions:
            listed = ". ".join(found.values())
            what = f"The hosts differ: {listed}. Install the same there, or add --allow-mixed-versions."
            self._problems.append(("", what))
        elif found:
            self._voice.say("WARNING the hosts differ: " + ". ".join(found.values()) + ".")

    def _fail_to_start(self) -> None:
        hosts = tuple(dict.fromkeys(host for host, _ in self._problems if host))
        for _, problem in self._problems:
            self._voice.say(problem)
        who = f": {len(hosts)} of {len(self._links)} host(s) cannot take part" if hosts else ""
        self._voice.say(f"nothing was started{who}.")
        self._outcome = Outcome(exit_code=_EXIT_NOT_STARTED, failed_hosts=hosts)
        self._drop_late_comers()
        self._order_end(grace_s=0.0)

    def _drop_late_comers(self) -> None:
        """Hangs up on those that are still being connected to; nothing runs there yet."""
        for link in self._links:
            if link.state is LinkState.STARTING:
                link.state = LinkState.LOST
                self._stop_listening(link)
                link.close()

    def _go(self) -> None:
        address, port = self._address_of_first_host(), self._links[0].hello["port"]
        store_port = self._links[0].hello.get("store_port", 0)
        self._voice.detail(f"run {self._run_id}: rank 0 listens at {address}, port {port} of {self._links[0].name}")
        self._printed_at = time.monotonic()
        for link in self._links:
            link.state = LinkState.RUNNING
            link.send({"do": "go", "address": address, "port": port, "store_port": store_port})

    def _address_of_first_host(self) -> str:
        """An address of host 0 that the others reach, told by those who have used it.

        The names in -H may be known to ssh alone; what ssh connected to is an address.
        """
        first = self._links[0]
        remote = [link for link in self._links if not link.placement.host.is_local]
        if "address" in first.hello:
            return str(first.hello["address"])
        if not remote or len(self._links) == 1:
            return "127.0.0.1"
        # SSH_CONNECTION: client address and port, server address and port.
        teller, index = (remote[0], 0) if first.placement.host.is_local else (first, 2)
        address = _address_in(teller.hello.get("ssh", ""), index)
        # Another host's word is not enough where ours can be checked: it would choose whom all ranks connect to.
        if address is None or (first.placement.host.is_local and not is_own(address)):
            raise LaunchError(
                f"Cannot tell by which address the other hosts reach {first.name}: ssh on {teller.name} says "
                f"{teller.hello.get('ssh', '')!r} (a tunnel?). Name the interface to use with --network-interface."
            )
        return address

    # ---- one loop for everything ----

    def _loop(self, until: Callable[[], bool], is_start: bool = False) -> None:
        deadline = time.monotonic() + self._settings.start_timeout_s if is_start else float("inf")
        while not until():
            now = time.monotonic()
            if is_start and self._problems:
                deadline = min(deadline, now + _SETTLE_S)
            if now >= deadline:
                self._miss_start()
                return
            if now >= self._gives_up_at:
                self._give_up()
                return
            self._beat(now)
            self._hold_back()
            self._watch_unsent()
            for key, _ in self._selector.select(self._wait_s(now, deadline)):
                # One event of the batch may close what another is about, or fill the screen.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
                    self._hold_back()

    def _wait_s(self, now: float, deadline: float) -> float:
        return 0.02 if self._is_paused else max(0.0, min(self._beat_at, deadline, self._gives_up_at) - now)

    def _miss_start(self) -> None:
        for link in self._links:
            if link.state is LinkState.STARTING and not self._problems:
                why = why_not_started(link.placement.host, self._settings.ssh, None, link.said)
                self._problems.append((link.name, f"{why} (--start-timeout {self._settings.start_timeout_s:g} s)"))

    def _beat(self, now: float) -> None:
        if now < self._beat_at:
            return
        self._beat_at = now + min(1.0, beat_interval(self._settings.heartbeat_s))
        silence_s, _ = silence_limits(self._settings.heartbeat_s, self._settings.grace_s)
        for link in self._links:
            if link.is_over:
                continue
            if not link.has_unsent:
                # What waits is proof of life enough, and a host that does not read cannot make the queue grow.
                link.send({"do": "beat"})
            # While we do not read, we cannot tell who is silent.
            if link.state is LinkState.RUNNING and not self._is_paused and now - link.heard_at > silence_s:
                silent_s = now - link.heard_at
                why = f"has not answered for {silent_s:.1f} s: its cable, its network or itself is gone"
                self._lose(link, why, is_silent=True)
        if self._outcome is None and (sentence := self._roll.name_who_left_early()) is not None:
            self._voice.say(sentence)
        self._end_what_hangs(now)
        if self._left_by is not None and now >= self._left_by:
            self._end(_RESUME_ME)
        if self._screen.fault is not None and self._outcome is None:
            self._voice.say(f"stdout cannot be written ({self._screen.fault.strerror}); ending the ranks.")
            self._end(Outcome(exit_code=128 + signal.SIGPIPE, may_restart=False))

    def _hold_back(self) -> None:
        """Reads the agents only while the screen keeps up: their pipes fill, the ranks wait, no memory grows."""
        if self._screen.is_full == self._is_paused:
            return
        self._is_paused = self._screen.is_full
        for link in self._links:
            if link.is_over:
                continue
            if self._is_paused:
                self._selector.unregister(link.stdout)
                if not link.has_closed_stderr:
                    self._selector.unregister(link.stderr)
            else:
                link.heard_at = time.monotonic()
                self._listen(link)

    def _watch_unsent(self) -> None:
        """A job line may be longer than a pipe."""
        for link in self._links:
            is_watched = not link.stdin.closed and link.stdin.fileno() in self._selector.get_map()
            if link.has_unsent and not is_watched and not link.is_over:
                self._selector.register(link.stdin, selectors.EVENT_WRITE, link.write)
            elif is_watched and not link.has_unsent:
                self._selector.unregister(link.stdin)

    # ---- what the agents say ----

    def _on_message(self, link: Link) -> None:
        try:
            messages = link.read()
            if messages is None:
                self._on_end_of_line(link)
                return
            for message, payload in messages:
                self._hear(link, message, payload)
        except ProtocolError as error:
            self._distrust(link, f"sent something that no agent of this version sends: {error}")

    def _distrust(self, link: Link, why: str) -> None:
        """A host that breaks the protocol takes no further part: it is faulty, or not under its owner's control."""
        if link.state is LinkState.STARTING:
            self._problems.append((link.name, f"{link.name} {why}."))
            link.state = LinkState.LOST
            self._stop_listening(link)
            link.close()
        else:
            self._lose(link, why)

    def _hear(self, link: Link, message: Message, payload: bytes) -> None:
        match message["say"]:
            case "output":
                rank = message["rank"]
                self._printed_at = time.monotonic()
                self._roll.note_lines(rank, self._output.put(rank, message["stream"], payload))
            case "hello":
                link.hello = message
                link.state = LinkState.READY
                self._voice.detail(f"{link.name}: agent {message['pid']} is ready")
            case "refuse":
                self._refuse(link, message["why"])
            case "started":
                self._roll.pids |= message["pids"]
                self._voice.detail(f"{link.name}: started {message['pids']}")
            case "exit":
                self._note_exit(message["rank"], message["pid"], message["code"])
            case "stopped":
                self._voice.say(stopped(message["rank"], link.name, message["pid"]))
            case "note":
                self._voice.say(f"{link.name}: {message['text']}")
            case "progress":
                self._step = message["step"] if self._step is None else max(self._step, message["step"])
            case "done":
                self._note_done(link)

    def _note_done(self, link: Link) -> None:
        """A host that leaves without having said how its ranks ended would turn a failure into a success."""
        unaccounted = [world.rank for world in link.placement.worlds if world.rank not in self._roll.codes]
        if link.state is LinkState.RUNNING and unaccounted and self._outcome is None:
            self._distrust(link, f"says that it is done, but not how rank {unaccounted[0]} ended")
            return
        link.state = LinkState.DONE
        self._stop_listening(link)

    def _refuse(self, link: Link, why: str) -> None:
        if link.state is LinkState.STARTING:
            link.state = LinkState.READY
            self._problems.append((link.name, f"{link.name}: {why}"))
        else:
            self._voice.say(f"{link.name}: {why}")
            self._end(Outcome(exit_code=_EXIT_NOT_STARTED, failed_hosts=(link.name,)))

    def _on_end_of_line(self, link: Link) -> None:
        """ssh or the local agent ended without having said that all is done."""
        for _ in range(_STDERR_READS):
            if not link.read_stderr():
                break
        code = link.wait(0.5)
        if link.state is LinkState.STARTING:
            why = why_not_started(link.placement.host, self._settings.ssh, code, link.said)
            self._problems.append((link.name, why))
            link.state = LinkState.LOST
            self._stop_listening(link)
        else:
            how = "its agent" if link.placement.host.is_local else "its agent, or the ssh connection to it,"
            self._lose(link, f"was lost: {how} ended" + (f" with {how_it_ended(code)}" if code is not None else ""))

    def _lose(self, link: Link, why: str, *, is_silent: bool = False) -> None:
        # A host that is silent could not be reached for a sweep, either.
        if link.state is LinkState.RUNNING and not is_silent:
            self._start_sweep(link)
        link.state = LinkState.LOST
        self._stop_listening(link)
        link.close()
        if self._outcome is None:
            last = "".join(f"\n    {line}" for line in link.said.splitlines()[-3:])
            lost = f"{link.name} ({link.placement.ranks()}) {why}."
            self._voice.say(f"{lost} What runs there ends by itself; all others are being stopped.{last}")
            self._verdict = f"the run ended because {lost}"
            self._end(Outcome(exit_code=EXIT_HOST_LOST, failed_hosts=(link.name,)))
        else:
            self._voice.detail(f"{link.name} {why}")

    def _start_sweep(self, link: Link) -> None:
        """Has the host's ranks killed, should agent and sweepers have died together; in vain where the host is down."""
        if len(self._sweeps) == _MAX_SWEEPS:
            return
        run_id, grace_s = self._run_id_of(self._links.index(link) + 1), min(self._settings.grace_s, _LEAVE_S)
        with contextlib.suppress(OSError):
            sweep = start_sweep(link.placement.host, self._settings.ssh, run_id, link.hello["pid"], grace_s)
            self._sweeps.append(sweep)

    def _on_stderr(self, link: Link) -> None:
        data = link.read_stderr()
        if data is None:
            self._selector.unregister(link.stderr)
        elif link.state is not LinkState.STARTING:
            for line in data.decode(errors="replace").splitlines():
                self._voice.detail(f"{link.name}: {line}")

    def _stop_listening(self, link: Link) -> None:
        for pipe in (link.stdout, link.stderr, link.stdin):
            if not pipe.closed and pipe.fileno() in self._selector.get_map():
                self._selector.unregister(pipe)

    # ---- the end ----

    def _note_exit(self, rank: int, pid: int, code: int) -> None:
        self._roll.note_lines(rank, self._output.finish(rank))
        self._roll.note_exit(rank, pid, code)
        if code == 0 or self._outcome is not None:
            return
        if code == EXIT_RESUME_ME:
            # It was asked to stop and has saved; the others are about to.
            if self._left_by is None:
                self._left_by = time.monotonic() + _SAVE_S
                self._voice.say(
                    f"rank {rank} on {self._roll.hosts[rank]} stopped as it was asked to, and can be resumed."
                )
            return
        self._voice.say(self._roll.headline_of(rank))
        self._verdict = self._roll.epitaph_of(rank) + self._output.where(rank)
        may_restart = code != EXIT_USER_ERROR
        if self._restarts_left and not may_restart:
            self._voice.say(f"exit code {code} says that something must be mended first: no restart.")
        outcome = Outcome(exit_code=exit_status(code), failed_hosts=(self._roll.hosts[rank],), may_restart=may_restart)
        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        """The first reason counts."""
        if self._outcome is None:
            self._outcome = outcome
        self._order_end()

    def _order_end(self, grace_s: float | None = None, first: int = signal.SIGTERM) -> None:
        for link in self._links:
            if not link.is_over:
                link.send({"do": "end", "grace_s": grace_s, "first": int(first)})
        until_killed_s = self._settings.grace_s if grace_s is None else grace_s
        self._gives_up_at = min(self._gives_up_at, time.monotonic() + until_killed_s + _LEAVE_S)

    def _on_signals(self) -> None:
        for number in self._inbox.taken():
            if number == signal.SIGINT:
                self._interrupt()
            elif number in (signal.SIGUSR1, signal.SIGUSR2):
                self._pass_on(number)
            elif number in (signal.SIGTERM, signal.SIGHUP):
                self._voice.say(f"{signal_name(number)}: ending the ranks.")
                self._outcome = Outcome(exit_code=128 + number, may_restart=False)
                self._order_end()

    def _interrupt(self) -> None:
        """Ctrl-C: once asks, twice insists, three times kills."""
        number = _INTERRUPTS[min(self._num_interrupts, 2)]
        self._num_interrupts += 1
        self._outcome = Outcome(exit_code=128 + signal.SIGINT, may_restart=False)
        left = self._roll.num_left
        more = {1: "; again for SIGTERM", 2: "; again for SIGKILL"}.get(self._num_interrupts, "")
        self._voice.say(f"Ctrl-C: {number.name} to {left} rank(s){more}.")
        if number is signal.SIGKILL or not self._roll.pids:
            self._order_end(grace_s=0.0)
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for link in self._links:
            if not link.is_over:
                link.send({"do": "signal", "number": int(number)})

    def _end_what_hangs(self, now: float) -> None:
        limit_s = self._settings.hang_timeout_s
        if not limit_s or not self._roll.pids or self._outcome is not None or self._is_paused:
            return
        if now - self._printed_at > limit_s:
            self._voice.say(
                f"no rank has printed anything for {limit_s:g} s (--hang-timeout). Running: {self._roll.name_running()}. "
                f"SIGABRT makes them print their stacks; then they are ended."
            )
            self._outcome = Outcome(exit_code=128 + signal.SIGABRT)
            self._order_end(first=signal.SIGABRT)

    def _give_up(self) -> None:
        for link in self._links:
            if not link.is_over:
                if link.state is LinkState.RUNNING:
                    self._start_sweep(link)
                link.state = LinkState.LOST
                self._stop_listening(link)
                self._voice.say(
                    f"{link.name} does not report that its {link.placement.ranks()} ended; hanging up on it."
                )

    def _close(self) -> None:
        for link in self._links:
            link.hang_up()
        for link in self._links:
            link.wait(2.0 if link.state is LinkState.DONE else 0.1)
            link.close()
        for sweep in self._sweeps:
            sweep.wait()
        for rank in self._roll.hosts:
            self._output.finish(rank)
        # Last, below what the others had to say while they were being stopped.
        if self._verdict:
            self._voice.say(self._verdict)
        self._selector.close()


def _address_in(ssh_connection: str, index: int) -> str | None:
    """A field of SSH_CONNECTION that others can reach; None when there is none."""
    told = ssh_connection.split()
    try:
        address = ip_address(told[index]) if len(told) == 4 else ""
    except ValueError:
        return None
    return address if address and not address.startswith("127.") and address != "::1" else None
