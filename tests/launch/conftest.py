"""`run` starts `megaclass run` on this machine; `bed` has several hosts, each with its own address, processes and sshd.

Everything is real: processes, signals, pipes, ssh. After each test nothing may be left of it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import filelock
import pytest

MARK = "MEGACLASS_TEST_MARK"


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, what: str | Callable[[], str] = "it") -> float:
    """Seconds until the condition held. what: a name for it, or a function that tells the story when it is too late."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun >= timeout_s:
            raise AssertionError(f"{what if isinstance(what, str) else what()} did not happen within {timeout_s} s")
        time.sleep(0.02)
    return time.monotonic() - begun


class Run:
    """A `megaclass run` that is under way: its output as it comes, its process, how it ends."""

    def __init__(self, command: list[str], env: dict[str, str], *, is_wrapped: bool, **popen: object) -> None:
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen
        )
        self._is_wrapped = is_wrapped
        self._texts = {"out": bytearray(), "err": bytearray()}
        self._threads = [
            threading.Thread(target=self._collect, args=(self.process.stdout, "out"), daemon=True),
            threading.Thread(target=self._collect, args=(self.process.stderr, "err"), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _collect(self, pipe, name: str) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            self._texts[name] += data

    @property
    def out(self) -> str:
        return self._texts["out"].decode(errors="replace")

    @property
    def raw_out(self) -> bytes:
        return bytes(self._texts["out"])

    @property
    def err(self) -> str:
        return self._texts["err"].decode(errors="replace")

    @property
    def pid(self) -> int:
        """The driver itself, not what wraps it; as this process table numbers it."""
        if not self._is_wrapped:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_until(lambda: children.read_text().split(), what="the driver's start")
        return int(children.read_text().split()[0])

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def says(self, text: str, times: int = 1, timeout_s: float = 40.0) -> None:
        def is_said() -> bool:
            assert (self.out + self.err).count(text) >= times or self.process.poll() is None, self.story()
            return (self.out + self.err).count(text) >= times

        wait_until(is_said, timeout_s, lambda: f"{text!r}, {times} times, in\n{self.story()}")

    def wait(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        for thread in self._threads:
            thread.join(10)
        return code

    def story(self) -> str:
        return f"--- stdout ---\n{self.out[-3000:]}\n--- stderr ---\n{self.err[-3000:]}"


def environment() -> dict[str, str]:
    """This process's, less what tells a rank its place, with the interpreter's folder on the path."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MEGACLASS_", "HOROVOD_", "SLURM_"))
    }
    folder = str(Path(sys.executable).parent)
    return {**env, "PATH": f"{folder}:{env['PATH']}", "OMP_NUM_THREADS": "1"}


def marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                is_zombie = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
                if not is_zombie and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


class Here:
    """Starts runs on this machine and counts what is left of them."""

    def __init__(self) -> None:
        self.mark = os.urandom(8).hex()
        self.runs: list[Run] = []

    @property
    def env(self) -> dict[str, str]:
        return {**environment(), MARK: self.mark}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "megaclass", "run", *arguments]

    def start(self, *arguments: str, env: dict[str, str] | None = None, **popen: object) -> Run:
        run = Run(self.command(*arguments), {**self.env, **(env or {})}, is_wrapped=False, **popen)
        self.runs.append(run)
        return run

    def __call__(self, *arguments: str, timeout_s: float = 60.0, **more: object) -> Run:
        run = self.start(*arguments, **more)
        run.code = run.wait(timeout_s)
        return run

    def processes(self) -> list[int]:
        return marked(self.mark)

    def seconds_until_nothing_is_left(self, timeout_s: float = 30.0) -> float:
        return wait_until(lambda: not self.processes(), timeout_s, "the end of all processes")


def assert_nothing_is_left(processes: Callable[[], Collection[int]]) -> None:
    """Waits up to 10 s for the end of all of them; what is there then is killed, and fails the test."""
    left: Collection[int] = ()
    for _ in range(200):
        left = processes()
        if not left:
            break
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"


@pytest.fixture
def run() -> Iterator[Here]:
    """run(arguments…) waits and returns the Run; run.start(arguments…) does not wait."""
    here = Here()
    yield here
    for started in here.runs:
        if started.process.poll() is None:
            started.process.kill()
    assert_nothing_is_left(here.processes)


_WORKER = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def meet():
    here = f"{__file__}.start-{os.environ['MEGACLASS_RESTART']}.rank-"
    open(here + str(rank), "w").close()
    while not all(os.path.exists(here + str(other)) for other in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """script(body): a command that runs the body with Python, quick to start; `rank` is there, and `meet()`, which waits
    for all ranks of this start."""

    def command(body: str) -> list[str]:
        file = tmp_path / "worker.py"
        file.write_text(f"{_WORKER}{body}\n")
        return [sys.executable, "-S", str(file)]

    return command


class Bed:
    """h1, h2, h3. Runs are started on h1; everything but sshd on any of them counts as left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = {**os.environ, "BED_PREFIX": f"mc{os.getpid()}", "BED_DIR": str(folder)}
        self.runs: list[Run] = []

    def do(self, *arguments: str) -> str:
        program = Path(__file__).with_name("hosts.sh")
        done = subprocess.run(
            ["bash", str(program), *arguments], env=self._env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"hosts.sh {arguments}: {done.stderr}"
        return done.stdout.strip()

    def start_in_background(self, *arguments: str) -> None:
        """For what starts a process that stays: it must not hold our pipe."""
        program = Path(__file__).with_name("hosts.sh")
        log = self.folder / "hosts.log"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # One at a time: `ip netns add` of two test processes at once can fail where no namespace was ever made.
        with filelock.FileLock(Path(tempfile.gettempdir(), "megaclass-beds.lock")), log.open("ab") as file:
            command = ["bash", str(program), *arguments]
            done = subprocess.run(command, env=self._env, stdout=file, stderr=file, check=False, timeout=60)
        assert done.returncode == 0, f"hosts.sh {arguments}: {log.read_text()[-2000:]}"

    def inside(self, host: str, *command: str) -> list[str]:
        """The command that runs `command` on a host."""
        namespaces = ("--net", "--uts", "--mount", "--pid")
        return ["nsenter", "-t", str(self.init(host)), *namespaces, f"--wdns={Path.cwd()}", "--", *command]

    def init(self, host: str) -> int | None:
        """The host's first process, its ssh server; None when the host is dead."""
        outer = (self.folder / host / "outer.pid").read_text().strip()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
                return int(pid)
        return None

    def start(self, *arguments: str, config: str | None = None, env: dict[str, str] | None = None) -> Run:
        config = config or str(self.folder / "ssh_config")
        ssh = ("--ssh-arg=-F", f"--ssh-arg={config}")
        command = self.inside("h1", sys.executable, "-m", "megaclass", "run", *ssh, *arguments)
        run = Run(command, {**environment(), **(env or {})}, is_wrapped=True)
        self.runs.append(run)
        return run

    def __call__(self, *arguments: str, timeout_s: float = 60.0, **more: object) -> Run:
        run = self.start(*arguments, **more)
        run.code = run.wait(timeout_s)
        return run

    def processes(self, *hosts: str) -> dict[int, str]:
        """Command lines of all processes on the hosts, by pid outside; without the ssh servers that wait for logins."""
        found = {}
        inits = {}
        for host in hosts or ("h1", "h2", "h3"):
            if init := self.init(host):
                inits[Path(f"/proc/{init}/ns/pid").readlink()] = init
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) not in inits.values():
                with contextlib.suppress(OSError):
                    if (folder / "ns/pid").readlink() in inits:
                        is_zombie = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
                        if not is_zombie:
                            found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def seconds_until_nothing_is_left(self, timeout_s: float = 30.0, apart_from: str = "(nothing)") -> float:
        def are_all_gone() -> bool:
            return not [line for line in self.processes().values() if not line.startswith(apart_from)]

        return wait_until(are_all_gone, timeout_s, "the end of all processes")

    def pids_of(self, host: str, text: str) -> list[int]:
        return [pid for pid, line in self.processes(host).items() if text in line]


def _why_no_bed() -> str:
    if os.geteuid() != 0:
        return "several hosts on one machine need root (network namespaces)"
    missing = [
        name for name in ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "pgrep") if shutil.which(name) is None
    ]
    if not Path("/usr/sbin/sshd").exists():
        missing.append("sshd")
    if missing:
        return f"several hosts on one machine need {', '.join(missing)}: apt-get install iproute2 openssh-server"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "several hosts on one machine need namespaces, which are forbidden here" if probe.returncode else ""


_beds: list[Bed] = []


@pytest.fixture(scope="session")
def bed_of_the_session() -> Iterator[Bed]:
    if reason := _why_no_bed():
        pytest.skip(reason)
    if _beds:
        # A module that imports this fixture has one of its own; the hosts are those of the process.
        yield _beds[0]
        return
    folder = Path(tempfile.gettempdir(), f"megaclass-bed-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this number
    folder.mkdir(mode=0o700)
    bed = Bed(folder)
    try:
        bed.start_in_background("up", "3")
        _beds.append(bed)
        yield bed
    finally:
        _beds.clear()
        bed.start_in_background("down")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def bed(bed_of_the_session: Bed) -> Iterator[Bed]:
    """bed(arguments…) runs `megaclass run` on h1 and waits; bed.start does not wait; bed.do("cut", "h2") and so on."""
    bed = bed_of_the_session
    bed.runs = []
    yield bed
    for run in bed.runs:
        if run.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, AssertionError):
                run.send(signal.SIGKILL)
            run.process.kill()
    assert_nothing_is_left(bed.processes)
