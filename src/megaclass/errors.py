"""What a user can mend. The command line prints these without a traceback and exits with 2, or 74 where trying again helps."""

import errno

EXIT_TRY_AGAIN = 74
"""Exit code after a full disk, an I/O error or a lost connection (sysexits' EX_IOERR): a restart may succeed."""

_TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EBUSY, errno.EREMOTEIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR),
        *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ENOTCONN),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)


class UserError(Exception):
    """Says what was given, where, what is allowed and what to do."""


class AgreedError(UserError):
    """A UserError of another rank, which prints it; begins with that rank's number."""

    def __init__(self, text: str, *, is_transient: bool = False) -> None:
        super().__init__(text)
        self.is_transient = is_transient


class ConnectionLostError(UserError):
    """A connection between ranks that the other end does not answer any more; names both ends."""


def is_transient(error: BaseException) -> bool:
    """Whether the same attempt may succeed later: the error, or one that it was raised from, is of a disk or network."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionLostError) or (isinstance(cause, AgreedError) and cause.is_transient):
            return True
        if isinstance(cause, OSError) and cause.errno in _TRANSIENT:
            return True
        cause = cause.__cause__
    return False


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type or out of range."""


class DataError(UserError):
    """A file or folder whose content is not what its format says."""


class HeadError(UserError):
    """Labels, embeddings or options that the sharded head cannot take."""


class NotFiniteError(HeadError):
    """Embeddings with NaN or infinity; on every rank in the same step."""


class TrainError(UserError):
    """A run that cannot go on: gradients that are not finite, a loss that is lost."""


class LaunchError(UserError):
    """Processes that cannot be started, or a start-up that contradicts itself."""


class CheckpointError(UserError):
    """A checkpoint or run folder that cannot be read, or must not be overwritten."""


class ExportError(UserError):
    """An artefact that does not give the embeddings of the model it came from."""
