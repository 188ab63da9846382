"""Runs collectives of the engine on TensorFlow's tensors, without copies where the framework allows it.

run            one or more calls, eagerly or in a graph; names, gradients and questions of graphs
call           `Call` describes one collective; how to submit calls and to fetch their results
nodes          collectives in graphs, as nodes that run Python
memory         tensors of TensorFlow as torch's and back, sharing memory
"""

from horovod.tensorflow.bridge.call import Call, check_dtype
from horovod.tensorflow.bridge.memory import to_tensorflow, to_torch
from horovod.tensorflow.bridge.run import (
    at_run_time,
    could_possibly_record,
    differentiable,
    marked,
    not_rewritten,
    operation_name,
    run,
)

__all__ = [
    "Call",
    "at_run_time",
    "check_dtype",
    "could_possibly_record",
    "differentiable",
    "marked",
    "not_rewritten",
    "operation_name",
    "run",
    "to_tensorflow",
    "to_torch",
]
