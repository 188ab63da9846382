"""Reduction of the gradients of one step: DistributedGradientTape, and DistributedOptimizer for TensorFlow 1 and Keras 3."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.collectives.handles import ReductionOptions, groups_of_options
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.engine.kinds import Adasum, Average
from horovod.tensorflow.bridge import at_run_time, not_rewritten
from horovod.tensorflow.collectives import reduce_units, sparse_allreduce
from horovod.tensorflow.compression import Compression

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape"]

_DEFAULTS: dict[str, Any] = {
    "name": None,
    "use_locking": False,
    "device_dense": "",
    "device_sparse": "",
    "compression": Compression.none,
    "sparse_as_dense": False,
    "op": Average,
    "gradient_predivide_factor": 1.0,
    "backward_passes_per_step": 1,
    "average_aggregated_gradients": False,
    "num_groups": 0,
    "groups": None,
    "process_set": global_process_set,
    "local_layers": None,
    "scale_local_gradients": True,
}


def with_options(wrapped: str, options: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function `f(wrapped, **options)` Horovod's parameters, in Horovod's order and with its defaults.

    The tape and the optimizers share their options, but not the order. Callers may pass them by position.
    """
    parameter = functools.partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [parameter(wrapped), *(parameter(name, default=_DEFAULTS[name]) for name in options.split())]
    signature = inspect.Signature(parameters)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            given.apply_defaults()
            return function(**given.arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def variable_key(variable: Any) -> int:
    """Returns a number that identifies a variable of TensorFlow, or of Keras, which wraps one."""
    value = getattr(variable, "value", None)
    return id(variable if value is None or callable(value) else value)


class GradientReducer:
    """Combines lists of gradients over ranks."""

    def __init__(
        self,
        name: str,
        *,
        compression: Any,
        sparse_as_dense: bool,
        op: int,
        gradient_predivide_factor: float,
        groups: Any,
        process_set: ProcessSet,
        scale_local_gradients: bool,
        num_groups: int = 0,
        **_: Any,
    ) -> None:
        """Takes the options of a tape or an optimizer; those that do not concern the reduction are ignored."""
        self.name, self.op, self.process_set = name, op, process_set
        self.compression, self.sparse_as_dense = compression, sparse_as_dense
        self.scale_local_gradients = scale_local_gradients
        self.groups = groups_of_options(op, gradient_predivide_factor, num_groups, groups, stacklevel=4)
        if self.groups is not None and not (isinstance(self.groups, list) or self.groups > 0):
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
        # An average may be split: gradients are scaled by 1 / factor before the sum and by factor / size after it.
        factor = gradient_predivide_factor if op == Average else 1.0
        self._options = ReductionOptions(op, 1.0 / factor, factor, process_set)
        self._local: dict[int, Any] = {}

    def keep_local(self, variable: Any) -> None:
        """Leaves the gradient of this variable out of the reduction."""
        self._local[variable_key(variable)] = variable

    @not_rewritten
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients combined over ranks; None if there is none, as on all other ranks."""
        results = list(gradients)
        if self.sparse_as_dense:
            results = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in results]
        is_local = [variable_key(variable) in self._local for variable in variables]
        shared = [i for i, gradient in enumerate(results) if gradient is not None and not is_local[i]]
        name = f"{self.name}_Allreduce"
        if not tf.executing_eagerly():
            name = str(tf.compat.v1.get_default_graph().unique_name(name))
        sparse = [i for i in shared if isinstance(results[i], tf.IndexedSlices)]
        units = self._units([i for i in shared if i not in sparse], variables)
        if units:
            # All of a step as one node of the graph: nodes that run Python cost more than what several batches could hide.
            reduced = reduce_units(
                [[results[i] for i in unit] for unit in units],
                [f"{name}.{unit[0]}" for unit in units],
                self.compression,
                self._options,
                is_grouped=self.groups is not None,
            )
            for place, result in zip([i for unit in units for i in unit], reduced, strict=True):
                results[place] = result
        for i in sparse:
            results[i] = sparse_allreduce(results[i], self._options, f"{name}.{i}")
        return [self._scaled(g) if is_local[i] and g is not None else g for i, g in enumerate(results)]

    def _scaled(self, gradient: Any) -> Any:
        """Makes the gradient of a local variable comparable with those that are averages over ranks."""
        if not self.scale_local_gradients:
            return gradient
        size = tf.cast(at_run_time(lambda: self.process_set.size() or 1), gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size

    def _units(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Returns the places of gradients that are reduced under one name: groups, or one gradient each."""
        if self.groups is None:
            return [[place] for place in places]
        if not isinstance(self.groups, list):
            return [list(part) for part in split_list(places, self.groups) if part]
        place_of = {variable_key(variables[place]): place for place in places}
        units = []
        for group in self.groups:
            unit = [place_of.pop(variable_key(variable)) for variable in group if variable_key(variable) in place_of]
            units += [unit] if unit else []
        return units + [[place] for place in place_of.values()]


# ---- the tape ----


class _DistributedTape:
    """The part that is mixed into a subclass of the wrapped tape's class."""

    _reducer: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradient of this variable as this rank computed it."""
        self._reducer.keep_local(source)

    @not_rewritten
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Computes the gradients on this rank and combines them over ranks.

        `use_generic_names` is accepted for compatibility: gradients are always matched by their place in `sources`.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        # None and tf.IndexedSlices are leaves.
        reduced = self._reducer(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        if isinstance(sources, (list, tuple)) and not any(isinstance(s, (list, tuple, dict)) for s in sources):
            return reduced if isinstance(gradients, list) else type(gradients)(reduced)
        return tf.nest.pack_sequence_as(sources, reduced)


_OPTIONS = (
    "device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups groups process_set"
)


@with_options("gradtape", f"{_OPTIONS} scale_local_gradients")
def DistributedGradientTape(gradtape: Any, **options: Any) -> Any:
    """Returns a tape with the recordings of `gradtape`, whose gradient() combines gradients over ranks.

    groups: number of groups of gradients that are reduced together, or a list of lists of variables.
    """
    reducer = GradientReducer("DistributedGradientTape", **options)
    base = type(gradtape)
    distributed: Any = type(base.__name__, (_DistributedTape, base), {})
    tape = distributed.__new__(distributed)
    tape.__dict__.update(gradtape.__dict__)
    tape._reducer = reducer
    return tape


@with_options("gradtape", f"{_OPTIONS} local_layers scale_local_gradients")
def PartialDistributedGradientTape(gradtape: Any, *, local_layers: Any, **options: Any) -> Any:
    """Returns a DistributedGradientTape that leaves out the gradients of `local_layers`, a Keras layer or several."""
    tape = DistributedGradientTape(gradtape, **options)
    for variable in variables_of_layers(local_layers):
        tape.register_local_source(variable)
    return tape


def variables_of_layers(layers: Any) -> Sequence[Any]:
    """Returns the trainable variables of a Keras layer or of several."""
    layers = [] if layers is None else [layers] if isinstance(layers, tf.keras.layers.Layer) else list(layers)
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in layers for variable in layer.trainable_weights]


# ---- the optimizers ----


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
    return _DistributedOptimizer(optimizer, name, use_locking, GradientReducer(name, **options))


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
