"""DistributedOptimizer for the optimizers of Keras 3 and of TensorFlow 1."""

from typing import Any

import tensorflow as tf

from horovod.engine.kinds import Adasum
from horovod.tensorflow.gradients import GradientReducer, reducer_of, with_options

__all__ = ["DistributedOptimizer"]


@with_options(
    "optimizer",
    "name use_locking device_dense device_sparse compression sparse_as_dense backward_passes_per_step op "
    "gradient_predivide_factor average_aggregated_gradients num_groups groups process_set scale_local_gradients",
)
def DistributedOptimizer(optimizer: Any, *, name: str | None, use_locking: bool, **options: Any) -> Any:
    """Returns an optimizer like `optimizer` that combines gradients over ranks before it applies them.

    optimizer: of Keras 3 (see hvd.keras.DistributedOptimizer) or a tf.compat.v1.train.Optimizer. With op=Adasum, a Keras
    optimizer makes its step on this rank, and the changes of the weights are combined.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        # Keras is loaded when it is needed only.
        from horovod.tensorflow.keras import optimizer as keras_optimizer

        return keras_optimizer.DistributedOptimizer(optimizer, name, **options)
    if options["op"] == Adasum:
        raise NotImplementedError("op=Adasum needs a Keras optimizer; tf.compat.v1.train optimizers are not supported.")
    if options["backward_passes_per_step"] > 1:
        raise ValueError("backward_passes_per_step > 1 needs a Keras optimizer, not a tf.compat.v1.train optimizer.")
    name = name or f"Distributed{type(optimizer).__name__}"
    return _DistributedOptimizer(optimizer, name, use_locking, reducer_of(name, **options))


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer of TensorFlow 1: compute_gradients() returns gradients that are combined over ranks."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool, reducer: GradientReducer) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reducer = reducer

    def register_local_var(self, var: Any) -> None:
        """Leaves the gradient of this variable as this rank computed it."""
        self._reducer.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        gradients, variables = zip(*self._optimizer.compute_gradients(*args, **kwargs), strict=True)
        return list(zip(self._reducer(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)
