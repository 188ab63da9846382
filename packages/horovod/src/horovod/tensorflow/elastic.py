"""Elastic training with TensorFlow and Keras: `hvd.elastic.run`, `TensorFlowState` and `TensorFlowKerasState`.

docs/elastic.md explains what happens when ranks come and go; the loop is that of horovod.torch.elastic.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.basics import init, rank, shutdown
from horovod.common.elastic import ObjectState, reset, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import broadcast_object, broadcast_object_fn, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function whose first argument is a State: it is called again whenever the ranks have changed."""
    return run_fn(with_plain_errors(func), reset)


def with_plain_errors(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, in which a failed collective of a graph raises HorovodInternalError, as an eager one does."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:
            # TensorFlow knows no exceptions of other packages, but keeps their names and texts.
            if HorovodInternalError.__name__ not in str(error):
                raise
            raise HorovodInternalError(str(error)) from error

    return wrapper


class TensorFlowState(ObjectState):
    """State of a training: variables, and plain Python objects as attributes."""

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError("TensorFlowState needs eager execution; elastic training in v1 sessions is not supported.")
        if variables is None:
            raise ValueError("TensorFlowState: variables is None, and eager execution has no list of global variables.")
        self._state_variables = list(variables)
        self._saved_values: list[Any] = []
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_variables()

    def variables(self) -> list[Any]:
        """Returns the variables that belong to the state."""
        return self._state_variables

    def _save_variables(self) -> None:
        self._saved_values = [tf.convert_to_tensor(variable).numpy().copy() for variable in self.variables()]

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables(), self._saved_values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        if variables := self.variables():
            broadcast_variables(variables, root_rank=0)
            self._save_variables()
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """State of a training: a Keras model and its optimizer, and plain Python objects as attributes."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        """optimizer: that of model.compile() by default. `backend` is accepted for compatibility with Horovod."""
        if not model.built:
            raise ValueError(
                "TensorFlowKerasState: the model has no weights yet; build it or call it on a batch before."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(variables=[], **kwargs)

    def variables(self) -> list[Any]:
        return [*self.model.weights, *(self.optimizer.variables if self.optimizer is not None else ())]
