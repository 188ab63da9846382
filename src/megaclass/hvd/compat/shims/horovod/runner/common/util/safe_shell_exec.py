"""Runs shell commands whose processes end together with this one."""

import codecs
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from megaclass.launch.agent.supervisor import Supervisor

GRACEFUL_TERMINATION_TIME_S = 5
_POLL_S = 0.02


def prefix_connection(
    src_connection: Any, dst_stream: TextIO, prefix: str | None, index: int | None, prefix_output_with_timestamp: bool
) -> None:
    """Copies UTF-8 text to the stream line by line, each after `[index]<prefix>:` if index and prefix are given."""
    decoder = codecs.getincrementaldecoder("utf8")()
    line = ""

    def write(text: str) -> None:
        if index is not None and prefix is not None:
            now = time.asctime(time.localtime(time.time())) if prefix_output_with_timestamp else ""
            text = f"{now}[{index}]<{prefix}>:{text}"
        dst_stream.write(text)
        dst_stream.flush()

    while data := os.read(src_connection.fileno(), 1000):
        *whole, line = re.split(r"(?<=[\r\n])", line + decoder.decode(data))
        for text in whole:
            write(text)
    if line:
        write(line)
    src_connection.close()


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Runs the command and returns its exit code. It ends, with all its processes, if an event is set or this process dies."""
    grace_s = GRACEFUL_TERMINATION_TIME_S
    with Supervisor(secrets.token_hex(8), grace_s=grace_s, adopts=False, captures=True) as supervisor:
        worker = supervisor.start(index or 0, ["/bin/sh", "-c", command], os.environ if env is None else env)
        pipes = [
            (worker.process.stdout, stdout or sys.stdout, "stdout"),
            (worker.process.stderr, stderr or sys.stderr, "stderr"),
        ]
        copiers = [
            threading.Thread(target=prefix_connection, args=(*pipe, index, prefix_output_with_timestamp), daemon=True)
            for pipe in pipes
        ]
        for copier in copiers:
            copier.start()
        is_ending = False
        while not supervisor.reap():
            if not is_ending and any(event.is_set() for event in events or ()):
                is_ending = True
                supervisor.end()
            if is_ending:
                supervisor.continue_ending()
            time.sleep(_POLL_S)
    for copier in copiers:
        copier.join()
    assert worker.code is not None
    return worker.code if worker.code >= 0 else 128 - worker.code
