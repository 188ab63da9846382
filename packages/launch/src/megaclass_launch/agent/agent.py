"""The agent: one process per host, started by the driver, that supervises the ranks of that host. Standard library only.

    driver  --- stdin:  the job, "go", signals, heartbeats --->  agent  --- starts, signals, reaps --->  workers
    driver  <-- stdout: hello, output, exits, heartbeats ------  agent  <-- stdout and stderr, by pipe --  workers

stdin is the lifeline: if it ends or falls silent, the driver, its ssh or the cable is gone, and the agent ends the workers.

    greeting, hello --"start"--> workers run --all ended, "end", a signal, or the driver lost--> ending --> "done", leave

In an elastic job the driver may order further starts, ends single workers ("kill"), and decides when the agent leaves. The
agent passes its messages about generations ("publish", "changed", "broken", "dismiss") on to the workers, and their answers
back. A worker then has a number that no other worker of the job ever has: `rank` is this number here, because the rank may
change with every generation.

Everything happens in one thread, in `Agent._loop`; no field needs a lock. The parts and the state that each one owns:

    part or field       job                                            state, and who changes it
    DriverConnection    messages from and to the driver, its loss      see the class
    WorkerSetup         checks the host, makes the environments        interfaces of this host: check
    Rank0Ports          holds the ports for rank 0                     the held sockets: hold
    WorkerChannels      messages with the workers of an elastic job    see workers.py
    Supervisor          starts, signals, reaps and kills workers       the workers, the time of SIGKILL
    WorkerOutput        from the workers' pipes to the driver          the open pipes, and whether they are read
    AgentCall           the function of a job that is a call             its file: the driver's "call" messages
    RankWatch           heartbeats, progress, stacks of ranks that hang    see rank_watch.py
    _is_ending          the workers were told to end                   _end; read by _is_over and _note_exits
    _helpers_until      time for helper processes to leave             _end_leftovers, once the last rank has ended
"""

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from megaclass_launch.agent.orphan_killer import processes_of, send
from megaclass_launch.agent.rank_watch import RankWatch
from megaclass_launch.agent.supervisor import Supervisor, Worker
from megaclass_launch.agent.workers import READ_BYTES, Rank0Ports, WorkerChannels, WorkerOutput, WorkerSetup
from megaclass_launch.elastic import FD_NAME as ELASTIC_FD
from megaclass_launch.errors import LaunchError
from megaclass_launch.operating_system import readable
from megaclass_launch.placement import job_environment
from megaclass_launch.signals import SignalQueue
from megaclass_launch.wire.call import AgentCall
from megaclass_launch.wire.protocol import (
    MAX_LINE_BYTES,
    Message,
    MessageReader,
    Outbox,
    ProtocolError,
    beat_interval,
    encode,
    greeting,
    silence_limits,
)
from megaclass_launch.world import World

# ---- the connection to the driver ----
#
#     connected --stdin ends, stdout is closed, silence, or bytes of no message -------> lost, for good
#
# The job comes in on stdin, messages to the driver go out on stdout. Neither blocks: a stopped driver must not stop the agent.
# The connection never comes back: a driver that has lost an agent gives up its host, so the ranks must end. Everything happens
# in the agent's one thread.
#
#     field              changed by                                       read by
#     _heard_at          _on_stdin, for any byte                          check_silence, lost_at
#     _is_connected      lose, once                                       lose: the first reason is reported; _send
#     _unsent            _send, _write, lose                              is_full, is_empty, watch_room


_QUEUE_BYTES = 4 << 20
"""If more waits for the driver, the workers' pipes are not read: they wait, as for a slow terminal, and no memory grows."""
_JOB_S = 30.0
"""How long to wait for the job on stdin. ssh delivers it with the first packets, unless the cable was cut just then."""

_logger = logging.getLogger("megaclass.launch")


def read_job() -> tuple[Message | None, bytes]:
    """Returns the first line of stdin and what came with it; None if the driver left before the line was complete."""
    data = bytearray()
    while (end := data.find(b"\n")) < 0:
        # Limited: an agent whose driver died during the login would otherwise wait for its job forever.
        is_there = readable([sys.stdin], _JOB_S)
        more = os.read(sys.stdin.fileno(), READ_BYTES) if is_there else b""
        if not more or len(data) > MAX_LINE_BYTES:
            return None, b""
        data += more
    reader = MessageReader()
    [(job, _)] = reader.feed(bytes(data[: end + 1]))
    # Heartbeats, or the order to end, may have come in the same packet.
    return job, bytes(data[end + 1 :])


