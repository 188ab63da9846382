"""Small functions that scripts import from horovod.tensorflow.util."""

from typing import Any

import tensorflow

from horovod.common.util import _cache as _cache


def vars_to_refs(variables: Any) -> Any:
    """Returns a tuple of references, which can be hashed, for a list of variables or a list of such lists."""
    if isinstance(variables, list):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref() if hasattr(variables, "ref") else variables


def refs_to_vars(references: Any) -> Any:
    """Returns the variables of vars_to_refs()."""
    if isinstance(references, tuple):
        return [refs_to_vars(reference) for reference in references]
    return references.deref() if hasattr(references, "deref") else references


def _executing_eagerly() -> bool:
    return bool(tensorflow.executing_eagerly())
