"""The client of a probe: starts it on a host, sends questions and waits for answers. Standard library only."""

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megaclass_launch.check.rules import Facts
from megaclass_launch.errors import LaunchError
from megaclass_launch.operating_system import readable
from megaclass_launch.wire.protocol import MessageReader, ProtocolError, encode, greeting

_MAX_SAID = 8192
_END_S = 0.5


class ProbeClient:
    """A probe process that answers one question at a time. Its output is read while its caller waits for an answer."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts the probe."""
        token = secrets.token_hex(16)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(
                f"Cannot start {command[0]} on this machine: {error.strerror}. Set --python to an existing Python."
            ) from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stderr = self._process.stdin, self._process.stderr.fileno()
        self._stdout = self._process.stdout.fileno()
        self._open = {self._stdout, self._stderr}
        """Those of the two that have not ended."""
        self._reader = MessageReader(after=greeting(token))
        self._said = b""
        """The end of its stderr."""
        self.token = token

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Facts | None:
        """Returns the unchecked answer, or None if none came in time; ProtocolError if the output is not an answer."""
        ends_at = time.monotonic() + timeout_s
        # A probe that has ended may have said something before.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(encode(dict(question)))
        while self._stdout in self._open and (left_s := ends_at - time.monotonic()) > 0:
            answers = self._read(left_s)
            # One answer per question: a host that keeps sending must not fill the memory.
            if len(answers) > 1:
                raise ProtocolError("it sends answers without a question")
            if answers:
                return answers[0]
        return None

    def exit_status(self) -> tuple[int | None, str]:
        """Returns the probe's exit code (None while it still runs) and the end of its stderr."""
        code = None
        if self._stdout not in self._open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_END_S)
        ends_at = time.monotonic() + _END_S
        while self._stderr in self._open and (left_s := ends_at - time.monotonic()) > 0:
            self._read(left_s)
        return code, self._said.decode(errors="replace")

    def close(self) -> None:
        """Closes the probe's stdin, which ends it, and kills it if it has not ended after 2 s."""
        self._stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout and self._process.stderr
        self._process.stdout.close()
        self._process.stderr.close()

    def _read(self, timeout_s: float) -> list[Facts]:
        """Waits for output, keeps the end of stderr, and returns the answers that have come."""
        answers: list[Facts] = []
        for handle in readable(self._open, timeout_s):
            data = os.read(handle, 1 << 16)
            if not data:
                self._open.remove(handle)
            elif handle == self._stderr:
                self._said = (self._said + data)[-_MAX_SAID:]
            else:
                answers += [message for message, _ in self._reader.feed(data)]
        return answers
