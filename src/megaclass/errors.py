"""What a user can mend. The command line prints these without a traceback and exits with 2."""


class UserError(Exception):
    """Says what was given, where, what is allowed and what to do."""


class AgreedError(UserError):
    """A UserError of another rank, which prints it; begins with that rank's number."""


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
