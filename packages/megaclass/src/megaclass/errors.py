"""Errors of training and of models that a user can fix. The base class is megaclass_launch.errors.UserError."""

from megaclass_launch.errors import UserError


class DataError(UserError):
    """A file or folder whose content does not match its format."""


class HeadError(UserError):
    """Labels, embeddings or options that the sharded head does not accept."""


class NotFiniteError(HeadError):
    """Embeddings with NaN or infinity; raised on every rank in the same step."""


class TrainError(UserError):
    """A run that cannot continue, for example because its gradients are not finite."""


class CheckpointError(UserError):
    """A checkpoint or run folder that cannot be read, or must not be overwritten."""


class ExportError(UserError):
    """An exported model whose embeddings differ from those of the model it was made from."""
