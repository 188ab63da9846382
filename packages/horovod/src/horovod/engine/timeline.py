"""Chrome trace of the operations that rank 0 negotiates and runs; chrome://tracing and Perfetto show it.

Each tensor is shown as a process, and each phase of its operations as a slice. The file is valid JSON at any moment: every
event overwrites the closing bracket.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megaclass_launch.files import open_private

_NO_PHASE = contextlib.nullcontext()


class Timeline:
    """Writes the trace. It is inactive until start(); any thread may start or stop it, the engine thread writes events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._path = ""
        # The process number of each tensor in the trace, and the phase of the tensors whose negotiation is open.
        self._numbers: dict[str, int] = {}
        self._open: dict[str, str] = {}
        self._begun = 0.0
        self._marks_cycles = False
        # Read without the lock, as a fast way out: an event more or less at start() or stop() does not matter.
        self.is_active = False

    def start(self, path: str, mark_cycles: bool) -> None:
        with self._lock:
            self._marks_cycles = mark_cycles
            # Once more with the same path: the trace continues.
            if self.is_active and path == self._path:
                return
            self._close()
            self._file = open_private(Path(path), "wb")
            self._file.write(b"[]")
            self._path, self._numbers, self._open = path, {}, {}
            self._begun = time.monotonic()
            self.is_active = True
            micros = int(time.time() * 1e6)
            self._write(
                {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": micros}}
            )
            self._write({"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}})

    def stop(self) -> None:
        with self._lock:
            self._close()

    def mark_cycle(self) -> None:
        if self.is_active and self._marks_cycles:
            with self._lock:
                self._write({"ph": "i", "name": "CYCLE_START", "ts": self._now(), "s": "g"})

    def rank_ready(self, tensor: str, kind: str, rank: int) -> None:
        """Records that a rank announced the tensor; the first announcement opens its negotiation."""
        if not self.is_active:
            return
        with self._lock:
            phase = f"NEGOTIATE_{kind.upper()}"
            # The same tensor may be negotiated under another kind before: each opens a slice of its own.
            if self._open.get(tensor) != phase:
                self._begin(tensor, phase)
            self._write({"ph": "X", "name": str(rank), "ts": self._now(), "pid": self._number(tensor), "dur": 0})

    def negotiated(self, tensors: list[str]) -> None:
        """Closes the negotiation of the tensors."""
        if not self.is_active:
            return
        with self._lock:
            for tensor in tensors:
                if self._open.pop(tensor, None) is not None:
                    self._end(tensor)

    def phase(self, tensors: list[str], name: str) -> contextlib.AbstractContextManager[None]:
        """Records a slice of each tensor around the block."""
        # Every operation passes here, mostly without a trace: entering a generator would take a microsecond.
        return self._phase(tensors, name) if self.is_active else _NO_PHASE

    @contextlib.contextmanager
    def _phase(self, tensors: list[str], name: str) -> Iterator[None]:
        with self._lock:
            for tensor in tensors:
                self._begin(tensor, name)
        try:
            yield
        finally:
            # Also where the block raises, or the trace would never close the slice. After a stop(), _write() does nothing.
            with self._lock:
                for tensor in tensors:
                    self._end(tensor)

    def _begin(self, tensor: str, name: str) -> None:
        if name.startswith("NEGOTIATE_"):
            self._open[tensor] = name
        self._write({"ph": "B", "name": name, "ts": self._now(), "pid": self._number(tensor)})

    def _end(self, tensor: str) -> None:
        self._write({"ph": "E", "ts": self._now(), "pid": self._number(tensor)})

    def _number(self, tensor: str) -> int:
        number = self._numbers.get(tensor)
        if number is None:
            # 0 is the process of the trace itself; a name is announced with the tensor's first event.
            number = self._numbers[tensor] = len(self._numbers) + 1
            self._write({"name": "process_name", "ph": "M", "pid": number, "args": {"name": tensor}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}})
        return number

    def _now(self) -> int:
        return int((time.monotonic() - self._begun) * 1e6)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        # Over the closing bracket of the list.
        # The file is complete JSON between any two events, so that a killed job leaves a trace that can be read.
        self._file.seek(-1, 2)
        separator = b"\n" if self._file.tell() == 1 else b",\n"
        self._file.write(separator + json.dumps(event).encode() + b"]")

    def _close(self) -> None:
        self.is_active = False
        if self._file is not None:
            self._file.close()
            self._file = None
