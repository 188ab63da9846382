"""Collectives in graphs by nodes that run Python: three in a tf.function, a single one that waits in a v1 session.

    submit                       returns at once
    loop of wait, yield          until done; each wait lasts a few milliseconds at most
    fetch                        does not wait: takes the results

A single node that waited for other ranks would occupy a thread of TensorFlow's pool until they have submitted the same
collective. Ranks may run independent nodes in different orders: with more independent collectives than threads, every rank
could wait inside other ones, without end. In the loop, the thread is given back after each wait, so that TensorFlow runs the
other nodes that are ready, and thus submits every collective whose inputs are there.

To yield, the loop takes an element of an endless dataset. TensorFlow does that in a thread outside of the pool, which then puts
the next turn at the end of the pool's queue. A loop without such a node would stay on its thread, and other nodes would starve.

State: `_started` maps tickets to submitted operations. submit adds entries and fetch removes them, each in one step under the
interpreter's lock.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from torch import Tensor

from megaclass.hvd.basics import _basics
from megaclass.hvd.engine.controller import Controller
from megaclass.hvd.engine.operation import Operation
from megaclass.hvd.exceptions import HorovodInternalError
from megaclass.hvd.tensorflow.bridge.call import Call, fetch_results, split, submit_calls
from megaclass.hvd.tensorflow.bridge.memory import to_numpy, to_tensorflow, to_torch

# A turn waits for 1, 2, 4, … ms, at most this long: the first turns are short because other collectives may have to be
# submitted first, later ones are longer because each costs about 0.1 ms of CPU time.
_LONGEST_TURN_S = 0.016

_tickets = itertools.count(1)
_started: dict[int, tuple[Controller, list[int], list[Operation]]] = {}


def add_nodes(calls: Sequence[Call], independent: Callable[[Any], Any]) -> list[Any]:
    """Adds nodes that run the calls to the graph that is being built, and returns the outputs.

    independent: exempts a tensor's node from the order of nodes that have side effects, and returns the tensor.
    """
    inputs = [tensor for call in calls for tensor in call.inputs]
    counts = [len(call.inputs) for call in calls]
    dtypes = [dtype for call in calls for dtype in call.dtypes]
    # The nodes keep the calls alive, and a tensor of TensorFlow its whole graph.
    calls = [call.without_inputs() for call in calls]
    call_python, to_result = _python_node()

    def submit(*arrays: Any) -> Any:
        handles = submit_calls(calls, split([to_torch(array) for array in arrays], counts))
        job, ticket = _basics.job(), next(_tickets)
        _started[ticket] = job.controller, handles, [job.handles[handle] for handle in handles]
        return np.int64(ticket)

    def fetch(ticket: Any) -> Any:
        _, handles, _ = _started.pop(int(ticket))
        return [
            to_result(result, dtype)
            for call, found in zip(calls, fetch_results(calls, handles), strict=True)
            for result, dtype in zip(found, call.dtypes, strict=True)
        ]

    def turn(is_done: Any, number: Any) -> tuple[Any, Any]:
        is_done = tf.numpy_function(_wait, [ticket, number], tf.bool)
        is_done.set_shape([])
        with tf.control_dependencies([is_done]):
            # Part of the result, so that the loop waits for it.
            return is_done, number + 1 + 0 * tf.cast(elements.get_next(), tf.int32)

    if not tf.compat.v1.executing_eagerly_outside_functions():
        # In a v1 session that loop hangs when there are more collectives than threads, so one node submits and waits.
        return list(tf.numpy_function(lambda *arrays: fetch(submit(*arrays)), inputs, dtypes))
    with tf.init_scope():
        elements = iter(tf.data.Dataset.range(2**62))
    ticket = call_python(submit, inputs, tf.int64)
    ticket.set_shape([])
    independent(ticket)
    is_done, _ = tf.while_loop(lambda is_done, _: tf.logical_not(is_done), turn, [False, 0], parallel_iterations=1)
    with tf.control_dependencies([independent(is_done)]):
        return list(call_python(fetch, [ticket], dtypes))


def _wait(ticket: Any, number: Any) -> Any:
    """Waits for one turn; returns whether all operations of the ticket are done, failed ones included."""
    controller, _, operations = _started[int(ticket)]
    ends_at = time.monotonic() + min(0.001 * 2 ** min(int(number), 10), _LONGEST_TURN_S)
    for operation in operations:
        # Raised by fetch instead, after all of them.
        with contextlib.suppress(HorovodInternalError):
            if not controller.wait(operation, max(0.0, ends_at - time.monotonic())):
                return np.bool_(False)
    return np.bool_(True)


def _python_node() -> tuple[Callable[..., Any], Callable[[Tensor, Any], Any]]:
    """Returns how to make a Python node, and how to make its results.

    A numpy node is the faster one and shares memory with torch, but copies tensors from and to GPUs.
    """
    # In a v1 session there is no eager tensor that a node could return.
    if tf.compat.v1.executing_eagerly_outside_functions() and tf.config.list_logical_devices("GPU"):
        return tf.py_function, to_tensorflow
    return tf.numpy_function, to_numpy
