"""The client of a probe: starts it on a host, sends questions and waits for answers. Standard library only."""

import os
import secrets
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaclass_launch.check.rules import Facts
from megaclass_launch.errors import LaunchError
from megaclass_launch.wire.protocol import MessageReader, ProtocolError, encode, greeting


@dataclass(slots=True)
class ProbeClient:
    """A probe process that answers one question at a time.

    Two threads read its output, because a host may never answer. They write `said`, `fault`, `_replies` and `_is_over`; the
    thread that asks reads them. `_news` guards `_replies` and `_is_over`.
    """

    command: Sequence[str]
    said: bytearray = field(default_factory=bytearray)
    """The end of the probe's stderr."""
    fault: str = ""
    """How the host violated the protocol; its output is ignored from then on."""
    _replies: list[Any] = field(default_factory=list)
    _is_over: bool = False
    _news: threading.Condition = field(default_factory=threading.Condition)
    _process: "subprocess.Popen[bytes] | None" = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def greet(self, timeout_s: float) -> Facts | None:
        """Starts the probe and returns its greeting; None when none came in time."""
        token = secrets.token_hex(16)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise LaunchError(
                f"Cannot start {self.command[0]} on this machine: {error.strerror}. Set --python to an existing Python."
            ) from error
        self._threads = [
            threading.Thread(target=self._read_replies, args=(MessageReader(after=greeting(token)),), daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self.ask({"token": token}, timeout_s)

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Facts | None:
        """Returns the unchecked answer, or None when none came in time; ProtocolError when the output is not an answer."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(encode(dict(question)))
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        with self._news:
            self._news.wait_for(lambda: self._replies or self._is_over, timeout_s)
            if self.fault:
                raise ProtocolError(self.fault)
            return self._replies.pop(0) if self._replies else None

    def exit_status(self) -> tuple[int | None, str]:
        """Returns the probe's exit code (None while it still runs) and the end of its stderr."""
        assert self._process is not None
        try:
            code = self._process.wait(0.5) if self._is_over else None
        except subprocess.TimeoutExpired:
            code = None
        self._threads[1].join(0.5)
        return code, self.said.decode(errors="replace")

    def close(self) -> None:
        """Closes the probe's stdin, which ends it, and kills it if it has not ended after 2 s."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(2.0)
        except BrokenPipeError:
            pass
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(1.0)

    def _read_replies(self, reader: MessageReader) -> None:
        assert self._process is not None and self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            try:
                replies = [message for message, _ in reader.feed(data)]
                # One answer per question: a host that keeps sending must not fill the memory.
                if len(replies) + len(self._replies) > 1:
                    raise ProtocolError("it sends answers without a question")
            except ProtocolError as error:
                self.fault = str(error)
                break
            with self._news:
                self._replies += replies
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while data := os.read(self._process.stderr.fileno(), 1 << 16):
            self.said = (self.said + data)[-8192:]
