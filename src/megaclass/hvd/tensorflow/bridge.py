"""Runs collectives of the engine on TensorFlow's tensors, without copies where the framework allows it.

A `Call` describes one collective: its input tensors, how to submit them to the engine and what to take from the finished
operation. run() executes calls in one of three ways:

    eager          submits all calls, then waits for them; the waiting thread drives the engine, as in the torch API
    tf.function    three nodes: submit (returns at once) -> a dequeue that is asynchronous -> fetch the result
    v1 session     one node that submits and waits

Why three nodes: a Python node that waits for other ranks occupies a thread of TensorFlow's pool. Ranks may run independent
nodes in different orders, so that with a small pool each rank could wait inside a different collective, without end.
TensorFlow's queues are different: a dequeue that finds nothing occupies no thread. The engine's thread announces finished
operations to `_Notifier`, whose thread puts a token into the queue of the node; TensorFlow then runs `fetch`, which does not
wait. The three nodes are exempted from the automatic control dependencies, which would run all Python nodes in the order of
tracing, so that only data decides when a collective starts. A v1 session offers no queue that another thread could fill.

State: `_started` maps tickets to submitted operations. submit adds entries and fetch removes them, each in one step under
the interpreter's lock.
"""

import functools
import itertools
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from megaclass.hvd.basics import _basics
from megaclass.hvd.collectives.handles import fetch
from megaclass.hvd.engine.operation import Operation

try:
    from tensorflow.python.eager.record import could_possibly_record
except ImportError:  # not a public name of TensorFlow

    def could_possibly_record() -> bool:
        """Returns whether a gradient tape may be active."""
        return True


# Marks functions that users call inside of tf.function. AutoGraph would otherwise rewrite them, and all they call.
not_rewritten = tf.autograph.experimental.do_not_convert

# torch has these dtypes but no arithmetic for them. They are sent as the signed integers of the same width.
_SENT_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_ARITHMETIC = {tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64}
_SENDABLE = {*_ARITHMETIC, tf.bool, tf.uint16, tf.uint32, tf.uint64}


@dataclass(frozen=True)
class Call:
    """One collective of this rank."""

    kind: str
    inputs: Sequence[Any]
    """TensorFlow's tensors."""
    submit: Callable[[list[Tensor]], int]
    """Takes the inputs as torch's tensors, submits them to the engine and returns the handle."""
    results: Callable[[Operation], list[Tensor]]
    """Returns the results of the finished operation."""
    dtypes: Sequence[Any]
    """TensorFlow's dtypes of the results."""
    shapes: Sequence[Any]
    """Shapes of the results, as far as they are known before."""

    def __post_init__(self) -> None:
        has_arithmetic = self.kind in ("allreduce", "reducescatter")
        for tensor in self.inputs:
            if tensor.dtype not in (_ARITHMETIC if has_arithmetic else _SENDABLE):
                raise ValueError(f"Tensor type {tensor.dtype.name} is not supported by {self.kind}.")


def run(calls: Sequence[Call]) -> list[list[Any]]:
    """Runs the calls together and returns the results of each as TensorFlow's tensors."""
    if tf.executing_eagerly():
        return _run_eagerly(calls)
    if tf.compat.v1.executing_eagerly_outside_functions():
        return _run_in_function(calls)
    return _run_in_session(calls)


