"""Makes text from other hosts safe to show in a terminal. Standard library only."""

import re

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
