"""SyncBatchNormalization: Keras' BatchNormalization with statistics over all ranks in training."""

from typing import Any

import keras
import tensorflow as tf

from horovod.engine.kinds import Sum
from horovod.tensorflow.collectives import allreduce

__all__ = ["SyncBatchNormalization"]


# The name under which models that were saved before this package was cut out have it.
@keras.saving.register_keras_serializable(package="megaclass.hvd")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """BatchNormalization over the batches of all ranks, which may differ in size.

    Traffic: one allreduce of 2 x channels + 1 float64 forward, one backward.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)
        # A node that communicates cannot be compiled by XLA.
        self.supports_jit = False

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if mask is None:
            num_rows = tf.size(inputs) / tf.size(mean)
        else:
            num_rows = tf.reduce_sum(tf.cast(mask, tf.float64))
        num_rows = tf.cast(num_rows, tf.float64)
        # In float64, because the variance is a difference of large numbers if the mean is large.
        means, variances = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        sums = tf.concat([num_rows * means, num_rows * (variances + tf.square(means)), [num_rows]], axis=0)
        totals = allreduce(sums, op=Sum)
        channels = tf.size(mean)
        num_all = tf.maximum(totals[-1], 1.0)
        global_mean = totals[:channels] / num_all
        global_variance = tf.maximum(totals[channels:-1] / num_all - tf.square(global_mean), 0.0)
        return (
            tf.ensure_shape(tf.cast(global_mean, mean.dtype), mean.shape),
            tf.ensure_shape(tf.cast(global_variance, variance.dtype), variance.shape),
        )


# Names that Horovod's own module has as well.
from horovod.tensorflow.mpi_ops import Sum, rank, size
