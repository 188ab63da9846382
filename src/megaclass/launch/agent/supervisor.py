"""The workers of one host: started, watched, ended, and never left behind. Standard library only.

`torch.distributed.launcher` was tried first: it needs 2 s to import, takes 30 s to end a worker that ignores SIGTERM, and
leaves the workers running when it is killed itself.
"""

import contextlib
import ctypes
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

from megaclass.errors import LaunchError
from megaclass.launch.agent import orphan_killer as sweep

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# After SIGKILL only a process that hangs in the kernel stays (a dead network disk, a lost GPU): nobody can end it.
_UNKILLABLE_S = 5.0
_RETRY_S = 0.05
_NUM_SWEEPERS = 2


@dataclass(slots=True)
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    code: int | None = None
    """Exit code, or minus the signal that ended it; None while it runs."""

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, slots=True)
class _Sweeper:
    process: subprocess.Popen[bytes]
    lifeline: int
    """Writing end of the pipe whose end, or silence, makes the sweeper act."""


class Supervisor:
    """Keeps the workers of one run on this host; leaving the `with` block leaves no process of theirs.

    Three layers, because each can be missing: the keeper (this process) ends them; if it dies, the kernel kills its
    direct children (PR_SET_PDEATHSIG); those behind a shell are found by either of two sweepers.

    adopts: this process has no children but the run's, so that orphans below it are the run's too.
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
        self._sweepers: list[_Sweeper] = []

    def __enter__(self) -> "Supervisor":
        if self._adopts:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._sweepers = [self._start_sweeper() for _ in range(_NUM_SWEEPERS)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._kill_at is None:
            self.end(0.0)
        while not self.is_clear():
            time.sleep(_RETRY_S)
            self.reap()
        for sweeper in self._sweepers:
            with contextlib.suppress(BrokenPipeError):
                os.write(sweeper.lifeline, sweep.GOODBYE)
            os.close(sweeper.lifeline)
        for sweeper in self._sweepers:
            sweeper.process.wait()

    def start(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: Path | None = None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> Worker:
        """LaunchError when the command cannot be started."""
        pipe = subprocess.PIPE if self._captures else None
        try:
            process = subprocess.Popen(
                list(command),
                env={**env, sweep.RUN_ID_NAME: self._run_id},
                cwd=workdir,
                stdin=subprocess.DEVNULL if self._captures else None,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                pass_fds=pass_fds,
                # A session of its own: Ctrl-C in the terminal reaches it only through us, a signal its whole group.
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, os.getpid()),
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LaunchError(f"Cannot start rank {rank} with {command[0]!r}: {reason}.") from error
        worker = Worker(rank, process)
        self.workers.append(worker)
        return worker

    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    def send_signal(self, number: int) -> None:
        """To every worker that runs, and to its children in the same process group."""
        for worker in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, number)

    def end(self, grace_s: float | None = None, first: int = signal.SIGTERM) -> None:
        """Begins the end: SIGTERM to every process of the run now, SIGKILL after the grace, which `is_clear` sees to.

        A second call can shorten the grace, not prolong it.
        """
        for pid in self._members():
            sweep.send(pid, first)
        kill_at = time.monotonic() + (self._grace_s if grace_s is None else grace_s)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def reap(self) -> list[Worker]:
        """Those that ended since the last call, the likely root cause first."""
        ended = []
        for worker in self.running():
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                worker.code = worker.process.returncode = os.waitstatus_to_exitcode(status)
                ended.append(worker)
        # Peers of a rank that was killed raise, which ends them without a signal.
        return sorted(ended, key=lambda worker: (worker.code == 0, (worker.code or 0) > 0, worker.rank))

    def keep_watch(self) -> None:
        """To be called now and then: tells the sweepers that the keeper lives, and replaces one that was killed."""
        for index, sweeper in enumerate(self._sweepers):
            if sweeper.process.poll() is not None:
                os.close(sweeper.lifeline)
                self._sweepers[index] = self._start_sweeper()
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._sweepers[index].lifeline, b".")
        if self._adopts:
            self._reap_adopted()

    def leftovers(self) -> list[str]:
        """Names of processes that the workers started and that are still there."""
        workers = {worker.pid for worker in self.running()}
        return [_name(pid) for pid in self._members() if pid not in workers]

    def is_clear(self) -> bool:
        """Whether nothing of the run is left, after doing what is due. Reap, and call it again, while it is False."""
        left = self._members()
        if not left:
            return not self.running()
        if self._kill_at is None:
            return False
        now = time.monotonic()
        if now >= self._kill_at:
            self._give_up_at = self._give_up_at or now + _UNKILLABLE_S
            if now > self._give_up_at:
                names = ", ".join(f"{pid} ({_name(pid)})" for pid in left)
                print(f"megaclass: these processes hang in the kernel and cannot be ended: {names}", file=sys.stderr)
                return True
            for pid in left:
                sweep.send(pid, signal.SIGKILL)
        return False

    def is_stopped(self, worker: Worker) -> bool:
        """Whether somebody sent it SIGSTOP."""
        try:
            return Path(f"/proc/{worker.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
        except OSError:
            return False

    def _members(self) -> list[int]:
        sessions = {worker.pid for worker in self.workers}
        keeper = os.getpid() if self._adopts else 0
        sweepers = [sweeper.process.pid for sweeper in self._sweepers]
        return sweep.members(self._run_id, sessions, adopted_by=keeper, apart_from=sweepers)

    def _reap_adopted(self) -> None:
        """Buries orphans that ended below this subreaper; a worker's own end is left for `reap`."""
        kept = {worker.pid for worker in self.running()} | {sweeper.process.pid for sweeper in self._sweepers}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in kept:
                    return
                os.waitpid(ended.si_pid, 0)

    def _start_sweeper(self) -> "_Sweeper":
        reader, lifeline = os.pipe()
        os.set_blocking(lifeline, False)
        # Not by the path of the environment: in a folder called megaclass, `pkill -9 -f megaclass` would end it, too.
        python = os.path.realpath(sys.executable)
        with Path(sweep.__file__).open("rb") as program:
            process = subprocess.Popen(
                [python, "-I", "-S", "-", self._run_id, str(reader), str(os.getpid()), str(self._silence_s)],
                stdin=program,
                # It may outlive the keeper by a second and must not hold the keeper's own pipes open.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reader,),
                start_new_session=True,
            )
        os.close(reader)
        return _Sweeper(process, lifeline)


def find_command(command: Sequence[str], env: Mapping[str, str], workdir: Path) -> None:
    """LaunchError when the workers' command is not there, said before any of them is started."""
    name = command[0]
    found = (workdir / name).is_file() if "/" in name else shutil.which(name, path=env.get("PATH"))
    if not found:
        where = f"in {workdir}" if "/" in name else f"on the PATH {env.get('PATH', '')}"
        raise LaunchError(f"There is no command {name!r} {where}.")


def default_threads(num_processes: int) -> int:
    """Threads a process may use without the processes getting in each other's way."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the kernel was told.
    if os.getppid() != parent:
        os._exit(1)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "gone"
