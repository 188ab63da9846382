"""The description of one collective, and the way of calls to the engine and back."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from torch import Tensor

from horovod.collectives.handles import fetch
from horovod.common.basics import _basics
from horovod.engine.operation import Operation

# Not sets, and the most common ones first: there is one object per dtype, while to hash or compare them are calls of C++.
_ARITHMETIC = (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int64, tf.int32, tf.uint8, tf.int8, tf.int16)
_SENDABLE = (*_ARITHMETIC, tf.bool, tf.uint16, tf.uint32, tf.uint64)
_ALLOWED = {"allreduce": _ARITHMETIC, "reducescatter": _ARITHMETIC}


def check_dtype(kind: str, dtype: Any) -> None:
    """Raises ValueError if this kind of collective cannot take tensors of TensorFlow's dtype."""
    if dtype not in _ALLOWED.get(kind, _SENDABLE):
        raise ValueError(f"Tensor type {dtype.name} is not supported by {kind}.")


@dataclass(slots=True)
class Call:
    """One collective of this rank."""

    kind: str
    inputs: Sequence[Any]
    """TensorFlow's tensors."""
    submit: Callable[[list[Tensor]], int]
    """Submits torch's tensors to the engine and returns the handle."""
    results: Callable[[Operation], list[Tensor]]
    """Returns the results of the finished operation."""
    dtypes: Sequence[Any]
    """TensorFlow's dtypes of the results."""
    shapes: Sequence[Any]
    """Shapes of the results, as far as they are known before."""

    def __post_init__(self) -> None:
        for tensor in self.inputs:
            check_dtype(self.kind, tensor.dtype)

    def without_inputs(self) -> "Call":
        """Returns the call without TensorFlow's tensors, each of which keeps its whole graph in memory."""
        return replace(self, inputs=())


def submit_calls(calls: Sequence[Call], inputs: Sequence[list[Tensor]]) -> list[int]:
    """Submits the calls together and returns their handles."""
    with _basics.job().controller.together():
        return [call.submit(given) for call, given in zip(calls, inputs, strict=True)]


def fetch_results(calls: Sequence[Call], handles: Sequence[int]) -> list[list[Tensor]]:
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


def split(items: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Cuts the items into lists of these lengths."""
    places = list(itertools.accumulate(counts, initial=0))
    return [list(items[start:stop]) for start, stop in itertools.pairwise(places)]
