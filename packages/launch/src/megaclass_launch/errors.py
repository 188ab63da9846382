"""Errors that a user can fix. The command line prints them without a traceback and exits with 2, or 74 if a retry may help."""

import errno
from collections.abc import Iterator

EXIT_TRY_AGAIN = 74
"""Exit code after a full disk, an I/O error or a lost connection (EX_IOERR of sysexits.h): a restart may succeed."""

_SHOWN = 60
"""Characters of a value in a message."""
_TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EBUSY, errno.EREMOTEIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR),
        *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ENOTCONN),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)


class UserError(Exception):
    """Base class. The message says what was given, where, what is allowed, and what to do."""


class AgreedError(UserError):
    """A UserError of another rank, which prints it itself; the message starts with that rank's number."""

    def __init__(self, text: str, *, is_transient: bool = False) -> None:
        super().__init__(text)
        self.is_transient = is_transient


class StateLostError(UserError):
    """An elastic job whose state was lost with the ranks that held it; the job has to be started again."""


class ConnectionLostError(UserError):
    """A connection between ranks whose other end no longer answers; the message names both ends."""


def is_transient(error: BaseException) -> bool:
    """Tells whether a retry may succeed: the error, or one of its causes, comes from a disk or a network."""
    return any(
        isinstance(cause, ConnectionLostError)
        or (isinstance(cause, AgreedError) and cause.is_transient)
        or (isinstance(cause, OSError) and cause.errno in _TRANSIENT)
        for cause in _causes(error)
    )


def is_full_disk(error: BaseException) -> bool:
    """Tells whether the error, or one of its causes, is a disk or a quota without room: it passes when a user makes room."""
    return any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type or out of range."""


class LaunchError(UserError):
    """Processes that cannot be started, or launch options that contradict each other."""


def clipped(value: object) -> str:
    """Returns what the user gave, for a message: of a long text only the beginning."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(str(value))} characters)"
