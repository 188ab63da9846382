"""Discovery of the hosts that an elastic job may use, once per second: a script, a host file, or the fixed list of -H.

A thread asks, because a script may take its time. The driver takes the answers in each pass of its loop. A failure, or an
answer that cannot be read, is reported once, and the last good answer stands. Standard library only.
"""

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host, hosts_from_file, hosts_from_option

INTERVAL_S = 1.0
_SCRIPT_S = 20.0
"""A script that takes longer is killed, and counts as failed."""
_MAX_OUTPUT_BYTES = 1 << 20
_POLL_S = 0.05
_CLOSE_S = 1.0
"""How long the end of a job waits for the thread, which may be asking the name service about hosts of a file."""


@dataclass(frozen=True, slots=True)
class DiscoveryAnswer:
    """One answer: hosts, or a problem."""

    hosts: tuple[Host, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Something that can be asked for hosts. Its function raises LaunchError with the reason if it has no answer."""

    name: str
    ask: Callable[[threading.Event], Sequence[Host]]
    """Its argument is set when the answer is not needed any more."""
    is_fixed: bool = False


def hosts_from_script(command: str, default_slots: int, is_over: threading.Event) -> list[Host]:
    """Runs the script, in a shell as horovodrun does, and parses its lines `host` or `host:slots`.

    is_over: set when the job ends, which also ends the script.
    """
    # Files, not pipes: processes that the script leaves in the background may keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # A session of its own, so what it started can be ended with it.
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            ends_at = time.monotonic() + _SCRIPT_S
            while process.poll() is None and not is_over.is_set():
                if max(os.fstat(file.fileno()).st_size for file in (out, err)) > _MAX_OUTPUT_BYTES:
                    raise LaunchError(f"it printed more than {_MAX_OUTPUT_BYTES} bytes")
                if time.monotonic() > ends_at:
                    raise LaunchError(f"it did not end within {_SCRIPT_S:g} s")
                time.sleep(_POLL_S)
        finally:
            # The whole group: the shell's children would otherwise run on, one more with every second.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if is_over.is_set():
            raise LaunchError("the job has ended")
        texts = [os.pread(file.fileno(), _MAX_OUTPUT_BYTES, 0).decode(errors="replace") for file in (out, err)]
    if process.returncode:
        last = texts[1].strip().splitlines()[-1:]
        raise LaunchError(f"it ended with exit code {process.returncode}" + (f": {last[0]}" if last else ""))
    return parse_lines(texts[0], default_slots)


def parse_lines(text: str, default_slots: int) -> list[Host]:
    """Parses lines `host` or `host:slots`. Raises LaunchError if a line is neither, or if there is none."""
    found: dict[str, Host] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        # In an IPv6 address without slots, the last colon is inside the brackets.
        has_slots = ":" in line.rpartition("]")[2]
        hosts = hosts_from_option(line if has_slots else f"{line}:{default_slots}") if "," not in line else []
        if len(hosts) != 1:
            raise LaunchError(f"Cannot read line {line[:60]!r}: expected <name> or <name>:<slots>.")
        if hosts[0].name.lower() in found:
            raise LaunchError(f"Host {hosts[0].name!r} is listed twice.")
        found[hosts[0].name.lower()] = hosts[0]
    if not found:
        # Most often a pipeline whose first command failed. A job without hosts could not continue anyway.
        raise LaunchError("it printed no host")
    return list(found.values())


def source_of(script: str | None, hostfile: Path | None, fixed: Sequence[Host], default_slots: int) -> Source:
    """Returns the source that the command line names."""
    if script is not None:
        return Source(script, lambda is_over: hosts_from_script(script, default_slots, is_over))
    if hostfile is not None:
        return Source(str(hostfile), lambda is_over: hosts_from_file(hostfile))
    return Source("-H", lambda is_over: fixed, is_fixed=True)


class Discovery:
    """Asks the source in a thread."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._answers: queue.SimpleQueue[DiscoveryAnswer] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._source.name

    def news(self) -> list[DiscoveryAnswer]:
        """Returns the answers since the last call, without repetitions."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    def close(self) -> None:
        """Ends a script that still runs."""
        self._is_over.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        last: DiscoveryAnswer | None = None
        while not self._is_over.is_set():
            try:
                answer = DiscoveryAnswer(tuple(self._source.ask(self._is_over)))
            except (LaunchError, OSError) as error:
                answer = DiscoveryAnswer(problem=str(error).rstrip("."))
            # Only news, so the driver reports a script that keeps failing once.
            if answer != last:
                last = answer
                self._answers.put(answer)
            if self._source.is_fixed:
                return
            self._is_over.wait(INTERVAL_S)
