"""The agent: one process per host, started by the driver, that supervises the ranks of that host. Standard library only.

    driver  --- stdin:  the job, "go", signals, heartbeats --->  agent  --- starts, signals, reaps --->  workers
    driver  <-- stdout: hello, output, exits, heartbeats ------  agent  <-- stdout and stderr, by pipe --  workers

stdin is the lifeline: if it ends or falls silent, the driver, its ssh or the cable is gone, and the agent ends the workers.

    greeting, hello --"go"--> workers run --all ended, "end", a signal, or the driver lost--> ending --> "done", leave

Everything happens in one thread, in `Agent._loop`; no field needs a lock.

    field               changed by                              read by
    _driver             _say, _lose_driver                      _balance: stops reading the workers while it is full
    _pipes              _watch, _on_output at the end of a pipe  run: the rest of the output after the last process
    _is_connected       _lose_driver, once                      _lose_driver: the first reason is reported
    _is_ending          _end                                    _is_over, and whether leftovers must still be ended
    _helpers_until      _end_leftovers, after the last rank     _wait_s: polls until then
    _heard_at           _on_stdin, for any byte                 _beat: the driver is lost after silence_s
    _stopped            _beat                                   _beat: each stopped rank is reported once
    _step               _note_progress                          _note_progress: only news are sent
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megaclass.distributed.network.addresses import interfaces
from megaclass.distributed.restart_progress import FD_NAME, ProgressFile
from megaclass.errors import LaunchError
from megaclass.launch.agent.driver_pipe import READ_BYTES, DriverPipe, read_job
from megaclass.launch.agent.hang_reporter import LOOK_S, HangReporter
from megaclass.launch.agent.supervisor import Supervisor, Worker, default_threads, find_command
from megaclass.launch.network import hold_store_port, interface_towards, offer_store_socket, present, reserve_port
from megaclass.launch.plan import interface_environment, job_environment, rank_environment, without_other_starters
from megaclass.launch.signals import SignalQueue
from megaclass.launch.versions import installed_versions
from megaclass.launch.wire.heartbeat import beat_interval, silence_limits
from megaclass.launch.wire.protocol import Message, MessageReader, ProtocolError, encode, greeting
from megaclass.world import World

_logger = logging.getLogger("megaclass.launch")
_STREAMS = ("stdout", "stderr")
_HELPERS_S = 0.5
"""Time for helper processes (Python's resource tracker, say) to leave after the last rank."""
_TICK_S = 0.05
"""Interval at which processes that are being ended are checked."""


def main(kind: "type[Agent] | None" = None) -> int:
    """Reads the job from stdin, supervises its ranks, and leaves when nothing of them is left."""
    logging.basicConfig(format=f"megaclass agent on {socket.gethostname()}: %(message)s")
    # Before anything else: the agent must not outlive a driver that gives up during the start.
    with SignalQueue([signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]) as signals:
        job, rest = read_job()
        if job is None:
            return 0
        # From here on no read or write may block: a stopped driver must not keep the agent from its workers.
        os.set_blocking(sys.stdin.fileno(), False)
        os.set_blocking(sys.stdout.fileno(), False)
        silence_s, grace_s = silence_limits(job["heartbeat_s"], job["grace_s"])
        with Supervisor(
            job["run_id"], grace_s=job["grace_s"], adopts=True, captures=True, silence_s=silence_s
        ) as supervisor:
            agent = (kind or Agent)(job, supervisor, signals, silence_s=silence_s, silence_grace_s=grace_s)
            agent.obey(rest)
            agent.run()
    return 0


class Agent:
    """Carries out one job on this host."""

    def __init__(
        self, job: Message, supervisor: Supervisor, signals: SignalQueue, *, silence_s: float, silence_grace_s: float
    ) -> None:
        self._job = job
        self._supervisor = supervisor
        self._signals = signals
        self._silence_s = silence_s
        self._silence_grace_s = silence_grace_s
        self._worlds = [World(**world) for world in job["worlds"]]
        self._env = worker_base_environment(job, os.environ)
        self._interfaces: list[str] = []
        self._held_port: socket.socket | None = None
        self._store_port: socket.socket | None = None
        self._reader = MessageReader()
        self._selector = selectors.DefaultSelector()
        self._driver = DriverPipe(self._lose_driver)
        self._pipes: dict[int, tuple[Worker, str]] = {}
        self._is_reading_pipes = True
        self._stopped: set[int] = set()
        self._progress = ProgressFile()
        self._step: int | None = None
        self._hangs = HangReporter(job["host"], job["hang_timeout_s"], self._say)
        self._is_connected = True
        self._is_ending = False
        self._helpers_until = 0.0
        self._heard_at = time.monotonic()
        self._beat_at = 0.0

    def run(self) -> None:
        """Runs until nothing of the ranks is left and the driver has received everything."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._on_stdin)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._greet()
        # No process writes any more after this line, whatever the end was: the supervisor has found and killed all of them.
        self._loop(until=self._is_over)
        # No process writes any more: the pipes hold the rest of the output.
        for pipe in list(self._pipes):
            while self._on_output(pipe):
                continue
        self._say({"say": "done"})
        self._loop(until=lambda: self._driver.is_empty)

    def _loop(self, until: Callable[[], bool]) -> None:
        while not until():
            # Every pass, because handling an event may have filled or emptied the queue.
            self._balance()
            # Any event may have ended a worker or filled the queue: clock and exits are looked at after each batch.
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            self._beat()
            self._note_exits()

    # ---- messages of the driver ----

    def _on_stdin(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        # An error means the same as the end of the stream: no message of the driver can arrive any more.
        except OSError:
            data = b""
        if data:
            self._heard_at = time.monotonic()
            self.obey(data)
        else:
            self._selector.unregister(sys.stdin)
            self._lose_driver("the driver has ended")

    def obey(self, data: bytes) -> None:
        """Carries out the driver's messages in `data`."""
        try:
            for message, _ in self._reader.feed(data):
                self._carry_out(message)
        except ProtocolError as error:
            self._lose_driver(f"the driver sent something else than messages: {error}")

    def _carry_out(self, message: Message) -> None:
        match message.get("do"):
            case "go":
                self._start_workers(message)
            # Heartbeats need no case: any byte has already renewed _heard_at.
            case "signal":
                self._supervisor.send_signal(int(message["number"]))
            case "stacks":
                self._hangs.report_stacks(message["name"], self._supervisor.running(), self._read_stderr)
            case "verdict":
                self._hangs.keep_verdict(message)
            case "end":
                self._end(message.get("grace_s"), int(message.get("first", signal.SIGTERM)))

    def _on_signals(self) -> None:
        if set(self._signals.taken()) - {signal.SIGCHLD}:
            self._say({"say": "note", "text": "a signal told the agent to end"})
            self._end(None)

    def _lose_driver(self, why: str) -> None:
        if self._is_connected:
            self._is_connected = False
            self._driver.drop()
            _logger.warning(f"{why}; ending its ranks")
            # Shorter than the user's grace where necessary, so that all is over within the heartbeat limit on both sides.
            self._end(self._silence_grace_s)

    def _end(self, grace_s: float | None, first: int = signal.SIGTERM) -> None:
        self._is_ending = True
        self._supervisor.end(grace_s, first)

    # ---- the start ----

    def _greet(self) -> None:
        """Sends hello with what the driver must know before the ranks may start, or the reason why they cannot."""
        # The token tells the driver where the agent's own output starts, after that of login scripts.
        self._driver.send(greeting(self._job["token"]))
        hello: Message = {"say": "hello", "pid": os.getpid(), "ssh": os.environ.get("SSH_CONNECTION", "")}
        try:
            workdir = Path(self._job["workdir"])
            if not workdir.is_dir():
                raise LaunchError(f"There is no working folder {str(workdir)!r}; give another with --workdir.")
            # Found out now, so that nothing is started anywhere if one host lacks the program.
            find_command(self._job["command"], self._env, workdir)
            if self._job["interfaces"]:
                self._interfaces = present(self._job["interfaces"])
                hello["address"] = interfaces()[self._interfaces[0]][0]
            if self._job["needs_versions"]:
                hello["versions"] = installed_versions()
            hello |= self._hold_ports()
        except LaunchError as error:
            hello = {"say": "refuse", "why": str(error)}
            self._end(0.0)
        self._say(hello)

    def _hold_ports(self) -> Message:
        """Holds the ports that rank 0 will use, if it is on this host, and returns them for the hello."""
        if not self._worlds[0].is_main:
            return {}
        # Held for the whole run: the kernel gives it to no process that asks for any free port.
        self._held_port = reserve_port(self._job["master_port"])
        found = {"port": self._held_port.getsockname()[1]}
        # If the user chose the port, it is the only one: a firewall may block all others.
        if not self._job["master_port"]:
            self._store_port = hold_store_port("127.0.0.1" if len(self._worlds) == self._worlds[0].size else "")
            found["store_port"] = self._store_port.getsockname()[1]
        return found

    def _start_workers(self, go: Message) -> None:
        interface = ",".join(self._interfaces) or interface_towards(go["address"])
        is_one_machine = len(self._worlds) == self._worlds[0].size
        address = "127.0.0.1" if is_one_machine else go["address"]
        offer = None
        if self._store_port is not None:
            # If that fails, rank 0 cannot listen there either, and says why.
            with contextlib.suppress(OSError):
                # Before the ranks start: rank 0 asks for it as soon as it has imported torch.
                offer = offer_store_socket(self._store_port, address)
        shared = job_environment(self._job["secret"], go["store_port"], offer.name if offer else "")
        for world in self._worlds:
            given = self._job["given"]
            env = {
                **self._env,
                **(interface_environment(interface, self._env, given) if interface is not None else {}),
                **rank_environment(world, host=self._job["host"], address=go["address"], port=go["port"], given=given),
                **shared,
                "MEGACLASS_RESTART": str(self._job["restart"]),
            }
            page = self._hangs.new_page(world.rank)
            try:
                worker = self._supervisor.start(
                    world.rank,
                    self._job["command"],
                    env | {FD_NAME: str(self._progress.fileno())} | self._hangs.environment(world.rank),
                    Path(self._job["workdir"]),
                    pass_fds=[self._progress.fileno(), page.fileno()],
                )
                self._watch(worker)
            except LaunchError as error:
                # Some ranks of this host may run already; the driver ends those of the other hosts.
                self._say({"say": "refuse", "why": str(error)})
                self._end(None)
                return
        if offer:
            offer.serve()
        self._say({"say": "started", "pids": {str(w.rank): w.pid for w in self._supervisor.workers}})

    def _watch(self, worker: Worker) -> None:
        for stream, pipe in zip(_STREAMS, (worker.process.stdout, worker.process.stderr), strict=True):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = (worker, stream)
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, partial(self._on_output, pipe.fileno()))

    # ---- output and ends of the workers ----

    def _on_output(self, pipe: int) -> bool:
        """Sends one read of a worker's output to the driver; returns whether there may be more."""
        worker, stream = self._pipes[pipe]
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
            del self._pipes[pipe]
            closed = worker.process.stdout if stream == "stdout" else worker.process.stderr
            assert closed is not None
            closed.close()
            return False
        if not self._hangs.take_output(worker.rank, stream, data):
            self._say({"say": "output", "rank": worker.rank, "stream": stream}, data)
        return True

    def _read_stderr(self, rank: int) -> None:
        """Reads what a rank has printed on stderr, while the loop waits for its stacks."""
        for pipe in [pipe for pipe, (owner, stream) in self._pipes.items() if (owner.rank, stream) == (rank, "stderr")]:
            while self._on_output(pipe):
                continue

    def _note_progress(self) -> None:
        if (step := self._progress.step()) != self._step:
            self._step = step
            self._say({"say": "progress", "step": step})

    def _note_exits(self) -> None:
        for worker in self._supervisor.reap():
            self._note_exit(worker)
        if self._supervisor.workers and not self._supervisor.running() and not self._is_ending:
            self._end_leftovers()

    def _note_exit(self, worker: Worker) -> None:
        # Before its exit, upon which the driver decides whether the job may be restarted.
        self._note_progress()
        # Its last output is sent before its exit code. Two reads empty a pipe of Linux's default size.
        for pipe in [pipe for pipe, (owner, _) in self._pipes.items() if owner is worker]:
            for _ in range(2):
                if pipe in self._pipes and not self._on_output(pipe):
                    break
        self._say({"say": "exit", "rank": worker.rank, "pid": worker.pid, "code": worker.code})

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

    # ---- the clock ----

    def _wait_s(self) -> float:
        if self._is_ending or self._helpers_until:
            return _TICK_S
        now = time.monotonic()
        return max(0.0, min(self._beat_at, self._heard_at + self._silence_s, now + LOOK_S) - now)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._heard_at > self._silence_s:
            self._lose_driver(f"the driver has sent nothing for {now - self._heard_at:.1f} s")
        self._hangs.look(self._supervisor.running(), is_beat=now >= self._beat_at)
        if now >= self._beat_at:
            self._beat_at = now + beat_interval(self._job["heartbeat_s"])
            # The orphan killers count a silent agent as dead, just as the driver does.
            self._supervisor.keep_watch()
            self._say({"say": "beat"})
            self._note_progress()
            for worker in self._supervisor.running():
                if self._supervisor.is_stopped(worker) and worker.pid not in self._stopped:
                    self._stopped.add(worker.pid)
                    self._say({"say": "stopped", "rank": worker.rank, "pid": worker.pid})

    def _is_over(self) -> bool:
        return self._is_ending and self._supervisor.continue_ending() and not self._supervisor.reap()

    # ---- messages to the driver ----

    def _say(self, message: Message, payload: bytes = b"") -> None:
        self._driver.send(encode(message, payload))

    def _balance(self) -> None:
        """Waits for room in the driver's pipe while something is queued; reads the workers only while the queue is short."""
        is_registered = self._driver.fileno() in self._selector.get_map()
        if self._driver.is_empty == is_registered:
            if is_registered:
                self._selector.unregister(self._driver)
            else:
                self._selector.register(self._driver, selectors.EVENT_WRITE, self._driver.write)
        should_read = not self._driver.is_full
        if should_read != self._is_reading_pipes:
            self._is_reading_pipes = should_read
            for pipe in self._pipes:
                if should_read:
                    self._selector.register(pipe, selectors.EVENT_READ, partial(self._on_output, pipe))
                else:
                    self._selector.unregister(pipe)


def worker_base_environment(job: Message, own: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that all workers of this host share: the host's own, the driver's part, the user's variables."""
    env = {**own, **job["passed"]}
    if "PATH" in job["passed"] and "PATH" in own:
        # The driver's folders come first, for the same interpreter; the host's own may have more programs.
        folders = [*job["passed"]["PATH"].split(os.pathsep), *own["PATH"].split(os.pathsep)]
        env["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    # A crash, or SIGABRT after a hang, then prints the Python stack of every thread.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env.setdefault("OMP_NUM_THREADS", str(default_threads(len(job["worlds"]))))
    return {**without_other_starters(env, job["given"]), **job["given"]}


if __name__ == "__main__":
    sys.exit(main())
