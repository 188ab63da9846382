"""Ranks of one job on this machine.

`launch` is `--launcher local`. `run_local` is for programs that start their own ranks: these write to this terminal
themselves, without a driver between them and it.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaclass_launch import operating_system
from megaclass_launch.agent.supervisor import Supervisor, Worker, default_threads
from megaclass_launch.driver import driver
from megaclass_launch.driver.outcome import headline, stopped_message
from megaclass_launch.errors import LaunchError
from megaclass_launch.exit_codes import EXIT_HUNG, EXIT_RESUME_ME, exit_status
from megaclass_launch.hang.record import keep_stacks, keep_verdict, new_name
from megaclass_launch.hang.stacks import WatchedRank, collect, has_passed
from megaclass_launch.hang.verdict import describe_groups, find_verdict, hang_sentence, slow_sentence, steps_done
from megaclass_launch.hosts import Host
from megaclass_launch.launchers.ssh import this_machine
from megaclass_launch.operating_system import readable
from megaclass_launch.options import FAULT_GRACE_S, RunOptions
from megaclass_launch.placement import job_environment, rank_environment, without_other_starters, worlds_of
from megaclass_launch.rank_status import FD_NAME, LookClock, StatusPage
from megaclass_launch.rendezvous.addresses import hold_store_port, offer_store_socket, reserve_port
from megaclass_launch.rendezvous.job_secret import new_secret
from megaclass_launch.signals import InterruptLadder, SignalQueue, is_heeded, leave_closed_terminal

_logger = logging.getLogger("megaclass.launch")
_HANG_TICK_S = 1.0
_TICK_S = 0.05
"""Interval at which processes that are being ended are checked."""


def launch(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs the job on this machine, also inside an allocation of a batch system."""
    if others := [host.name for host in hosts if not host.is_local]:
        raise LaunchError(f"--launcher local starts everything here, but {others[0]} is another machine: leave -H out.")
    return driver.run(options, hosts or [this_machine(options)])


def run_local(command: Sequence[str], num_processes: int, env: Mapping[str, str] = os.environ) -> int:
    """Runs the command once per rank, waits for all of them, and returns the exit code of the job.

    That is 0 if all ranks end with 0, else the exit code of the first that failed, else 75 if some rank ended with it.

    A rank that fails ends the others: SIGTERM, and SIGKILL 3 s later. Ctrl-C once sends SIGINT to the ranks, twice SIGTERM,
    three times SIGKILL. SIGTERM and SIGUSR1 (preemption) are passed on, and the ranks take the time they need to save; only
    a second SIGTERM ends them within 3 s. SIGHUP (the terminal was closed) becomes SIGTERM, unless it is ignored as under
    nohup. If this process dies, the ranks are killed. If no step finishes in the time that the ranks allow for it, the
    culprit is named, and if a rank waits for another one, the ranks are ended with exit code 134.
    """
    num_cores = operating_system.num_cores()
    if num_processes > (most := max(16, 4 * num_cores)):
        raise LaunchError(
            f"{num_processes} processes were requested on this machine: with {num_cores} cores, at most {most} are "
            f"allowed. For several machines: megaclass-run -H host1:8,host2:8 …"
        )
    queued = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    queued += [signal.SIGHUP] if is_heeded(signal.SIGHUP) else []
    with (
        # Before the first start: a signal that comes in between must not leave orphans.
        SignalQueue(queued) as signals,
        reserve_port(0) as held,
        hold_store_port("127.0.0.1") as store,
        contextlib.closing(offer_store_socket(store, "127.0.0.1")) as offer,
        Supervisor(secrets.token_hex(8), grace_s=FAULT_GRACE_S, adopts=False) as supervisor,
    ):
        shared = job_environment(new_secret(), store.getsockname()[1], offer.name)
        pages: dict[int, StatusPage] = {}
        for world in worlds_of([("localhost", slot) for slot in range(num_processes)]):
            placed = rank_environment(world, host="localhost", address="127.0.0.1", port=held.getsockname()[1])
            threads = {"OMP_NUM_THREADS": str(default_threads(num_processes))}
            base = {**threads, **without_other_starters(env)}
            page = pages[world.rank] = StatusPage()
            # MEGACLASS_STARTER tells the ranks that they are not under torchrun, whose variables they get.
            own = {"MEGACLASS_STARTER": "megaclass", FD_NAME: str(page.fileno())}
            whole = {**base, **placed, **shared, **own}
            supervisor.start(world.rank, command, whole, pass_fds=[page.fileno()])
        offer.serve()
        return _LocalJob(supervisor, signals, pages).wait()


