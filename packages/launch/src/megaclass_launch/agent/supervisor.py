"""Starts, watches and ends the workers of one host, and never leaves one behind. Standard library only.

`torch.distributed.launcher` was tried first: it needs 2 s to import, takes 30 s to end a worker that ignores SIGTERM, and
leaves the workers running when it is killed itself.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from megaclass_launch.agent import orphan_killer
from megaclass_launch.errors import LaunchError
from megaclass_launch.hang.stacks import state_of

_logger = logging.getLogger("megaclass.launch")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_UNKILLABLE_S = 5.0
"""After SIGKILL only a process that hangs in the kernel stays (a dead network disk, a lost GPU); nothing can end it."""
_RETRY_S = 0.05
_NUM_ORPHAN_KILLERS = 2


@dataclass(slots=True)
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    lifeline: int
    """Writing end of the worker's pipe, open for as long as this process lives (see `_die_with_pipe`)."""
    code: int | None = None
    """Exit code, or minus the signal that ended it; None while it runs."""

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, slots=True)
class _OrphanKiller:
    process: subprocess.Popen[bytes]
    lifeline: int
    """Writing end of the pipe whose end, or silence, makes the orphan killer act."""


class Supervisor:
    """Supervises the workers of one run on this host; leaving the `with` block leaves no process of theirs.

    Several layers, because each can be missing: this process ends them; if it dies, the kernel kills its direct children
    (PR_SET_PDEATHSIG) and their process groups (`_die_with_pipe`); those that have left the group are found by either of two
    orphan killers.

    The end has two phases: `end` sends SIGTERM and sets `_kill_at`; from then on `continue_ending` is called repeatedly,
    sends SIGKILL when that time has come, and gives up at `_give_up_at`. All of it happens in the caller's thread.

    adopts: this process has no children except for the run's, so orphans below it also belong to the run.
    captures: stdout and stderr of the workers are pipes. silence_s: see orphan_killer.main.
    """

    def __init__(
        self, run_id: str, *, grace_s: float, adopts: bool, captures: bool = False, silence_s: float = 0.0
    ) -> None:
        self.workers: list[Worker] = []
        self._run_id = run_id
        self._grace_s = grace_s
        self._adopts = adopts
        self._captures = captures
        self._silence_s = silence_s
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._has_given_up = False
        self._orphan_killers: list[_OrphanKiller] = []

    def __enter__(self) -> "Supervisor":
        if self._adopts:
            # Orphans of the ranks then become children of this process instead of init's, and can be found and reaped.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._orphan_killers = [self._start_orphan_killer() for _ in range(_NUM_ORPHAN_KILLERS)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Nothing was told to end (an exception): what is left is killed at once.
        if self._kill_at is None:
            self.end(0.0)
        while not self.continue_ending():
            time.sleep(_RETRY_S)
            self.reap()
        # Without the goodbye they would take the closed pipe for the death of this process.
        for killer in self._orphan_killers:
            with contextlib.suppress(BrokenPipeError):
                os.write(killer.lifeline, orphan_killer.GOODBYE)
            os.close(killer.lifeline)
        for killer in self._orphan_killers:
            killer.process.wait()
        for worker in self.workers:
            os.close(worker.lifeline)

    def start(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: Path | None = None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> Worker:
        """Starts one worker. Raises LaunchError if the command cannot be started."""
        # stdin stays the terminal's if output is not captured: a debugger in a local rank needs it.
        pipe = subprocess.PIPE if self._captures else None
        reader, lifeline = os.pipe()
        try:
            process = subprocess.Popen(
                list(command),
                env={**env, orphan_killer.RUN_ID_NAME: self._run_id},
                cwd=workdir,
                # The agent's own stdin is its connection to the driver; no rank may read from it.
                stdin=subprocess.DEVNULL if self._captures else None,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                pass_fds=[*pass_fds, reader],
                # A session of its own: Ctrl-C in the terminal reaches it only through us, and a signal its whole group.
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, os.getpid(), reader),
            )
        except (OSError, ValueError) as error:
            os.close(lifeline)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LaunchError(f"Cannot start rank {rank} with {command[0]!r}: {reason}.") from error
        finally:
            os.close(reader)
        worker = Worker(rank, process, lifeline)
        self.workers.append(worker)
        return worker

    def forget(self, worker: Worker) -> None:
        """Releases what a worker that has ended still takes; an elastic job may start any number of workers one by one."""
        self.workers.remove(worker)
        os.close(worker.lifeline)

    def running(self) -> list[Worker]:
        """Returns the workers that have not ended."""
        return [worker for worker in self.workers if worker.code is None]

    def send_signal(self, number: int) -> None:
        """Sends a signal to every worker that runs, and to its children in the same process group."""
        for worker in self.running():
            with contextlib.suppress(ProcessLookupError):
                # The worker leads its own session, so its pid is also the number of its process group.
                os.killpg(worker.pid, number)

    def end(self, grace_s: float | None = None, first: int = signal.SIGTERM) -> None:
        """Sends SIGTERM, or `first`, to every process of the run; `continue_ending` sends SIGKILL after the grace.

        A second call can shorten the grace but not prolong it.
        """
        # Processes, not only workers: a rank behind a shell, and what it has started, must be asked as well.
        for pid in self._processes():
            orphan_killer.send(pid, first)
        kill_at = time.monotonic() + (self._grace_s if grace_s is None else grace_s)
        # Ctrl-C twice, or a lost driver after a signal, may shorten the time to save; nothing may prolong it.
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def reap(self) -> list[Worker]:
        """Returns the workers that ended since the last call, the likely root cause first."""
        ended = []
        for worker in self.running():
            # Not Popen.poll(): if another part of this process had reaped the worker, it would report exit code 0.
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                worker.code = worker.process.returncode = os.waitstatus_to_exitcode(status)
                ended.append(worker)
        # A rank that was killed by a signal comes first: its peers then fail with an exit code.
        return sorted(ended, key=lambda worker: (worker.code == 0, (worker.code or 0) > 0, worker.rank))

    def keep_watch(self) -> None:
        """Tells the orphan killers that this process lives, and replaces one that was killed. To be called regularly."""
        for index, killer in enumerate(self._orphan_killers):
            if killer.process.poll() is not None:
                # The kernel, short of memory, or a user may have ended it, and one alone is not enough. A host that is
                # still short of memory starts no other; the next call tries again.
                with contextlib.suppress(OSError):
                    self._orphan_killers[index] = self._start_orphan_killer()
                    os.close(killer.lifeline)
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._orphan_killers[index].lifeline, b".")
        if self._adopts:
            self._reap_adopted()

    def leftovers(self) -> list[str]:
        """Returns the names of processes that the workers started and that still run."""
        workers = {worker.pid for worker in self.running()}
        return [_name(pid) for pid in self._processes() if pid not in workers]

    def continue_ending(self) -> bool:
        """Kills what is left once the grace has passed; returns whether nothing of the run is left.

        To be called repeatedly, with `reap`, until it returns True. It also does so for processes that cannot be killed.
        """
        left = self._processes()
        # A zombie does not count as a process that is left, but its exit code is still to be reaped.
        if not left:
            return not self.running()
        now = time.monotonic()
        if self._kill_at is None or now < self._kill_at:
            return False
        # The first SIGKILL starts the clock for processes that cannot be killed.
        self._give_up_at = self._give_up_at or now + _UNKILLABLE_S
        if self._has_given_up:
            return True
        if now > self._give_up_at:
            self._has_given_up = True
            names = ", ".join(f"{pid} ({_name(pid)})" for pid in left)
            _logger.error(f"these processes hang in the kernel and cannot be ended: {names}")
            return True
        for pid in left:
            orphan_killer.send(pid, signal.SIGKILL)
        return False

    def is_stopped(self, worker: Worker) -> bool:
        """Returns whether the worker was stopped by SIGSTOP."""
        return state_of(worker.pid) == "T"

    def _processes(self) -> list[int]:
        sessions = {worker.pid for worker in self.workers}
        subreaper = os.getpid() if self._adopts else 0
        killers = [killer.process.pid for killer in self._orphan_killers]
        return orphan_killer.processes_of(self._run_id, sessions, adopted_by=subreaper, apart_from=killers)

    def _reap_adopted(self) -> None:
        """Reaps orphans that ended below this subreaper; the end of a worker is left for `reap`."""
        kept = {worker.pid for worker in self.running()} | {killer.process.pid for killer in self._orphan_killers}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # WNOWAIT leaves it a zombie: its exit code belongs to `reap` or to keep_watch.
                if ended.si_pid in kept:
                    return
                os.waitpid(ended.si_pid, 0)

    def _start_orphan_killer(self) -> _OrphanKiller:
        reader, lifeline = os.pipe()
        # A stopped orphan killer must not block this process once the pipe is full.
        os.set_blocking(lifeline, False)
        # The real path: a virtual environment in a folder called megaclass would also let `pkill -9 -f megaclass` end it.
        python = os.path.realpath(sys.executable)
        try:
            with Path(orphan_killer.__file__).open("rb") as program:
                process = subprocess.Popen(
                    [python, "-I", "-S", "-", self._run_id, str(reader), str(os.getpid()), str(self._silence_s)],
                    stdin=program,
                    # It may outlive this process by a second and must not hold its pipes open.
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(reader,),
                    start_new_session=True,
                )
        except OSError:
            os.close(lifeline)
            raise
        finally:
            os.close(reader)
        return _OrphanKiller(process, lifeline)


