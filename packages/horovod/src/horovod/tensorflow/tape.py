"""DistributedGradientTape: a tf.GradientTape whose gradients are combined over ranks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.tensorflow.bridge import not_rewritten
from horovod.tensorflow.gradients import GradientReducer, reducer_of, with_options

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


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
        reduced = self._reducer(_flat(gradients), _flat(sources))
        if isinstance(sources, (list, tuple)) and not any(isinstance(s, (list, tuple, dict)) for s in sources):
            return reduced if isinstance(gradients, list) else type(gradients)(reduced)
        return tf.nest.pack_sequence_as(sources, reduced)


def _flat(structure: Any) -> list[Any]:
    # None and tf.IndexedSlices are leaves.
    return list(tf.nest.flatten(structure))


_OPTIONS = (
    "device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups groups process_set"
)


@with_options("gradtape", f"{_OPTIONS} scale_local_gradients")
def DistributedGradientTape(gradtape: Any, **options: Any) -> Any:
    """Returns a tape with the recordings of `gradtape`, whose gradient() combines gradients over ranks.

    groups: number of groups of gradients that are reduced together, or a list of lists of variables.
    """
    reducer = reducer_of("DistributedGradientTape", **options)
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
