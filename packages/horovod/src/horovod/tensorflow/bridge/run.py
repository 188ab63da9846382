"""Runs calls eagerly or adds them to a graph; names, gradients and questions of graphs.

    eager   submits all calls, then waits for them, as in the torch API
    graph   nodes that submit when their inputs are there, and return the results (nodes.py)

Nodes are exempted from the automatic control dependencies, which would run all of them in the order of tracing, so that only
data decides when a collective starts.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod.tensorflow.bridge import nodes
from horovod.tensorflow.bridge.call import Call, fetch_results, split, submit_calls
from horovod.tensorflow.bridge.memory import to_tensorflow, to_torch

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


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that AutoGraph does not rewrite, and that calls functions which are not_rewritten() in graphs.

    In eager code it costs nothing, while a wrapper between the caller and an allreduce of 1 MiB takes 1 % of its time.
    """
    marks = vars(tf.autograph.experimental.do_not_convert(lambda: None))
    vars(function).update({name: mark for name, mark in marks.items() if name != "__wrapped__"})
    return function


def not_rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that users call inside of tf.function. AutoGraph would otherwise rewrite it, and all it calls."""
    in_graphs = tf.autograph.experimental.do_not_convert(function)

    # Copies the mark, too. Eagerly there is nothing to rewrite, and TensorFlow's wrapper is slow.
    @functools.wraps(in_graphs)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if tf.executing_eagerly() else in_graphs(*args, **kwargs)

    return wrapper


def run(calls: Sequence[Call]) -> list[list[Any]]:
    """Runs the calls together and returns the results of each as TensorFlow's tensors."""
    return _run_eagerly(calls) if tf.executing_eagerly() else _run_in_graph(calls)


def _run_eagerly(calls: Sequence[Call]) -> list[list[Any]]:
    inputs = [[to_torch(tensor) for tensor in call.inputs] for call in calls]
    handles = submit_calls(calls, inputs)
    return [
        [to_tensorflow(result, dtype) for result, dtype in zip(results, call.dtypes, strict=True)]
        for call, results in zip(calls, fetch_results(calls, handles), strict=True)
    ]


def _run_in_graph(calls: Sequence[Call]) -> list[list[Any]]:
    if is_for_xla(tf.compat.v1.get_default_graph()):
        raise ValueError(
            f"XLA cannot compile {calls[0].kind}, which waits for other ranks: pass jit_compile=False to tf.function() or "
            f"model.compile()."
        )
    outputs = nodes.add_nodes(calls, _independent)
    _independent(outputs[0])
    for output, shape in zip(outputs, [shape for call in calls for shape in call.shapes], strict=True):
        output.set_shape(shape)
    return split(outputs, [len(call.dtypes) for call in calls])


def _independent(tensor: Any) -> Any:
    """Exempts the tensor's node from the order in which TensorFlow runs nodes that have side effects."""
    manager = getattr(tensor.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(tensor.op)
    return tensor


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
