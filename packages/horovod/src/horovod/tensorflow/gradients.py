"""Reduction of the gradients of one step, as the tape and the optimizers need it."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Average
from horovod.tensorflow.bridge import Call, at_run_time, differentiable, not_rewritten, run
from horovod.tensorflow.compression import Compression, wire_of
from horovod.tensorflow.reductions import allreduce, allreduce_call
from megaclass_launch.even_parts import even_part

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


def reducer_of(
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
) -> "GradientReducer":
    """Returns the reducer for the options of a tape or an optimizer; options that do not concern it are left out."""
    groups = _checked_groups(op, gradient_predivide_factor, num_groups, groups)
    return GradientReducer(
        name, compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
    )


def _checked_groups(op: int, gradient_predivide_factor: float, num_groups: int, groups: Any) -> Any:
    """Returns `groups` after the checks that Horovod makes for the tape and all optimizers."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=5,
        )
        groups = num_groups if groups is None else groups
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
    return groups


def variable_key(variable: Any) -> int:
    """Returns a number that identifies a variable of TensorFlow, or of Keras, which wraps one."""
    value = getattr(variable, "value", None)
    return id(variable if value is None or callable(value) else value)


@dataclass
class GradientReducer:
    """Combines lists of gradients over ranks."""

    name: str
    compression: Any
    sparse_as_dense: bool
    op: int
    gradient_predivide_factor: float
    groups: Any
    process_set: ProcessSet
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        self._local: dict[int, Any] = {}

    def keep_local(self, variable: Any) -> None:
        """Leaves the gradient of this variable out of the reduction."""
        self._local[variable_key(variable)] = variable

    @not_rewritten
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients combined over ranks; None where there is none, as on all other ranks."""
        results = list(gradients)
        if self.sparse_as_dense:
            results = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in results]
        is_local = [variable_key(variable) in self._local for variable in variables]
        shared = [i for i, gradient in enumerate(results) if gradient is not None and not is_local[i]]
        name = self._unique_name()
        sparse = [i for i in shared if isinstance(results[i], tf.IndexedSlices)]
        dense = [i for i in shared if i not in sparse]
        for place, reduced in self._dense(
            name, {i: tf.convert_to_tensor(results[i]) for i in dense}, variables
        ).items():
            results[place] = reduced
        factors = self._factors()
        for i in sparse:
            results[i] = allreduce(
                results[i],
                op=self.op,
                prescale_factor=factors[0],
                postscale_factor=factors[1],
                name=f"{name}.{i}",
                process_set=self.process_set,
            )
        return [self._scaled(g) if is_local[i] and g is not None else g for i, g in enumerate(results)]

    def _unique_name(self) -> str:
        name = f"{self.name}_Allreduce"
        return name if tf.executing_eagerly() else str(tf.compat.v1.get_default_graph().unique_name(name))

    def _factors(self) -> tuple[float, float]:
        """Splits the average: gradients are scaled by 1 / factor before the sum and by factor / size after it."""
        if self.op != Average:
            return 1.0, 1.0
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor

    def _scaled(self, gradient: Any) -> Any:
        """Makes the gradient of a local variable comparable with those that are averages over ranks."""
        if not self.scale_local_gradients:
            return gradient
        size = tf.cast(at_run_time(lambda: self.process_set.size() or 1), gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size

    # -- dense gradients --------------------------------------------------------------------------------------------

    def _dense(self, name: str, gradients: dict[int, Any], variables: Sequence[Any]) -> dict[int, Any]:
        """Reduces the gradients, given by their place in the list."""
        if not gradients:
            return {}
        units = self._units(list(gradients), variables)
        places = [place for unit in units for place in unit]
        # All of a step as one node of the graph: nodes that run Python cost more than what several batches could hide.
        return dict(zip(places, self._reduced(name, units, [gradients[place] for place in places]), strict=True))

    def _units(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Returns the places of gradients that are reduced under one name: groups, or one gradient each."""
        if self.groups is None:
            return [[place] for place in places]
        if not isinstance(self.groups, list):
            parts = [even_part(len(places), part, self.groups) for part in range(self.groups)]
            return [places[part.start : part.stop] for part in parts if part.start < part.stop]
        place_of = {variable_key(variables[place]): place for place in places}
        units = []
        for group in self.groups:
            unit = [place_of.pop(variable_key(variable)) for variable in group if variable_key(variable) in place_of]
            units += [unit] if unit else []
        return units + [[place] for place in place_of.values()]

    def _reduced(self, name: str, units: list[list[int]], gradients: list[Any]) -> list[Any]:
        wires = {wire_of(self.compression, gradient.dtype, self.op) for gradient in gradients}
        # Gradients of different dtypes may need different wire formats; compress() is then called for each of them.
        wire = wires.pop() if len(wires) == 1 else ""
        pairs = [(gradient, None) if wire else self.compression.compress(gradient) for gradient in gradients]

        def forward(*packed: Any) -> list[Any]:
            results = run(self._calls(name, units, list(packed), wire))
            return [result for call in results for result in call]

        def backward(_: list[Any], outer: list[Any]) -> list[Any]:
            factors = self._factors()
            return [
                allreduce(
                    gradient,
                    compression=self.compression if wire else Compression.none,
                    op=self.op,
                    prescale_factor=factors[0],
                    postscale_factor=factors[1],
                    process_set=self.process_set,
                )
                for gradient in outer
            ]

        reduced = differentiable(forward, backward, [packed for packed, _ in pairs])
        if wire:
            return reduced
        return [self.compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]

    def _calls(self, name: str, units: list[list[int]], packed: list[Any], wire: str) -> list[Call]:
        calls = []
        for unit in units:
            tensors, packed = packed[: len(unit)], packed[len(unit) :]
            calls.append(
                allreduce_call(
                    tensors,
                    f"{name}.{unit[0]}",
                    self.op,
                    *self._factors(),
                    self.process_set,
                    wire=wire,
                    keeps_error=True,
                    is_grouped=self.groups is not None,
                )
            )
        return calls
