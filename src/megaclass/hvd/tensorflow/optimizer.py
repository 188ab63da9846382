"""DistributedOptimizer for the optimizers of Keras 3 and of TensorFlow 1."""

from typing import Any

import tensorflow as tf

from megaclass.hvd.engine.kinds import Adasum, Average
from megaclass.hvd.process_sets import ProcessSet, global_process_set
from megaclass.hvd.tensorflow.compression import Compression
from megaclass.hvd.tensorflow.gradients import GradientReducer, checked_groups

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer like `optimizer` that combines gradients over ranks before it applies them.

    optimizer: of Keras 3 (see hvd.keras.DistributedOptimizer) or a tf.compat.v1.train.Optimizer. With op=Adasum, a Keras
    optimizer makes its step on this rank, and the changes of the weights are combined.
    """
    arguments = {name: value for name, value in locals().items() if name != "use_locking"}
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        # Keras is loaded when it is needed only.
        from megaclass.hvd.tensorflow.keras import optimizer as keras_optimizer

        return keras_optimizer.DistributedOptimizer(**arguments)
    if op == Adasum:
        raise NotImplementedError("op=Adasum needs a Keras optimizer; tf.compat.v1.train optimizers are not supported.")
    if backward_passes_per_step > 1:
        raise ValueError("backward_passes_per_step > 1 needs a Keras optimizer, not a tf.compat.v1.train optimizer.")
    groups = checked_groups(op, gradient_predivide_factor, num_groups, groups)
    name = name or f"Distributed{type(optimizer).__name__}"
    reducer = GradientReducer(
        name, compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
    )
    return _DistributedOptimizer(optimizer, name, use_locking, reducer)


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