def find_command(command: Sequence[str], env: Mapping[str, str], workdir: Path) -> None:
    """Raises LaunchError if the workers' command does not exist, before any of them is started."""
    name = command[0]
    found = (workdir / name).is_file() if "/" in name else shutil.which(name, path=env.get("PATH"))
    if not found:
        where = f"in {workdir}" if "/" in name else f"on the PATH {env.get('PATH', '')}"
        raise LaunchError(f"There is no command {name!r} {where}.")
    if "/" in name and not os.access(workdir / name, os.X_OK):
        raise LaunchError(f"{workdir / name} is not executable: type chmod +x, or put its interpreter in front of it.")


def default_threads(num_processes: int) -> int:
    """Returns the number of threads per process with which all processes together use every core once."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def _die_with_parent(parent: int, reader: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _die_with_pipe(reader)
    # The parent may have died before this call; the kernel would never notice.
    if os.getppid() != parent:
        os._exit(1)


def _die_with_pipe(reader: int) -> None:
    """Makes the kernel kill this process group when the writing end of the pipe is closed, which is when the supervisor dies.

    PR_SET_PDEATHSIG reaches direct children only; a rank behind a shell is a grandchild, but inherits the group and the pipe.
    The kernel itself sends the signal, so killing every watcher at once does not help the ranks to live on.
    """
    fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "gone"
