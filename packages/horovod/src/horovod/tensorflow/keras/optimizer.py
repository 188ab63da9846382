"""The functions of Horovod's Keras modules: DistributedOptimizer, load_model(), and collectives of plain values.

DistributedOptimizer combines gradients over ranks before it applies them.

The wrapped optimizer's state is shared, not copied, and the class keeps its name, so saved models load without hvd.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from horovod.engine.kinds import Adasum, Average
from horovod.tensorflow import collectives
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradients import GradientReducer, variables_of_layers, with_options

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "load_model",
    "reducescatter",
]

_LOSS_SCALE = (
    "A LossScaleOptimizer wraps this DistributedOptimizer. It skips steps in which gradients of this rank overflow, while "
    "the other ranks wait for them. Wrap in the other order: "
    "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)); a model with the policy mixed_float16 "
    "then adds no further LossScaleOptimizer."
)


class _Distributed:
    """The part that is mixed into a subclass of the wrapped optimizer's class."""

    _hvd_reducer: GradientReducer
    _hvd_aggregation: LocalGradientAggregationHelper | None

    def register_local_var(self, var: Any) -> None:
        """Leaves the gradient of this variable as this rank computed it."""
        self._hvd_reducer.keep_local(var)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Combines the gradients over ranks and makes the optimizer's step."""
        gradients = list(grads)
        if not gradients:
            return
        _refuse_inner_of_loss_scale()
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        if not self.built:  # type: ignore[attr-defined]
            self.build(variables)  # type: ignore[attr-defined]
        if self._hvd_aggregation is None:
            self._step(gradients, variables)
            return
        if self._hvd_reducer.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        self._hvd_aggregation.step(
            gradients,
            lambda sums: self._step(sums, variables),
            # As in Horovod, every pass counts as an iteration, so schedules of the learning rate keep their pace.
            lambda: self._iterations.assign_add(1),  # type: ignore[attr-defined]
        )

    def _step(self, gradients: list[Any], variables: list[Any]) -> None:
        reducer = self._hvd_reducer
        if reducer.op != Adasum:
            super().apply(reducer(gradients, variables), variables)  # type: ignore[misc]
            return
        # Adasum combines the changes that each rank's own step makes.
        before = [tf.identity(variable) for variable in variables]
        super().apply(gradients, variables)  # type: ignore[misc]
        changes = [tf.convert_to_tensor(v) - b for v, b in zip(variables, before, strict=True)]
        for variable, old, change in zip(variables, before, reducer(changes, variables), strict=True):
            variable.assign(old + change)


def _refuse_inner_of_loss_scale() -> None:
    """Raises an error if a LossScaleOptimizer has called apply() under its own condition."""
    frame: Any = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and not isinstance(caller, _Distributed):
            raise ValueError(_LOSS_SCALE)
        frame = frame.f_back


_BEFORE = "device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op"
_PASSES = "backward_passes_per_step average_aggregated_gradients"


@with_options("optimizer", f"name {_BEFORE} {_PASSES} num_groups groups process_set scale_local_gradients")
def DistributedOptimizer(
    optimizer: Any,
    *,
    name: str | None,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    **options: Any,
) -> Any:
    """Returns an optimizer of the same class and state that combines gradients over ranks before it applies them.

    backward_passes_per_step: number of local steps whose gradients are added up before they are combined and applied.
    op=Adasum combines the changes of the weights instead of the gradients.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"DistributedOptimizer got {type(optimizer)}: expected an optimizer of Keras {keras.__version__} "
            f"(keras.optimizers or tf.keras.optimizers) or a tf.compat.v1.train.Optimizer."
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            "The optimizer is a DistributedOptimizer already; wrapping it again would reduce gradients twice."
        )
    if options["op"] == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: must be > 0")
    base = type(optimizer)
    reducer = GradientReducer(name or f"Distributed{base.__name__}", **options)
    aggregation = None
    if backward_passes_per_step > 1:
        aggregation = LocalGradientAggregationHelper(backward_passes_per_step, average_aggregated_gradients)
    # Keras stores the name of the class and of its module in saved models, and finds the wrapped class by them.
    distributed: Any = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    wrapped = object.__new__(distributed)
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    wrapped.__dict__.update(_hvd_reducer=reducer, _hvd_aggregation=aggregation)
    return wrapped


@with_options("optimizer", f"name {_BEFORE} {_PASSES} groups process_set local_layers scale_local_gradients")
def PartialDistributedOptimizer(optimizer: Any, *, local_layers: Any, **options: Any) -> Any:
    """Returns a DistributedOptimizer that leaves out the gradients of `local_layers`, a Keras layer or several."""
    wrapped = DistributedOptimizer(optimizer, **options)
    for variable in variables_of_layers(local_layers):
        wrapped.register_local_var(variable)
    return wrapped


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a saved Keras model and wraps its optimizer, state included, in a DistributedOptimizer.

    custom_optimizers: classes of optimizers that are not Keras' own. `legacy_opts` is accepted for compatibility with Horovod.
    """
    objects = {**{cls.__name__: cls for cls in custom_optimizers or ()}, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


# ---- collectives of plain values ----


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the value, anything that TensorFlow can convert, combined over ranks as a tensor."""
    return collectives.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the values of all ranks, concatenated along dimension 0, as a tensor."""
    return collectives.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's value as a tensor."""
    return collectives.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Returns this rank's rows of the value combined over ranks, as a tensor."""
    return collectives.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
