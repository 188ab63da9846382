"""Collectives in graphs, by nodes that run Python.

    tf.function    three nodes: submit (returns at once) -> a dequeue that is asynchronous -> fetch the result
    v1 session     a dataset of one element, whose map function submits and waits

Why not one Python node: a Python node that waits for other ranks occupies a thread of TensorFlow's pool. Ranks may run
independent nodes in different orders, so with a small pool each rank could wait inside a different collective, without end.

TensorFlow's queues are different: a dequeue that finds nothing occupies no thread. The engine's thread announces finished
operations to `_Notifier`, whose thread puts a token into the queue of the node; TensorFlow then runs `fetch`, which does not
wait.

A v1 session has queues of its own, which no other thread can fill. But the node that returns the single element of a dataset
does not occupy a thread of the pool either: tf.data runs it on a thread of its own, and makes as many of these as are needed.

State: `_started` maps tickets to the handles of submitted operations. submit adds entries and fetch removes them, each in one
step under the interpreter's lock.
"""

import functools
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from torch import Tensor

from horovod.common.basics import _basics
from horovod.tensorflow.bridge.call import Call, fetch_results, split, submit_calls
from horovod.tensorflow.bridge.memory import to_numpy, to_tensorflow, to_torch


class _Notifier:
    """A thread that tells TensorFlow's queues about finished operations, so the engine's thread never runs TensorFlow."""

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="horovod.tensorflow", daemon=True).start()

    def finished(self, tokens: Any) -> None:
        """Puts a token into TensorFlow's queue, soon; called by the engine's thread."""
        self._finished.put(tokens)

    def _run(self) -> None:
        token = tf.constant(True)
        while True:
            # The queue has room for any number of tokens, so this does not block.
            tf.raw_ops.QueueEnqueueV2(handle=self._finished.get().queue_ref, components=[token])


_notifier = functools.cache(_Notifier)
_tickets = itertools.count(1)
_started: dict[int, list[int]] = {}


def add_nodes(calls: Sequence[Call], independent: Callable[[Any], Any]) -> list[Any]:
    """Adds nodes that run the calls to the graph that is being built, and returns the outputs.

    independent: exempts a tensor's node from the order of nodes that have side effects, and returns the tensor.
    """
    inputs = [tensor for call in calls for tensor in call.inputs]
    counts = [len(call.inputs) for call in calls]
    dtypes = [dtype for call in calls for dtype in call.dtypes]
    shapes = [shape for call in calls for shape in call.shapes]
    # The nodes keep the calls alive, and a tensor of TensorFlow its whole graph.
    calls = [call.without_inputs() for call in calls]
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return _add_dataset(
            inputs, lambda *arrays: _flat(calls, _submit(calls, counts, arrays), to_numpy), dtypes, shapes
        )
    with tf.init_scope():
        tokens = tf.queue.FIFOQueue(2**31 - 1, [tf.bool], [[]])

    def submit(*arrays: Any) -> Any:
        ticket = next(_tickets)
        handles = _started[ticket] = _submit(calls, counts, arrays)
        num_finished, job = itertools.count(1), _basics.job()

        def one_is_done() -> None:
            # next() is one step of the interpreter: this thread and the engine thread may both be here.
            if next(num_finished) == len(handles):
                _notifier().finished(tokens)

        for handle in handles:
            job.controller.call_when_done(job.handles[handle], one_is_done)
        return np.int64(ticket)

    def fetch(ticket: Any) -> Any:
        return _flat(calls, _started.pop(int(ticket)), to_result)

    call_python, to_result = _python_node()
    ticket = independent(call_python(submit, inputs, tf.int64))
    with tf.control_dependencies([ticket]):
        token = independent(tokens.dequeue())
    with tf.control_dependencies([token]):
        return list(call_python(fetch, [ticket], dtypes))


def _add_dataset(inputs: Sequence[Any], run_now: Callable[..., Any], dtypes: list[Any], shapes: list[Any]) -> list[Any]:
    """Adds a dataset of one element, run_now(*inputs), and the node that returns the element."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    as_function = tf.function(
        lambda *tensors: tf.numpy_function(run_now, tensors, dtypes), input_signature=specs, autograph=False
    )
    given = tf.raw_ops.TensorDataset(components=inputs, output_shapes=[tensor.shape for tensor in inputs])
    mapped = tf.raw_ops.MapDataset(
        input_dataset=given,
        other_arguments=[],
        f=as_function.get_concrete_function(),
        output_types=dtypes,
        output_shapes=shapes,
        use_inter_op_parallelism=False,  # The function runs on tf.data's own thread, not in TensorFlow's pool.
    )
    return list(tf.raw_ops.DatasetToSingleElement(dataset=mapped, output_types=dtypes, output_shapes=shapes))


def _submit(calls: Sequence[Call], counts: Sequence[int], arrays: Sequence[Any]) -> list[int]:
    return submit_calls(calls, split([to_torch(array) for array in arrays], counts))


def _flat(calls: Sequence[Call], handles: Sequence[int], to_result: Callable[[Tensor, Any], Any]) -> list[Any]:
    return [
        to_result(result, dtype)
        for call, found in zip(calls, fetch_results(calls, handles), strict=True)
        for result, dtype in zip(found, call.dtypes, strict=True)
    ]


def _python_node() -> tuple[Callable[..., Any], Callable[[Tensor, Any], Any]]:
    """Returns how to make a Python node, and how to make its results.

    A numpy node is the faster one and shares memory with torch, but copies tensors from and to GPUs.
    """
    if tf.config.list_logical_devices("GPU"):
        return tf.py_function, to_tensorflow
    return tf.numpy_function, to_numpy
