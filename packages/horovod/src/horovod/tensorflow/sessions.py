"""The initial broadcast of variables in graphs and sessions of TensorFlow 1, as far as TensorFlow 2 still offers them."""

from typing import Any

import tensorflow as tf

from horovod.tensorflow.functions import broadcast_variables

__all__ = ["BroadcastGlobalVariablesHook", "broadcast_global_variables"]


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that overwrites all global variables of the default graph with the root's."""
    if tf.executing_eagerly() or tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution, which has no list of global variables. "
            "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all global variables when a MonitoredTrainingSession has initialized them."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)
