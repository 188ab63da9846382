"""Output of many ranks on one screen and in files: whole lines, nothing lost, bounded memory. Standard library only."""

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megaclass_launch.files import make_private_folder, open_private
from megaclass_launch.options import RunOptions
from megaclass_launch.signals import SignalQueue
from megaclass_launch.wire.agent_messages import RESULT_STREAM
from megaclass_launch.wire.call import PIECE, CallPipes
from megaclass_launch.wire.checks import for_terminal, plain_lines

# A longer line is shown in pieces: no line of a rank may fill the driver's memory.
MAX_LINE_BYTES = 1 << 20
_MAX_WAITING_BYTES = 8 << 20
# Two seconds in all: a user who interrupts a job does not want to wait longer for a pager, either.
_SCREEN_WAITS = 20
_SCREEN_WAIT_S = 0.1
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


class LineCutter:
    """Cuts the bytes of one stream of one rank into lines, without their ends.

    A carriage return also ends a line: every state of a progress bar becomes a line, instead of overwriting what another
    rank has printed.
    """

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that are complete."""
        self._partial += data
        # A carriage return at the very end may be half of \r\n.
        # Only up to the last line end: the rest of a line may come with the next message, and other ranks print in between.
        end = max(self._partial.rfind(b"\n"), self._partial.rfind(b"\r", 0, len(self._partial) - 1)) + 1
        if not end:
            return self._pieces_of_a_long_line()
        *lines, last = bytes(self._partial[:end]).replace(b"\r\n", b"\n").split(b"\n")
        del self._partial[:end]
        shown: list[bytes] = []
        for line in lines:
            # An empty line stays one; a progress bar's empty states are not shown.
            shown += [state for state in line.split(b"\r") if state] or [b""]
        shown += [state for state in last.split(b"\r") if state]
        return [line[i : i + MAX_LINE_BYTES] for line in shown for i in range(0, len(line) or 1, MAX_LINE_BYTES)]

    def rest(self) -> list[bytes]:
        """Returns what came after the last line end, and forgets it."""
        rest = bytes(self._partial).strip(b"\r")
        self._partial.clear()
        return [rest] if rest else []

    def _pieces_of_a_long_line(self) -> list[bytes]:
        pieces = []
        while len(self._partial) > MAX_LINE_BYTES:
            pieces.append(bytes(self._partial[:MAX_LINE_BYTES]))
            del self._partial[:MAX_LINE_BYTES]
        return pieces


class Screen:
    """The driver's stdout and stderr, written by a thread: a reader that pauses (a pager, Ctrl-S) must not stop heartbeats.

    `_waiting` and `_num_bytes` are shared with the thread and changed under the lock of `_changed`. `is_full` asks the
    caller to stop reading the ranks' output; `fault` is set by the thread when stdout cannot be written any more.
    """

    def __init__(self, fds: dict[str, int]) -> None:
        self.fault: OSError | None = None
        self._fds = fds
        self._are_terminals = {stream: os.isatty(fd) for stream, fd in fds.items()}
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_closing = False
        # Daemon: a driver that gives up on a blocked terminal must be able to leave.
        self._thread = threading.Thread(target=self._write_all, name="screen", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._num_bytes > _MAX_WAITING_BYTES

    def is_terminal(self, stream: str) -> bool:
        """Returns whether the bytes reach a terminal, which interprets some of them, and not a file or a program."""
        return self._are_terminals[stream]

    def put(self, stream: str, data: bytes) -> None:
        with self._changed:
            self._waiting.append((self._fds[stream], data))
            # Counted until it is written, not until it is taken from the queue: a write may block for long.
            self._num_bytes += len(data)
            self._changed.notify()

    def close(self, *, is_patient: bool) -> None:
        """Waits until everything is written; a caller that is not patient gives up on a reader that pauses."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if is_patient:
            self._thread.join()
        # In short waits: a pause of the whole machine then counts as one of them, and the last message is not lost.
        for _ in range(_SCREEN_WAITS):
            self._thread.join(_SCREEN_WAIT_S)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                fd, data = self._waiting.popleft()
            # Outside of the lock: this write may block for as long as the reader pauses.
            self._write(fd, data)
            with self._changed:
                self._num_bytes -= len(data)

    def _write(self, fd: int, data: bytes) -> None:
        # After a fault of stdout the rest is discarded, but stderr still reports what happened.
        if self.fault is not None and fd == self._fds["stdout"]:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                time.sleep(0.01)  # another process that shares the terminal has made it non-blocking
            except OSError as error:
                if fd == self._fds["stdout"]:
                    self.fault = error
                return


@dataclass(frozen=True, slots=True)
class DriverMessages:
    """The driver's own messages, between the lines of the ranks and never inside one.

    They may quote another host, so control characters are replaced.
    """

    screen: Screen
    is_verbose: bool

    def say(self, text: str) -> None:
        """Shows a message."""
        self.screen.put("stderr", f"megaclass: {plain_lines(text)}\n".encode())

    def detail(self, text: str) -> None:
        """Shows a message with --verbose only."""
        if self.is_verbose:
            self.say(text)