def operation_name(kind: str, name: str | None, tensors: Sequence[Any], ignore_name_scope: bool = False) -> str | None:
    """Returns the name by which ranks find each other.

    Eagerly this is the given name or, as None, a running number. In graphs it is made of the given name or that of the
    tensor, and of the name scope, and is unique in the graph, as the name of Horovod's node is.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if name is None:
        # Branches of a condition are graphs of their own. The number at the end of such a graph's name differs between ranks.
        where = re.sub(r"_\d+$", "", getattr(graph, "name", ""))
        names = [tensors[0].name] if len(tensors) == 1 else [tensors[0].name, tensors[-1].name]
        name = re.sub(r"[^a-zA-Z0-9_]", "_", "_".join([f"Horovod{kind.capitalize()}", where, *names]))
    return name if ignore_name_scope else str(graph.unique_name(name))


def differentiable(
    forward: Callable[..., list[Any]], backward: Callable[[list[Any], list[Any]], list[Any]], tensors: Sequence[Any]
) -> list[Any]:
    """Returns forward(*tensors), whose gradient is backward(results, gradients of the results)."""
    if tf.executing_eagerly() and not could_possibly_record():
        # A custom gradient costs as much as several operations of TensorFlow.
        return forward(*tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def operation(*inputs: Any) -> Any:
        results = forward(*inputs)

        def gradient(*gradients: Any) -> list[Any]:
            # TensorFlow passes None for integers and may do so for results that nothing uses.
            return backward(
                results,
                [
                    tf.zeros_like(r) if g is None else tf.convert_to_tensor(g)
                    for r, g in zip(results, gradients, strict=True)
                ],
            )

        return results, gradient

    return list(operation(*tensors))


def at_run_time(ask: Callable[[], int]) -> Any:
    """Returns the answer; in a graph, as a tensor for which it is asked in every run, as ranks of an elastic job change."""
    if tf.executing_eagerly():
        return ask()
    answer = tf.numpy_function(lambda: np.int64(ask()), [], tf.int64)
    answer.set_shape([])
    return answer


# ---- tensors ----


def to_torch(tensor: Any) -> Tensor:
    """Returns an eager tensor or a numpy array as a tensor of torch that shares its memory. It must not be written to."""
    if isinstance(tensor, np.generic):
        # TensorFlow passes tensors without dimensions to Python nodes as numpy's scalars.
        tensor = np.asarray(tensor)
    if not isinstance(tensor, np.ndarray):
        shared = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    elif tensor.dtype == tf.bfloat16.as_numpy_dtype:
        shared = torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
    else:
        shared = torch.from_numpy(tensor)
    return shared.view(_SENT_AS[shared.dtype]) if shared.dtype in _SENT_AS else shared


def to_tensorflow(tensor: Tensor, dtype: Any) -> Any:
    """Returns the tensor as an eager tensor of TensorFlow that shares its memory."""
    if tensor.is_cuda:
        # TensorFlow has streams of its own.
        torch.cuda.current_stream(tensor.device).synchronize()
    shared = tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.contiguous()))  # type: ignore[attr-defined]
    return shared if shared.dtype == dtype else tf.bitcast(shared, dtype)


def _to_numpy(tensor: Tensor, dtype: Any) -> Any:
    tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().view(dtype.as_numpy_dtype)


# ---- eager ----


def _run_eagerly(calls: Sequence[Call]) -> list[list[Any]]:
    handles = _submit(calls, [[to_torch(tensor) for tensor in call.inputs] for call in calls], is_awaited=True)
    return [
        [to_tensorflow(result, dtype) for result, dtype in zip(results, call.dtypes, strict=True)]
        for call, results in zip(calls, _results(calls, handles), strict=True)
    ]


def _submit(calls: Sequence[Call], inputs: Sequence[list[Tensor]], *, is_awaited: bool) -> list[int]:
    with _basics.job().controller.together(is_awaited=is_awaited):
        return [call.submit(tensors) for call, tensors in zip(calls, inputs, strict=True)]


def _results(calls: Sequence[Call], handles: Sequence[int]) -> list[list[Tensor]]:
    """Waits for all operations, also after one has failed, and returns their results or raises the first error."""
    results: list[list[Tensor]] = []
    error: Exception | None = None
    for call, handle in zip(calls, handles, strict=True):
        try:
            results.append(fetch(handle, call.results))
        except Exception as failed:
            error = error or failed
    if error is not None:
        raise error
    return results


# ---- inside tf.function ----


@dataclass
class _Started:
    """Calls that a node has submitted, until another node fetches the results."""

    handles: list[int]
    num_open: int


class _Notifier:
    """A thread that tells TensorFlow's queues about finished operations, so that the engine's thread never runs TensorFlow."""

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="megaclass.hvd.tensorflow", daemon=True).start()

    def finished(self, tokens: Any) -> None:
        """Puts a token into TensorFlow's queue, soon; called by the engine's thread."""
        self._finished.put(tokens)

    def _run(self) -> None:
        token = tf.constant(True)
        while True:
            # The queue has room for any number of tokens, so that this does not block.
            tf.raw_ops.QueueEnqueueV2(handle=self._finished.get().queue_ref, components=[token])


_notifier = functools.cache(_Notifier)
_tickets = itertools.count(1)
_started: dict[int, _Started] = {}


def _run_in_function(calls: Sequence[Call]) -> list[list[Any]]:
    with tf.init_scope():
        tokens = tf.queue.FIFOQueue(2**31 - 1, [tf.bool], [[]])
    counts = [len(call.inputs) for call in calls]

    def submit(*arrays: Any) -> Any:
        ticket = next(_tickets)
        handles = _submit(calls, _split([to_torch(array) for array in arrays], counts), is_awaited=False)
        started = _started[ticket] = _Started(handles, len(handles))

        def one_is_done() -> None:
            # Called under the controller's lock, hence by one thread at a time.
            started.num_open -= 1
            if not started.num_open:
                _notifier().finished(tokens)

        job = _basics.job()
        for handle in handles:
            job.controller.call_when_done(job.handles[handle], one_is_done)
        return np.int64(ticket)

    def fetch_results(ticket: Any) -> Any:
        results = _results(calls, _started.pop(int(ticket)).handles)
        return [
            to_result(result, dtype)
            for call, found in zip(calls, results, strict=True)
            for result, dtype in zip(found, call.dtypes, strict=True)
        ]

    call_python, to_result = _python_node()
    inputs = [tensor for call in calls for tensor in call.inputs]
    ticket = _independent(call_python(submit, inputs, tf.int64))
    with tf.control_dependencies([ticket]):
        token = _independent(tokens.dequeue())
    with tf.control_dependencies([token]):
        outputs = call_python(fetch_results, [ticket], [dtype for call in calls for dtype in call.dtypes])
    _independent(outputs[0])
    return _shaped(calls, outputs)


def _python_node() -> tuple[Callable[..., Any], Callable[[Tensor, Any], Any]]:
    """Returns how to make a Python node, and how to make its results.

    A numpy node is the faster one and shares memory with torch, but copies tensors from and to GPUs.
    """
    if tf.config.list_logical_devices("GPU"):
        return tf.py_function, to_tensorflow
    return tf.numpy_function, _to_numpy


def _independent(tensor: Any) -> Any:
    """Exempts the tensor's node from the order in which TensorFlow runs nodes that have side effects."""
    manager = getattr(tensor.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(tensor.op)
    return tensor


def _shaped(calls: Sequence[Call], outputs: Sequence[Any]) -> list[list[Any]]:
    for output, shape in zip(outputs, [shape for call in calls for shape in call.shapes], strict=True):
        output.set_shape(shape)
    return _split(outputs, [len(call.dtypes) for call in calls])


def _split(items: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    places = list(itertools.accumulate(counts, initial=0))
    return [list(items[start:stop]) for start, stop in itertools.pairwise(places)]


# ---- in a v1 session ----


def _run_in_session(calls: Sequence[Call]) -> list[list[Any]]:
    counts = [len(call.inputs) for call in calls]

    def run_now(*arrays: Any) -> Any:
        handles = _submit(calls, _split([to_torch(array) for array in arrays], counts), is_awaited=True)
        return [
            _to_numpy(result, dtype)
            for call, found in zip(calls, _results(calls, handles), strict=True)
            for result, dtype in zip(found, call.dtypes, strict=True)
        ]

    inputs = [tensor for call in calls for tensor in call.inputs]
    return _shaped(calls, tf.numpy_function(run_now, inputs, [dtype for call in calls for dtype in call.dtypes]))
