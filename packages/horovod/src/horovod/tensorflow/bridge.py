"""Runs collectives of the engine on TensorFlow's tensors, without copies if the framework allows it.

    eager          submits all calls, then waits for them, as in the torch API
    tf.function    three nodes: submit (returns at once) -> a dequeue that is asynchronous -> fetch the result
    v1 session     a dataset of one element, whose map function submits and waits

Why not one Python node: a Python node that waits for other ranks occupies a thread of TensorFlow's pool. Ranks may run
independent nodes in different orders, so with a small pool each rank could wait inside a different collective, without end.

TensorFlow's queues are different: a dequeue that finds nothing occupies no thread. The engine thread puts a token into the
queue of the node when its operations are done; TensorFlow then runs `fetch`, which does not wait, on a thread of its pool.

A v1 session has queues of its own, which no other thread can fill. But the node that returns the single element of a dataset
does not occupy a thread of the pool either: tf.data runs it on a thread of its own, and makes as many of these as are needed.

Nodes are exempted from the automatic control dependencies, which would run all of them in the order of tracing, so only
data decides when a collective starts.

State: `_started` maps tickets to the handles of submitted operations. submit adds entries and fetch removes them, each in one
step under the interpreter's lock.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from horovod.collectives.handles import fetch
from horovod.common.basics import _basics
from horovod.common.exceptions import HorovodInternalError
from horovod.engine.job import current
from horovod.engine.operation import Operation

try:
    from tensorflow.python.eager import record
    from tensorflow.python.ops import control_flow_util

    could_possibly_record = record.could_possibly_record
    is_for_xla = control_flow_util.GraphOrParentsInXlaContext
except (ImportError, AttributeError):  # not public names of TensorFlow

    def could_possibly_record() -> bool:
        """Returns whether a gradient tape may be active."""
        return True

    def is_for_xla(graph: Any) -> bool:
        """Returns whether the graph is known to be compiled by XLA, which otherwise says itself that it cannot do so."""
        return False


_ARITHMETIC = (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int64, tf.int32, tf.uint8, tf.int8, tf.int16)
_SENDABLE = (*_ARITHMETIC, tf.bool, tf.uint16, tf.uint32, tf.uint64)
_ALLOWED = {"allreduce": _ARITHMETIC, "reducescatter": _ARITHMETIC}
# torch has these dtypes but no arithmetic for them. They are sent as the signed integers of the same width.
_SENT_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


# ---- one collective ----


@dataclass(slots=True)
class Call:
    """One collective of this rank."""

    kind: str
    inputs: Sequence[Any]
    """TensorFlow's tensors."""
    submit: Callable[[list[Tensor]], int]
    """Submits torch's tensors to the engine and returns the handle."""
    results: Callable[[Operation], Sequence[Tensor]] = attrgetter("outputs")
    """Returns the results of the finished operation."""
    dtypes: Sequence[Any] = ()
    """TensorFlow's dtypes of the results; by default those of the inputs."""
    shapes: Sequence[Any] = ()
    """Shapes of the results, as far as they are known before; by default those of the inputs."""

    def __post_init__(self) -> None:
        for tensor in self.inputs:
            if tensor.dtype not in _ALLOWED.get(self.kind, _SENDABLE):
                raise ValueError(f"Tensor type {tensor.dtype.name} is not supported by {self.kind}.")
        self.dtypes = self.dtypes or [tensor.dtype for tensor in self.inputs]
        self.shapes = self.shapes or [tensor.shape for tensor in self.inputs]


def run(calls: Sequence[Call]) -> list[Any]:
    """Runs the calls together and returns the results of all in a row as TensorFlow's tensors."""
    if not tf.executing_eagerly():
        return _run_in_graph(calls)
    try:
        tensors = [[to_torch(tensor) for tensor in call.inputs] for call in calls]
        return _fetch(calls, _submit(calls, tensors), to_tensorflow)
    except HorovodInternalError as error:
        raise CollectiveFailedError(str(error)) from error
    except ValueError as error:
        raise WrongArgumentError(str(error)) from error


class CollectiveFailedError(HorovodInternalError, tf.errors.FailedPreconditionError):
    """A HorovodInternalError that scripts may also catch as TensorFlow's error, as Horovod raises it."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class WrongArgumentError(ValueError, tf.errors.InvalidArgumentError):
    """A ValueError that scripts may also catch as TensorFlow's error, as Horovod raises it."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def _run_in_graph(calls: Sequence[Call]) -> list[Any]:
    if is_for_xla(tf.compat.v1.get_default_graph()):
        raise ValueError(
            f"XLA cannot compile {calls[0].kind}, which waits for other ranks: pass jit_compile=False to tf.function() or "
            f"model.compile()."
        )
    outputs = _add_nodes(calls)
    _independent(outputs[0])
    for output, shape in zip(outputs, [shape for call in calls for shape in call.shapes], strict=True):
        output.set_shape(shape)
    return outputs


