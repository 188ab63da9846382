"""Local aggregation of gradients for optimizers with backward_passes_per_step > 1."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.tensorflow.bridge import not_rewritten


class LocalGradientAggregationHelper:
    """Adds up gradients on this rank, and lets every n-th pass communicate and change the weights.

    The sums and the counter are variables outside of the optimizer's own, so that checkpoints of an optimizer do not depend
    on them. All ranks count alike, so that all of them communicate in the same pass.
    """

    def __init__(self, backward_passes_per_step: int, average_aggregated_gradients: bool = False) -> None:
        if backward_passes_per_step <= 0:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: must be > 0")
        self.backward_passes_per_step = backward_passes_per_step
        self.average_aggregated_gradients = average_aggregated_gradients
        self._sums: list[Any] = []
        self._counter: Any = None

    @not_rewritten
    def step(
        self,
        gradients: Sequence[Any],
        apply: Callable[[list[Any]], object],
        skip: Callable[[], object],
    ) -> None:
        """Adds the gradients; calls `apply` with the sums in every n-th pass, `skip` in the others."""
        if self._counter is None:
            self._make_variables(gradients)
        if [g is None for g in gradients] != [s is None for s in self._sums]:
            raise ValueError(
                "backward_passes_per_step > 1 needs gradients for the same variables in every pass: one that was missing in "
                "the first pass is there now, or the other way round."
            )
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None:
                total.assign_add(tf.cast(gradient, total.dtype))
        self._counter.assign_add(1)
        is_last = tf.equal(self._counter, self.backward_passes_per_step)

        def finish() -> Any:
            factor = 1.0 / self.backward_passes_per_step if self.average_aggregated_gradients else 1.0
            apply([None if t is None else t * tf.cast(factor, t.dtype) for t in self._sums])
            for total in self._sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._counter.assign(0)
            return tf.constant(True)

        def go_on() -> Any:
            skip()
            return tf.constant(False)

        if tf.executing_eagerly():
            finish() if bool(is_last) else go_on()
        else:
            tf.cond(is_last, finish, go_on)

    def _make_variables(self, gradients: Sequence[Any]) -> None:
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                raise ValueError(
                    "IndexedSlices are not supported when backward_passes_per_step > 1: pass sparse_as_dense=True."
                )
        # A tf.function may be traced again, but may create variables only once: they are created outside of it.
        with tf.init_scope():
            self._counter = tf.Variable(0, dtype=tf.int32, trainable=False, name="aggregation_counter")
            self._sums = [
                None if g is None else tf.Variable(tf.zeros(g.shape, g.dtype), trainable=False, name="aggregation_sum")
                for g in gradients
            ]
