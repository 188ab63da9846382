"""Messages of the library on standard error: `megaclass: …`, warnings as `WARNING megaclass: …`.

Library code logs to `logging.getLogger("megaclass.<package>")` and prints nothing. Programs that import megaclass configure
these loggers themselves; the command line uses `messages_on_stderr`.
"""

import argparse
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "verbose": logging.DEBUG}


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet and --verbose to every command of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                add_output_options(command)
            return
    group: Any = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--quiet",
        dest="output",
        action="store_const",
        const="quiet",
        default="normal",
        help="print warnings, errors and results only: no progress, no messages",
    )
    group.add_argument("--verbose", dest="output", action="store_const", const="verbose", help="print more messages")


@contextmanager
def messages_on_stderr(output: str = "normal") -> Iterator[None]:
    """Prints the library's messages while the block runs. output: "quiet", "normal" or "verbose"."""
    logger = logging.getLogger("megaclass")
    previous = logger.handlers, logger.level, logger.propagate
    handler = _StderrHandler()
    handler.setFormatter(_Formatter())
    logger.handlers = [handler]
    logger.setLevel(_LEVELS[output])
    # Packages such as TensorBoard's add a handler to the root logger, which would print every message a second time.
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers = previous[0]
        logger.setLevel(previous[1])
        logger.propagate = previous[2]


class _StderrHandler(logging.Handler):
    """Writes to whatever sys.stderr is at that moment, so that a redirection by the caller takes effect."""

    def emit(self, record: logging.LogRecord) -> None:
        print(wrapped(self.format(record), sys.stderr), file=sys.stderr, flush=True)


def print_error(error: BaseException) -> None:
    """Prints an error that the user can fix, without a traceback."""
    print(wrapped(f"megaclass: {error}", sys.stderr), file=sys.stderr, flush=True)


class _Formatter(logging.Formatter):
    """`megaclass: text`, or `<sender>: text` for records logged with extra={"sender": …}, such as the name of a rank."""

    def format(self, record: logging.LogRecord) -> str:
        # An error says itself what is wrong: it looks as in `print_error`.
        level = f"{record.levelname} " if record.levelno in (logging.DEBUG, logging.WARNING) else ""
        return f"{level}{getattr(record, 'sender', 'megaclass')}: {record.getMessage()}"


def wrapped(text: str, stream: TextIO) -> str:
    """Returns the text broken between words at the width of a terminal; unchanged where the stream is a file or a pipe."""
    if not stream.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    return "\n".join(
        # Paths and options stay whole, so that they can be copied.
        textwrap.fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
        if len(line) > width
        else line
        for line in text.splitlines()
    )