def _independent(tensor: Any) -> Any:
    """Exempts the tensor's node from the order in which TensorFlow runs nodes that have side effects."""
    manager = getattr(tensor.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(tensor.op)
    return tensor


def _submit(calls: Sequence[Call], inputs: Sequence[list[Tensor]]) -> list[int]:
    """Submits the calls together and returns their handles."""
    with current.running().controller.together():
        return [call.submit(given) for call, given in zip(calls, inputs, strict=True)]


def _fetch(calls: Sequence[Call], handles: Sequence[int], to_result: Callable[[Tensor, Any], Any]) -> list[Any]:
    """Waits for all operations, also after one has failed, and returns their results or raises the first error."""
    results: list[Any] = []
    error: Exception | None = None
    for call, handle in zip(calls, handles, strict=True):
        try:
            found = fetch(handle, call.results)
            results += [to_result(result, dtype) for result, dtype in zip(found, call.dtypes, strict=True)]
        except Exception as failed:
            error = error or failed
    if error is not None:
        raise error
    return results


def split(items: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Cuts the items into lists of these lengths."""
    places = list(itertools.accumulate(counts, initial=0))
    return [list(items[start:stop]) for start, stop in itertools.pairwise(places)]


# ---- nodes of a graph ----


_tickets = itertools.count(1)
_started: dict[int, list[int]] = {}


def _add_nodes(calls: Sequence[Call]) -> list[Any]:
    """Adds nodes that run the calls to the graph that is being built, and returns the outputs."""
    inputs = [tensor for call in calls for tensor in call.inputs]
    counts = [len(call.inputs) for call in calls]
    dtypes = [dtype for call in calls for dtype in call.dtypes]
    shapes = [shape for call in calls for shape in call.shapes]
    # The nodes keep the calls alive, and a tensor of TensorFlow its whole graph.
    calls = [replace(call, inputs=()) for call in calls]

    def submitted(arrays: Sequence[Any]) -> list[int]:
        return _submit(calls, split([to_torch(array) for array in arrays], counts))

    if not tf.compat.v1.executing_eagerly_outside_functions():
        return _add_dataset(inputs, lambda *arrays: _fetch(calls, submitted(arrays), to_numpy), dtypes, shapes)
    with tf.init_scope():
        tokens, token = tf.queue.FIFOQueue(2**31 - 1, [tf.bool], [[]]), tf.constant(True)

    def submit(*arrays: Any) -> Any:
        ticket = next(_tickets)
        handles = _started[ticket] = submitted(arrays)
        num_finished, job = itertools.count(1), current.running()

        def one_is_done() -> None:
            # next() is one step of the interpreter: this thread and the engine thread may both be here.
            if next(num_finished) == len(handles):
                # The queue has room for any number of tokens, so this does not block.
                tf.raw_ops.QueueEnqueueV2(handle=tokens.queue_ref, components=[token])

        for handle in handles:
            job.controller.call_when_done(job.handles[handle], one_is_done)
        return np.int64(ticket)

    def fetched(ticket: Any) -> Any:
        return _fetch(calls, _started.pop(int(ticket)), to_result)

    call_python, to_result = _python_node()
    ticket = _independent(call_python(submit, inputs, tf.int64))
    with tf.control_dependencies([ticket]):
        is_done = _independent(tokens.dequeue())
    with tf.control_dependencies([is_done]):
        return list(call_python(fetched, [ticket], dtypes))


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


def _python_node() -> tuple[Callable[..., Any], Callable[[Tensor, Any], Any]]:
    """Returns how to make a Python node, and how to make its results.

    A numpy node is the faster one and shares memory with torch, but copies tensors from and to GPUs.
    """
    if tf.config.list_logical_devices("GPU"):
        return tf.py_function, to_tensorflow
    return tf.numpy_function, to_numpy


# ---- tensors of TensorFlow as torch's, and back, sharing memory ----


def to_torch(tensor: Any) -> Tensor:
    """Returns an eager tensor or a numpy array as a tensor of torch that shares its memory. It must not be written to."""
    if isinstance(tensor, tf.Tensor):
        shared = from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    else:
        # TensorFlow passes tensors without dimensions to Python nodes as numpy's scalars.
        array = np.asarray(tensor)
        if array.dtype == tf.bfloat16.as_numpy_dtype:
            shared = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            shared = torch.from_numpy(array)
    sent_as = _SENT_AS.get(shared.dtype)
    return shared if sent_as is None else shared.view(sent_as)


def to_tensorflow(tensor: Tensor, dtype: Any) -> Any:
    """Returns the tensor as an eager tensor of TensorFlow that shares its memory."""
    if tensor.is_cuda:
        # TensorFlow has streams of its own.
        torch.cuda.current_stream(tensor.device).synchronize()
    shared = tf.experimental.dlpack.from_dlpack(tensor.contiguous().__dlpack__())
    return shared if shared.dtype == dtype else tf.bitcast(shared, dtype)


def to_numpy(tensor: Tensor, dtype: Any) -> Any:
    """Returns the tensor as an array of TensorFlow's dtype, which shares the memory of a tensor in main memory."""
    tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().view(dtype.as_numpy_dtype)


# ---- names, gradients and questions of graphs ----


def not_rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that users call inside of tf.function. AutoGraph would otherwise rewrite it, and all it calls."""
    in_graphs = tf.autograph.experimental.do_not_convert(function)

    # Also copies the mark. Eagerly there is nothing to rewrite, and TensorFlow's wrapper is slow.
    @functools.wraps(in_graphs)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if tf.executing_eagerly() else in_graphs(*args, **kwargs)

    return wrapper


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
    """Returns the answer as a tensor; in a graph it is asked for in every run, as ranks of an elastic job change."""
    if tf.executing_eagerly():
        return tf.constant(ask(), tf.int64)
    answer = tf.numpy_function(lambda: np.int64(ask()), [], tf.int64)
    answer.set_shape([])
    return answer
