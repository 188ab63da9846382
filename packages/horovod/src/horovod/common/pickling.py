"""Pickling for other ranks: with cloudpickle, as in Horovod, where it is installed."""

import pickle
from typing import Any

from megaclass_launch.errors import LaunchError


class CannotPickleError(LaunchError, ValueError):
    """An object or function that cannot be sent to the other ranks."""

    def __init__(self, name: str, reason: object) -> None:
        super().__init__(
            f"Cannot pickle {name} for the other ranks: {reason}. "
            f"Lambdas and functions defined in functions need cloudpickle: pip install 'megaclass-horovod'."
        )


def has_cloudpickle() -> bool:
    try:
        import cloudpickle
    except ImportError:
        return False
    return True


def pickled(obj: Any, name: str) -> bytes:
    """Returns the object as bytes for pickle.loads(); `name` describes it in the error.

    cloudpickle also takes lambdas, and functions of the main script by value. Without it, CannotPickleError names the
    object.
    """
    if has_cloudpickle():
        import cloudpickle

        data: bytes = cloudpickle.dumps(obj)
        return data
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CannotPickleError(name, error) from error
