"""Checks of single values that another host has sent. Standard library only.

A check returns the value, with control characters replaced in texts, or raises ValueError with what is allowed.
"""

import ipaddress
import math
import re
from collections.abc import Callable, Collection
from typing import Any

from megaclass_launch.wire.plain_text import plain_text

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
