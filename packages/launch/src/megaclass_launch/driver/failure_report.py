"""Messages about ranks that failed or were stopped. Standard library only."""

import re
import signal
from collections import deque

from megaclass_launch.exit_codes import how_it_ended
from megaclass_launch.wire.plain_text import plain_text

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
    """Keeps the end of a rank's output, stdout and stderr in the order of arrival."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def add(self, lines: list[bytes]) -> None:
        self._lines.extend(line[:_KEPT_LINE_BYTES] for line in lines[-_KEPT_LINES:])

    def shown(self) -> list[str]:
        """Returns the last traceback, shortened in the middle, or else the last lines, without control characters."""
        lines = [_plain(line) for line in self._lines]
        # The last traceback: earlier ones are often causes that were handled, "during handling of which" it occurred.
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        if starts and len(lines) - starts[-1] > _SHOWN_LINES:
            kept = lines[starts[-1] :]
            num_left_out = len(kept) - _SHOWN_LINES
            return [*kept[:3], f"… {num_left_out} lines left out …", *kept[3 + num_left_out :]]
        return lines[starts[-1] if starts else -_SHOWN_LINES :]


def headline(rank: int, host: str, pid: int, code: int, num_others: int) -> str:
    """Returns the message for the moment at which a rank ends."""
    others = f"; the other {num_others} are being stopped" if num_others else ""
    return f"rank {rank} on {host} (pid {pid}) ended with {how_it_ended(code)}{others}."


def stopped_message(rank: int, host: str, pid: int) -> str:
    """Returns the message about a rank that was stopped, for which all others wait."""
    return f"rank {rank} on {host} (pid {pid}) is stopped: it received SIGSTOP; SIGCONT lets it continue."


def failure_report(rank: int, host: str, pid: int, code: int, last_lines: list[str]) -> str:
    """Returns the last message of a job: which rank failed first, where and how, with its last lines."""
    hint = f" ({_HINTS[signal.Signals(-code)]})" if code < 0 and -code in _HINTS else ""
    text = f"the first to fail was rank {rank} on {host} (pid {pid}), with {how_it_ended(code)}{hint}."
    if last_lines:
        text += " Its last lines:\n" + "\n".join(f"    {line}" for line in last_lines)
    return text + _hint_about_horovod("\n".join(last_lines))


def _hint_about_horovod(text: str) -> str:
    missing = re.findall(r"No module named '(horovod[\w.]*)'", text)
    if not missing:
        return ""
    # The first part of the name is missing only if no package has it.
    if missing[-1] == "horovod":
        return "\nNothing that provides `import horovod` is installed there: pip install megaclass-horovod"
    return f"\nMegaclass has no {missing[-1]}: docs/horovod.md lists the modules of Horovod that it has."


def _plain(line: bytes) -> str:
    return plain_text(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.decode(errors="replace")), _SHOWN_WIDTH)
