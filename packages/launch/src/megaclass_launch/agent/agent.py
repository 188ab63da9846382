"""The agent: one process per host, started by the driver, that supervises the ranks of that host. Standard library only.

    driver  --- stdin:  the job, "go", signals, heartbeats --->  agent  --- starts, signals, reaps --->  workers
    driver  <-- stdout: hello, output, exits, heartbeats ------  agent  <-- stdout and stderr, by pipe --  workers

stdin is the lifeline: if it ends or falls silent, the driver, its ssh or the cable is gone, and the agent ends the workers.

    greeting, hello --"go"--> workers run --all ended, "end", a signal, or the driver lost--> ending --> "done", leave

Everything happens in one thread, in `Agent._loop`; no field needs a lock. The parts and the state that each one owns:

    part or field       job                                            state, and who changes it
    DriverConnection    messages from and to the driver, its loss      see driver_connection.py
    WorkerSetup         checks the host, makes the environments        interfaces of this host: check
    Rank0Ports          holds the ports for rank 0                     the held sockets: hold
    Supervisor          starts, signals, reaps and kills workers       the workers, the time of SIGKILL
    WorkerOutput        from the workers' pipes to the driver          the open pipes, and whether they are read
    HangReporter        pages and stacks of ranks that hang            one page per worker
    AgentCall           the function of hvd.run(), if there is one     its file: the driver's "call" messages
    AgentHeartbeat      heartbeats, progress, stopped ranks            what was reported last
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

from megaclass_launch.agent.driver_connection import DriverConnection, read_job
from megaclass_launch.agent.hang_reporter import HangReporter
from megaclass_launch.agent.heartbeat import AgentHeartbeat
from megaclass_launch.agent.supervisor import Supervisor, Worker
from megaclass_launch.agent.worker_output import WorkerOutput
from megaclass_launch.agent.worker_setup import Rank0Ports, WorkerSetup
from megaclass_launch.errors import LaunchError
from megaclass_launch.placement import job_environment
from megaclass_launch.restart_progress import FD_NAME
from megaclass_launch.signals import SignalQueue
from megaclass_launch.wire.call import AgentCall
from megaclass_launch.wire.protocol import Message, beat_interval, silence_limits
from megaclass_launch.world import World

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
        silence_s, _ = silence_limits(job["heartbeat_s"], job["grace_s"])
        with Supervisor(
            job["run_id"], grace_s=job["grace_s"], adopts=True, captures=True, silence_s=silence_s
        ) as supervisor:
            agent = (kind or Agent)(job, supervisor, signals)
            agent.run(rest)
    return 0


class Agent:
    """Carries out one job on this host."""

    def __init__(self, job: Message, supervisor: Supervisor, signals: SignalQueue) -> None:
        silence_s, self._silence_grace_s = silence_limits(job["heartbeat_s"], job["grace_s"])
        self._job = job
        self._supervisor = supervisor
        self._signals = signals
        self._worlds = [World(**world) for world in job["worlds"]]
        self._selector = selectors.DefaultSelector()
        self._driver = DriverConnection(self._selector, silence_s, self._carry_out, self._on_driver_lost)
        self._say = self._driver.say
        self._setup = WorkerSetup(job, os.environ)
        self._ports = Rank0Ports(self._worlds, job["master_port"])
        self._output = WorkerOutput(self._selector, self._on_output)
        self._hangs = HangReporter(job["host"], job["hang_timeout_s"], self._say)
        self._heartbeat = AgentHeartbeat(supervisor, self._hangs, self._say, beat_interval(job["heartbeat_s"]))
        self._call = AgentCall()
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
            self._heartbeat.check(now)
            self._note_exits()

    def _balance(self) -> None:
        """Reads the workers only as fast as the driver reads the agent, so that no memory grows."""
        self._driver.watch_room()
        self._output.pause_if(self._driver.is_full)

    def _wait_s(self) -> float:
        # The end is polled: the grace has a deadline, and processes below the workers end without a signal to the agent.
        if self._is_ending or self._helpers_until:
            return _TICK_S
        now = time.monotonic()
        return max(0.0, min(self._heartbeat.next_at(now), self._driver.lost_at) - now)

    # ---- the driver ----

    def _carry_out(self, message: Message) -> None:
        match message.get("do"):
            case "call":
                self._call.add(message["data"])
            case "go":
                self._start_workers(message)
            # Heartbeats need no case: DriverConnection notes the time of any byte.
            case "signal":
                self._supervisor.send_signal(int(message["number"]))
            case "stacks":
                running, may_abort = self._supervisor.running(), bool(message["may_abort"])
                self._hangs.report_stacks(message["name"], running, self._output.read_stderr, may_abort=may_abort)
            case "verdict":
                self._hangs.keep_verdict(message)
            case "end":
                self._end(message.get("grace_s"), int(message.get("first", signal.SIGTERM)))

    def _on_driver_lost(self, is_silent: bool) -> None:
        # After a silence shorter, so that all is over within the heartbeat limit on both sides.
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
            hello |= self._hold_ports()
        except LaunchError as error:
            hello = {"say": "refuse", "why": str(error)}
            self._end(0.0)
        self._say(hello)

    def _hold_ports(self) -> Message:
        """Holds the ports that rank 0 will use, if it is on this host, and returns them for the hello."""
        return self._ports.hold()

    def _start_workers(self, go: Message) -> None:
        offer = self._ports.offer_store(go["address"])
        shared = job_environment(self._job["secret"], go["store_port"], offer.name if offer else "")
        for world in self._worlds:
            env = {**self._setup.placed(world, go), **shared, "MEGACLASS_RESTART": str(self._job["restart"])}
            # If one cannot start, some ranks of this host may run already; the driver ends those of the other hosts.
            if self._start_worker(world.rank, env) is None:
                return
        if offer:
            offer.serve()
        self._say({"say": "started", "pids": {str(w.rank): w.pid for w in self._supervisor.workers}})

    def _start_worker(self, rank: int, env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Worker | None:
        """Starts one worker; if that fails, tells the driver why, ends the others and returns None.

        env: the variables that are its own. pass_fds: files that it inherits, beyond those for its progress and its state.
        """
        page = self._hangs.new_page(rank)
        progress_fd = self._heartbeat.progress_fd
        inherited = {FD_NAME: str(progress_fd), **self._hangs.environment(rank)}
        try:
            with self._call.pipe() as (call_env, call_fds, result_fd):
                worker = self._supervisor.start(
                    rank,
                    self._job["command"],
                    {**self._setup.base, **env, **inherited, **call_env},
                    self._setup.workdir,
                    pass_fds=[progress_fd, page.fileno(), *call_fds, *pass_fds],
                )
        except LaunchError as error:
            self._say({"say": "refuse", "why": str(error)})
            self._end(None)
            return None
        self._output.watch(worker, result_fd)
        return worker

    # ---- output and ends of the workers ----

    def _on_output(self, rank: int, stream: str, data: bytes) -> None:
        if not self._hangs.take_output(rank, stream, data):
            self._say({"say": "output", "rank": rank, "stream": stream}, data)

    def _note_exits(self) -> None:
        for worker in self._supervisor.reap():
            self._note_exit(worker)
        if self._supervisor.workers and not self._supervisor.running() and not self._is_ending:
            self._end_leftovers()

    def _note_exit(self, worker: Worker) -> None:
        # Before its exit, upon which the driver decides whether the job may be restarted.
        self._heartbeat.report_progress()
        # Before its exit, too: the driver quotes its last lines in the report.
        self._output.read_last(worker)
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


if __name__ == "__main__":
    sys.exit(main())