class RankOutput:
    """Shows the lines of all ranks in Horovod's format, and writes their bytes to files on request.

    folder: DIR/rank.<n>/{stdout,stderr} get the rank's bytes unchanged. A file that cannot be written is given up, with one
    message. num_ranks decides how many digits the folders' names have; each rank has both files, empty or not.
    """

    def __init__(self, screen: Screen, options: RunOptions, messages: DriverMessages, num_ranks: int) -> None:
        # As in Horovod: rank.0 … rank.9 of ten ranks, rank.00 … rank.10 of eleven.
        self._num_digits = len(str(num_ranks - 1))
        self._screen = screen
        self._has_colours = "NO_COLOR" not in os.environ
        self._with_timestamp = options.with_timestamp
        self.folder = options.output_dir
        self._messages = messages
        self._cutters: dict[tuple[int, str], LineCutter] = {}
        self._files: dict[tuple[int, str], IO[bytes] | None] = {}
        if self.folder is not None:
            for rank in range(num_ranks):
                self._store(rank, "stdout", b"")
                self._store(rank, "stderr", b"")

    def put(self, rank: int, stream: str, data: bytes) -> list[bytes]:
        """Shows the complete lines and returns them."""
        if self.folder is not None:
            self._store(rank, stream, data)
        # The file has the bytes as they came; the screen has whole lines.
        lines = self._cutters.setdefault((rank, stream), LineCutter()).feed(data)
        self._show(rank, stream, lines)
        return lines

    def put_result(self, rank: int, data: bytes) -> None:
        """Passes on a piece of the rank's result to the process that asked for the job."""
        self._screen.put(RESULT_STREAM, PIECE.pack(rank, len(data)) + data)

    def finish(self, rank: int) -> list[bytes]:
        """Shows what the rank printed without a line end before it ended, and returns it."""
        shown = []
        for stream in ("stdout", "stderr"):
            if (rank, stream) in self._cutters:
                rest = self._cutters[rank, stream].rest()
                self._show(rank, stream, rest)
                shown += rest
        return shown

    def write_stacks(self, rank: int, stacks: str) -> None:
        """Writes the stacks of a rank that hangs next to its output, if that is written to files."""
        if self.folder is not None:
            self._store(rank, "stacks", stacks.encode(errors="replace"))

    def where(self, rank: int) -> str:
        """Returns a sentence about the rank's files, if it has any."""
        return f"\nAll it printed: {self._folder_of(rank)}" if self.folder is not None else ""

    def _folder_of(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"rank.{rank:0{self._num_digits}}"

    def close(self) -> None:
        for file in self._files.values():
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._files.clear()

    def _show(self, rank: int, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._with_timestamp else ""
        prefix = f"{stamp}[{rank}]<{stream}>:"
        if self._has_colours and self._screen.is_terminal(stream):
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        start = prefix.encode()
        if self._screen.is_terminal(stream):
            lines = [for_terminal(line) for line in lines]
        self._screen.put(stream, b"".join(start + line + b"\n" for line in lines))

    def _store(self, rank: int, stream: str, data: bytes) -> None:
        path = self._folder_of(rank) / stream
        try:
            if (rank, stream) not in self._files:
                make_private_folder(path.parent.parent)
                make_private_folder(path.parent)
                self._files[rank, stream] = open_private(path, "ab", follows_links=False, buffering=0)
            file = self._files[rank, stream]
            if file is not None:
                view = memoryview(data)
                while view:
                    # Unbuffered files write less than asked for when the disk is nearly full.
                    view = view[file.write(view) or 0 :]
        except OSError as error:
            # Given up for good: a full disk would otherwise cost a message per line.
            self._files[rank, stream] = None
            self._messages.say(f"cannot write {path}: {error.strerror}; the run continues without this file.")


@dataclass(frozen=True, slots=True)
class DriverIo:
    """Shared by all starts of a job: the screen, the ranks' output, the driver's messages and its signals."""

    screen: Screen
    output: RankOutput
    messages: DriverMessages
    signals: SignalQueue
    call: CallPipes | None = None
    """Pipes to the process that asked for the job, if the job is a call of a function."""

    @classmethod
    def open(cls, options: RunOptions, num_ranks: int, signals: SignalQueue) -> "DriverIo":
        """Opens the screen and, on request, the files of all ranks."""
        # By number: if stdout or stderr was closed at the start, Python has no object for it.
        call = CallPipes(options.call_fds) if options.call_fds else None
        screen = Screen({"stdout": 1, "stderr": 2, **({RESULT_STREAM: call.results_fd} if call else {})})
        messages = DriverMessages(screen, options.is_verbose)
        output = RankOutput(screen, options, messages, num_ranks)
        return cls(screen, output, messages, signals, call)

    def close(self, *, is_patient: bool) -> None:
        """Closes the files and waits until the screen is written; see Screen.close."""
        self.output.close()
        self.screen.close(is_patient=is_patient)
