"""What is said about a rank that failed, on one screen. Standard library only."""

import re
import signal
from collections import deque

_KEPT_LINES = 200
_KEPT_LINE_BYTES = 2000
_SHOWN_LINES = 16
_SHOWN_WIDTH = 320
_TRACEBACK = "Traceback (most recent call last):"

_HINTS = {
    signal.SIGKILL: "often the kernel, out of memory: look for 'Killed process' in `dmesg` there",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often a full /dev/shm or a truncated file",
}


class LastLines:
    """The end of a rank's output, stdout and stderr as they came."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def add(self, lines: list[bytes]) -> None:
        self._lines.extend(line[:_KEPT_LINE_BYTES] for line in lines[-_KEPT_LINES:])

    def shown(self) -> list[str]:
        """The last traceback, whole or its two ends, otherwise the last lines; without what would confuse a terminal."""
        lines = [_plain(line) for line in self._lines]
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        if starts and len(lines) - starts[-1] > _SHOWN_LINES:
            kept = lines[starts[-1] :]
            num_left_out = len(kept) - _SHOWN_LINES
            return [*kept[:3], f"… {num_left_out} lines left out …", *kept[3 + num_left_out :]]
        return lines[starts[-1] if starts else -_SHOWN_LINES :]


def how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def exit_status(code: int) -> int:
    """What a shell would report: the exit code, or 128 + the signal."""
    return code if code >= 0 else 128 - code


def headline(rank: int, host: str, pid: int, code: int, num_others: int) -> str:
    """Said the moment it happens."""
    others = f"; the other {num_others} are being stopped" if num_others else ""
    return f"rank {rank} on {host} (pid {pid}) ended with {how_it_ended(code)}{others}."


def stopped(rank: int, host: str, pid: int) -> str:
    """Said when a rank is stopped: the others wait for it without an end."""
    return f"rank {rank} on {host} (pid {pid}) is stopped: somebody sent it SIGSTOP; SIGCONT lets it go on."


def epitaph(rank: int, host: str, pid: int, code: int, last_lines: list[str]) -> str:
    """Said at the very end, when nobody prints any more: who failed first, where and how, with its last words."""
    hint = f" ({_HINTS[signal.Signals(-code)]})" if code < 0 and -code in _HINTS else ""
    text = f"the first to fail was rank {rank} on {host} (pid {pid}), with {how_it_ended(code)}{hint}."
    if last_lines:
        text += " Its last lines:\n" + "\n".join(f"    {line}" for line in last_lines)
    return text + _hint_about_horovod("\n".join(last_lines))


def _hint_about_horovod(said: str) -> str:
    missing = re.findall(r"No module named '(horovod[\w.]*)'", said)
    if not missing:
        return ""
    # Without --horovod, and without a Horovod, already the package itself is missing.
    if missing[-1] == "horovod":
        return "\nHorovod's names are there with --horovod: megaclass run --horovod …"
    return f"\nMegaclass has no {missing[-1]}: docs/horovod.md lists the modules of Horovod that are there."


def _plain(line: bytes) -> str:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.decode(errors="replace"))
    text = "".join(c if c.isprintable() or c == "\t" else "�" for c in text)
    return text if len(text) <= _SHOWN_WIDTH else f"{text[:_SHOWN_WIDTH]}…"