class DriverConnection:
    """Reads the driver's messages from stdin and sends the agent's through stdout; both must be non-blocking.

    silence_s: a driver that sends nothing for so long is lost. obey: carries out one message. on_lost: called
    once, with whether the driver fell silent.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        silence_s: float,
        obey: Callable[[Message], None],
        on_lost: Callable[[bool], None],
    ) -> None:
        self._selector = selector
        self._silence_s = silence_s
        self._obey = obey
        self._on_lost = on_lost
        self._reader = MessageReader()
        self._unsent = Outbox(partial(os.write, sys.stdout.fileno()))
        self._is_connected = True
        self._heard_at = time.monotonic()

    @property
    def is_empty(self) -> bool:
        """Returns whether the driver has been sent everything."""
        return not self._unsent.num_bytes

    @property
    def is_full(self) -> bool:
        """Returns whether so much waits that nothing more should be read from the workers."""
        return self._unsent.num_bytes >= _QUEUE_BYTES

    @property
    def lost_at(self) -> float:
        """Returns the time at which the driver is lost unless something arrives."""
        return self._heard_at + self._silence_s

    # ---- to the driver ----

    def greet(self, token: str) -> None:
        """Sends the token, by which the driver finds the start of the agent's own output after that of login scripts."""
        self._send(greeting(token))

    def say(self, message: Message, payload: bytes = b"") -> None:
        """Sends a message; after the loss of the driver it is dropped."""
        self._send(encode(message, payload))

    def watch_room(self) -> None:
        """Waits for room in the driver's pipe while something is queued."""
        # Only then: a pipe with room would wake the selector all the time.
        is_registered = sys.stdout.fileno() in self._selector.get_map()
        if self.is_empty == is_registered:
            if is_registered:
                self._selector.unregister(sys.stdout)
            else:
                self._selector.register(sys.stdout, selectors.EVENT_WRITE, self._write)

    def _send(self, data: bytes) -> None:
        # The ends of the ranks are also reported after the loss of the driver, and then go nowhere.
        if self._is_connected and not self._unsent.add(data):
            self.lose("the driver has closed the pipe")

    def _write(self) -> None:
        if not self._unsent.write():
            self.lose("the driver has closed the pipe")

    # ---- from the driver ----

    def listen(self) -> None:
        """Has the selector call for what arrives on stdin."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._on_stdin)

    def feed(self, data: bytes) -> None:
        """Carries out the driver's messages in `data`."""
        try:
            for message, _ in self._reader.feed(data):
                self._obey(message)
        except ProtocolError as error:
            self.lose(f"the driver sent something else than messages: {error}")

    def check_silence(self, now: float) -> None:
        """Counts the driver as lost if it has sent nothing for too long, not even heartbeats."""
        if now - self._heard_at > self._silence_s:
            self.lose(f"the driver has sent nothing for {now - self._heard_at:.1f} s", is_silent=True)

    def lose(self, why: str, *, is_silent: bool = False) -> None:
        """Counts the driver as lost, and reports the first reason."""
        if self._is_connected:
            self._is_connected = False
            # No process reads it any more, and a full queue would keep the workers' pipes unread.
            self._unsent.clear()
            # The driver cannot be told any more; stderr may still reach a terminal or a log.
            _logger.warning(f"{why}; ending its ranks")
            self._on_lost(is_silent)

    def _on_stdin(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        # An error means the same as the end of the stream: no message of the driver can arrive any more.
        except OSError:
            data = b""
        if data:
            # For any byte: a long message may take longer than the limit, and heartbeats wait behind it.
            self._heard_at = time.monotonic()
            self.feed(data)
        else:
            # An ended stream is always readable: the loop would spin until the ranks are gone.
            self._selector.unregister(sys.stdin)
            self.lose("the driver has ended")


_HELPERS_S = 0.5
"""Time for helper processes (Python's resource tracker, say) to leave after the last rank."""
_TICK_S = 0.05
"""Interval at which processes that are being ended are checked."""
_CHANNEL_TICK_S = 0.02
"""Interval at which a full channel to a worker is tried again."""


def main() -> int:
    """Reads the job from stdin, supervises its ranks, and leaves when nothing of them is left."""
    # The driver may itself be a rank of an elastic job, whose channel is not that of these ranks.
    os.environ.pop(ELASTIC_FD, None)
    logging.basicConfig(format=f"megaclass agent on {socket.gethostname()}: %(message)s")
    # Before anything else: the agent must not outlive a driver that gives up during the start.
    with SignalQueue([signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]) as signals:
        job, rest = read_job()
        if job is None:
            return 0
        # From here on no read or write may block: a stopped driver must not keep the agent from its workers.
        os.set_blocking(sys.stdin.fileno(), False)
        os.set_blocking(sys.stdout.fileno(), False)
        silence_s, _ = silence_limits(job["heartbeat_s"], job["grace_s"])
        with Supervisor(
            job["run_id"], grace_s=job["grace_s"], adopts=True, captures=True, silence_s=silence_s
        ) as supervisor:
            Agent(job, supervisor, signals).run(rest)
    return 0


class Agent:
    """Carries out one job on this host."""

    def __init__(self, job: Message, supervisor: Supervisor, signals: SignalQueue) -> None:
        silence_s, self._silence_grace_s = silence_limits(job["heartbeat_s"], job["grace_s"])
        self._job = job
        self._supervisor = supervisor
        self._signals = signals
        self._is_elastic = bool(job["is_elastic"])
        self._selector = selectors.DefaultSelector()
        self._driver = DriverConnection(self._selector, silence_s, self._carry_out, self._on_driver_lost)
        self._say = self._driver.say
        self._setup = WorkerSetup(job, os.environ)
        self._ports = Rank0Ports(job["master_port"], "127.0.0.1" if job["is_alone"] else "")
        self._channels = WorkerChannels(
            self._selector, self._say, lambda number: self._kill([number]), is_elastic=self._is_elastic
        )
        self._output = WorkerOutput(self._selector, self._on_output)
        interval_s, hang_timeout_s = beat_interval(job["heartbeat_s"]), job["hang_timeout_s"]
        self._watch = RankWatch(
            supervisor, self._say, host=job["host"], interval_s=interval_s, hang_timeout_s=hang_timeout_s
        )
        self._call: AgentCall | None = None
        self._is_ending = False
        self._helpers_until = 0.0

    def run(self, received: bytes) -> None:
        """Runs until nothing of the ranks is left and the driver has received everything.

        received: what has come from the driver together with the job.
        """
        self._driver.feed(received)
        self._driver.listen()
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._greet()
        # No process writes any more after this line, whatever the end was: the supervisor has found and killed all of them.
        self._loop(until=self._is_over)
        self._output.read_rest()
        self._say({"say": "done"})
        self._loop(until=lambda: self._driver.is_empty)

    def _loop(self, until: Callable[[], bool]) -> None:
        while not until():
            # Every pass, because handling an event may have filled or emptied the queue.
            self._balance()
            # Any event may have ended a worker or filled the queue: clock and exits are looked at after each batch.
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            now = time.monotonic()
            self._driver.check_silence(now)
            self._watch.check(now)
            self._note_exits()

    def _balance(self) -> None:
        """Reads the workers only as fast as the driver reads the agent, so no memory grows."""
        self._driver.watch_room()
        self._output.pause_if(self._driver.is_full)
        self._channels.write()

    def _wait_s(self) -> float:
        # The end is polled: the grace has a deadline, and processes below the workers end without a signal to the agent.
        if self._is_ending or self._helpers_until:
            return _TICK_S
        now = time.monotonic()
        wait_s = max(0.0, min(self._watch.next_at(now), self._driver.lost_at) - now)
        return min(wait_s, _CHANNEL_TICK_S) if self._channels.has_unsent else wait_s

    # ---- the driver ----

    def _carry_out(self, message: Message) -> None:
        match message.get("do"):
            case "call":
                self._call = self._call or AgentCall()
                self._call.add(message["data"])
            case "start":
                self._start_workers(message)
            case "publish":
                self._channels.publish(message, self._environment)
                if message["uses_ports"]:
                    self._say({"say": "spare", **self._ports.hold()})
            case "changed" | "broken":
                self._channels.tell_generation(message)
            case "dismiss":
                self._channels.dismiss(message["workers"], message["why"])
            case "kill":
                self._kill(message["workers"], only_stopped=bool(message.get("if_stopped")))
            # Heartbeats need no case: DriverConnection notes the time of any byte.
            case "signal":
                self._supervisor.send_signal(int(message["number"]))
            case "stacks":
                ranks = {int(number): rank for number, rank in message["ranks"].items()}
                asked = [worker for worker in self._supervisor.running() if worker.rank in ranks]
                self._watch.report_stacks(
                    message["name"], asked, ranks, self._output.read_stderr, may_abort=bool(message["may_abort"])
                )
            case "verdict":
                self._watch.keep_verdict(message)
            case "end":
                self._end(message.get("grace_s"), int(message.get("first", signal.SIGTERM)))

    def _on_driver_lost(self, is_silent: bool) -> None:
        # After a silence shorter, so all is over within the heartbeat limit on both sides.
        self._end(self._silence_grace_s if is_silent else None)

    def _on_signals(self) -> None:
        # SIGCHLD only wakes the loop, which looks for exits after every batch of events.
        if set(self._signals.taken()) - {signal.SIGCHLD}:
            self._say({"say": "note", "text": "a signal told the agent to end"})
            self._end(None)

    def _end(self, grace_s: float | None, first: int = signal.SIGTERM) -> None:
        self._is_ending = True
        self._supervisor.end(grace_s, first)

    def _is_over(self) -> bool:
        # Processes that hang in the kernel count as over, unless one of them ends in this very moment.
        return self._is_ending and self._supervisor.continue_ending() and not self._supervisor.reap()

    # ---- the start ----

    def _greet(self) -> None:
        """Sends hello with what the driver must know before the ranks may start, or the reason why they cannot."""
        self._driver.greet(self._job["token"])
        hello: Message = {"say": "hello", "pid": os.getpid(), "ssh": os.environ.get("SSH_CONNECTION", "")}
        try:
            hello |= self._setup.check()
            if self._job["holds_ports"]:
                hello |= self._ports.hold()
        except LaunchError as error:
            hello = {"say": "refuse", "why": str(error)}
            self._end(0.0)
        self._say(hello)

    def _start_workers(self, start: Message) -> None:
        # In an elastic job rank 0 listens by itself, in one generation after the other.
        offer = None if self._is_elastic else self._ports.offer_store(start["address"])
        pids = {}
        try:
            for entry in start["workers"]:
                number = int(entry["worker"])
                env = self._environment(World(**entry["world"]), start, offer.name if offer else "")
                with self._channels.open(number, start) as (own, fds):
                    worker = self._start_worker(number, {**env, **own, "MEGACLASS_RESTART": str(start["restart"])}, fds)
                pids[str(number)] = worker.pid
        except LaunchError as error:
            # Some workers of this host may run already; the driver ends those of the other hosts.
            self._say({"say": "refuse", "why": str(error)})
            self._end(None)
            return
        if offer:
            offer.serve()
        self._say({"say": "started", "pids": pids})

    def _environment(self, world: World, where: Message, store_socket: str = "") -> dict[str, str]:
        """Returns the variables of one generation: place, address, ports, secret and network interface."""
        return {
            **self._setup.placed(world, where),
            **job_environment(where["secret"], where["store_port"], store_socket),
        }

    def _start_worker(self, rank: int, env: Mapping[str, str], pass_fds: Sequence[int]) -> Worker:
        """Starts one worker. Raises LaunchError if the command cannot be started.

        env: the variables that are its own. pass_fds: files that it inherits, beyond that for its status.
        """
        page = self._watch.new_page(rank)
        inherited = self._watch.environment(rank)
        no_call: tuple[dict[str, str], list[int], None] = {}, [], None
        with self._call.pipe() if self._call else nullcontext(no_call) as (call_env, call_fds, result_fd):
            worker = self._supervisor.start(
                rank,
                self._job["command"],
                {**self._setup.base, **env, **inherited, **call_env},
                self._setup.workdir,
                pass_fds=[page.fileno(), *call_fds, *pass_fds],
            )
        self._output.watch(worker, result_fd)
        return worker

    # ---- output and ends of the workers ----

    def _on_output(self, rank: int, stream: str, data: bytes) -> None:
        if not self._watch.take_output(rank, stream, data):
            self._say({"say": "output", "rank": rank, "stream": stream}, data)

    def _note_exits(self) -> None:
        for worker in self._supervisor.reap():
            self._note_exit(worker)
        # The driver of an elastic job may start further workers here, and ends the agent when the job ends.
        is_done = bool(self._supervisor.workers) and not self._supervisor.running() and not self._is_elastic
        if is_done and not self._is_ending:
            self._end_leftovers()

    def _note_exit(self, worker: Worker) -> None:
        # What it said last, for example why it failed; the driver forgets the worker with its exit.
        self._channels.read(worker.rank)
        self._channels.close(worker.rank)
        # Before its exit, because the driver then decides whether the job may be restarted.
        self._watch.report_progress()
        # Also before its exit: the driver quotes its last lines in the report.
        self._output.read_last(worker)
        self._say({"say": "exit", "rank": worker.rank, "pid": worker.pid, "code": worker.code})
        if self._is_elastic:
            # What it started ends with it; its pid may belong to another process later.
            _kill_session(worker)
            self._supervisor.forget(worker)
            self._watch.forget(worker.rank)

    def _kill(self, numbers: Sequence[int], *, only_stopped: bool = False) -> None:
        for worker in self._supervisor.running():
            # Checked here, at the last moment: since the driver's order it may have been continued by SIGCONT.
            if worker.rank in numbers and (not only_stopped or self._supervisor.is_stopped(worker)):
                _kill_session(worker)

    def _end_leftovers(self) -> None:
        """Ends what the ranks left behind, after a moment in which helper processes may leave by themselves."""
        # The wait is short and starts with the end of the last rank; `_wait_s` polls meanwhile.
        names = self._supervisor.leftovers()
        now = time.monotonic()
        self._helpers_until = self._helpers_until or now + _HELPERS_S
        if names and now < self._helpers_until:
            return
        self._end(None)
        if names:
            text = f"ending what its ranks left behind: {', '.join(names)}"
            self._say({"say": "note", "text": text})


def _kill_session(worker: Worker) -> None:
    for pid in processes_of("none", {worker.pid}):
        send(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
