"""Checks of single values that another host has sent. Standard library only.

A check returns the value, with control characters replaced in texts, or raises ValueError with what is allowed.
"""

import ipaddress
import math
import re
from collections.abc import Callable, Collection
from typing import Any

# ---- texts ----
#
# Makes text from other hosts safe to show in a terminal.


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Colours, and erasing to the end of the line, as used by progress bars. They cannot move the cursor, write to the
# clipboard, rename the window or make the terminal send input.
_HARMLESS_SEQUENCE = rb"\x1b\[[0-9;]{0,32}[mK]"
# ESC and the C1 control characters, as UTF-8; the other control characters apart from tab.
_CONTROL = rb"\xc2[\x80-\x9f]|[\x00-\x08\x0b-\x1f\x7f]"
_HARMLESS_OR_CONTROL = re.compile(rb"(%s)|%s" % (_HARMLESS_SEQUENCE, _CONTROL))


def plain_text(text: str, max_length: int = 2000) -> str:
    """Returns one line without control characters, escape sequences or characters that change the text direction."""
    cut = text[:max_length]
    shown = "".join(c if c.isprintable() or c == "\t" else " " if c == "\n" else _REPLACEMENT for c in cut)
    return shown if len(text) <= max_length else f"{shown}…"


def plain_lines(text: str) -> str:
    """Replaces the same characters in text of several lines; line ends are kept."""
    return "".join(c if c.isprintable() or c in "\t\n" else _REPLACEMENT for c in text)


def for_terminal(line: bytes) -> bytes:
    """Returns a worker's line for a terminal: colours stay, every other control character is replaced."""
    return _HARMLESS_OR_CONTROL.sub(lambda match: match[1] or _REPLACEMENT.encode(), line)


Check = Callable[[Any], Any]
_LARGEST = 1 << 60


def is_whole(value: Any) -> bool:
    """Returns whether the value is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(least: int = 0, most: int = _LARGEST) -> Check:
    def check(value: Any) -> int:
        if not is_whole(value) or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(value)

    return check


def number(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or abs(value) > _LARGEST
        or not math.isfinite(value)
    ):
        raise ValueError("a number")
    return value


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(pattern: str | None = None, max_length: int = 2000) -> Check:
    """Returns a check for texts. pattern: required for values that appear in advice, which users copy into a shell."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("a text")
        if pattern is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"a text of the form {pattern}")
        return plain_text(value, max_length)

    return check


def one_of(allowed: Collection[str]) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value

    return check


def or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def ip_address(value: Any) -> str:
    """Returns a numeric address without its zone."""
    try:
        if not isinstance(value, str):
            raise ValueError
        return str(ipaddress.ip_address(value.partition("%")[0]))
    except ValueError:
        raise ValueError("a numeric IP address") from None