class _LocalJob:
    """Waits for the ranks of `run_local`; everything happens in the main thread."""

    def __init__(self, supervisor: Supervisor, signals: SignalQueue, pages: Mapping[int, StatusPage]) -> None:
        self._supervisor, self._signals, self._pages = supervisor, signals, pages
        self._host = socket.gethostname()
        self._ladder = InterruptLadder()
        self._status: int | None = None
        """Exit code of the first rank that failed; a signal to this process replaces it."""
        self._has_passed_sigterm = False
        self._has_been_signalled = False
        self._is_ending = False
        self._wants_resume = False
        self._stopped: set[int] = set()
        self._clock = LookClock(time.monotonic())
        self._verdict = ""
        """The last one that was printed."""

    def wait(self) -> int:
        """Returns the exit code of the job when all ranks have ended."""
        while self._supervisor.running():
            # SIGCHLD wakes it when a rank ends or is stopped; the clock is for hangs, and for the SIGKILL after the grace.
            readable([self._signals], _TICK_S if self._is_ending else _HANG_TICK_S)
            for number in self._signals.taken():
                self._on_signal(number)
            self._name_stopped()
            for worker in self._supervisor.reap():
                self._note_exit(worker)
            if self._is_ending:
                # Also over if what is left hangs in the kernel and cannot be ended.
                if self._supervisor.continue_ending():
                    break
            elif not self._has_been_signalled:
                self._look_for_hangs()
        self._supervisor.end()
        # A rank that failed counts more than others that asked to be resumed.
        return self._status or (EXIT_RESUME_ME if self._wants_resume else 0)

    def _look_for_hangs(self) -> None:
        """Reads the pages of the ranks, of which nothing is asked until one is late; then their stacks are collected."""
        now = time.monotonic()
        running = [WatchedRank(w.rank, w.pid, self._pages[w.rank]) for w in self._supervisor.running()]
        since = self._clock.since(now)
        pages = [watched.page.read() for watched in running]
        late = max(pages, default=None, key=lambda status: status.late_s(now, since=since))
        if late is None or late.late_s(now, since=since) <= 0:
            return
        reports = collect(running, self._host, since=since)
        if has_passed(reports):
            return
        verdict = find_verdict(reports)
        is_new, self._verdict = verdict.text != self._verdict, verdict.text
        # If the job continues, the next report comes when the rank has been late as long again.
        self._clock.restart(time.monotonic())
        if not verdict.may_end and not is_new:
            return
        what = late.missing or "a collective has not finished"
        sentence = (hang_sentence if verdict.may_end else slow_sentence)(now - late.progress_at, verdict, what=what)
        name, where = new_name(), ""
        folder = next((Path(found) for page in self._pages.values() if (found := page.read().folder)), None)
        if folder is not None:
            kept = keep_stacks(folder, name, reports)
            where = f" Stacks: {kept}." if kept else ""
            if verdict.may_end:
                keep_verdict(folder, name, sentence, describe_groups(verdict), verdict.suspects, steps_done(reports))
        if verdict.may_end:
            _logger.error(sentence + where)
            self._status = EXIT_HUNG
            self._end()
        else:
            _logger.warning(sentence + where)

    def _on_signal(self, number: int) -> None:
        # A user who ends the job does not want to hear that it hangs while it saves.
        self._has_been_signalled |= number != signal.SIGCHLD
        if number == signal.SIGINT:
            self._supervisor.send_signal(self._ladder.climb())
            self._status = exit_status(-signal.SIGINT)
        elif number == signal.SIGUSR1:
            self._supervisor.send_signal(number)
        elif number == signal.SIGHUP:
            # It may come twice, from the kernel and from the shell, and must not count as the second SIGTERM.
            leave_closed_terminal()
            self._supervisor.send_signal(signal.SIGTERM)
        elif number == signal.SIGTERM and not self._has_passed_sigterm:
            self._has_passed_sigterm = True
            _logger.info(f"SIGTERM to the ranks; a second one ends them in {FAULT_GRACE_S:g} s.")
            self._supervisor.send_signal(number)
        elif number == signal.SIGTERM:
            self._status = exit_status(-signal.SIGTERM)
            self._end()

    def _note_exit(self, worker: Worker) -> None:
        assert worker.code is not None
        self._wants_resume |= worker.code == EXIT_RESUME_ME
        if worker.code not in (0, EXIT_RESUME_ME) and self._status is None:
            num_others = len(self._supervisor.running())
            _logger.error(headline(worker.rank, self._host, worker.pid, worker.code, num_others))
            self._status = exit_status(worker.code)
            self._end()

    def _end(self) -> None:
        self._supervisor.end()
        self._is_ending = True

    def _name_stopped(self) -> None:
        """Prints which ranks were stopped since the last call. SIGCHLD arrives when a rank is stopped."""
        stopped = {
            worker.rank: worker.pid for worker in self._supervisor.running() if self._supervisor.is_stopped(worker)
        }
        for rank in stopped.keys() - self._stopped:
            _logger.warning(stopped_message(rank, self._host, stopped[rank]))
        self._stopped = set(stopped)
