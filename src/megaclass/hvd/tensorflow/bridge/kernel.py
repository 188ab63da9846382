"""An operation of TensorFlow for graphs, whose kernel submits collectives to the engine and does not wait for them.

TensorFlow's C API registers operations and kernels at run time, and ctypes makes C functions of Python ones, so that nothing is
compiled. The kernel is asynchronous, as Horovod's are: it submits its tensors and returns, so that it occupies no thread of
TensorFlow's pool, and the engine's thread tells TensorFlow when the results are there.

    TensorFlow's thread   _compute() -> _Run.start()   inputs as torch's tensors, memory for the results, submit
    the driver            _Run.finish()                other results (the shape of a gathered tensor is known only now), done

Memory: inputs are read where TensorFlow has them. Results of the inputs' shapes are written into TensorFlow's outputs, or over
the input where nothing else reads it; all other results are copied into the outputs. A tensor of torch keeps TensorFlow's
memory alive for as long as the engine may use it.

State: `_nodes` maps the number in the attributes of a node to its calls; the graphs of the node keep the entry alive.
"""

import ctypes
import functools
import itertools
import weakref
from collections.abc import Sequence
from ctypes import byref
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from megaclass.hvd.basics import _basics
from megaclass.hvd.tensorflow.bridge.call import Call, fetch_results, split, submit_calls
from megaclass.hvd.tensorflow.bridge.done_callback import KeptCallback, is_known_layout

_OPERATION = "MegaclassCollective"
# TensorFlow's codes of the errors that Python nodes would raise; all others are UNKNOWN.
_CODES: dict[type[Exception], int] = {ValueError: 3, TypeError: 3, NotImplementedError: 12}
_UNKNOWN = 2

_CREATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_COMPUTE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_DELETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_P, _I, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
# The result and the arguments of each function, as in TensorFlow's headers c/kernels.h, c/ops.h and c/tf_tensor.h.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "TF_NewStatus": (_P, []),
    "TF_DeleteStatus": (None, [_P]),
    "TF_SetStatus": (None, [_P, _I, _S]),
    "TF_GetCode": (_I, [_P]),
    "TF_Message": (_S, [_P]),
    "TF_NewOpDefinitionBuilder": (_P, [_S]),
    "TF_OpDefinitionBuilderAddAttr": (None, [_P, _S]),
    "TF_OpDefinitionBuilderAddInput": (None, [_P, _S]),
    "TF_OpDefinitionBuilderAddOutput": (None, [_P, _S]),
    "TF_OpDefinitionBuilderSetIsStateful": (None, [_P, ctypes.c_bool]),
    "TF_RegisterOpDefinition": (None, [_P, _P]),
    "TF_NewAsyncKernelBuilder": (_P, [_S, _S, _CREATE, _COMPUTE, _DELETE]),
    "TF_RegisterKernelBuilder": (None, [_S, _P, _P]),
    "TF_OpKernelConstruction_GetAttrInt64": (None, [_P, _S, _P, _P]),
    "TF_OpKernelContext_Failure": (None, [_P, _P]),
    "TF_GetInput": (None, [_P, _I, _P, _P]),
    "TF_AllocateOutput": (_P, [_P, _I, _I, _P, _I, ctypes.c_size_t, _P]),
    "TF_ForwardInputOrAllocateOutput": (_P, [_P, _P, _I, _I, _P, _I, _P, _P]),
    "TF_DeleteTensor": (None, [_P]),
    "TF_TensorType": (_I, [_P]),
    "TF_NumDims": (_I, [_P]),
    "TF_Dim": (ctypes.c_int64, [_P, _I]),
    "TF_TensorData": (_P, [_P]),
    "TF_RunAsyncOpKernelDoneCallback": (None, [_P]),
}
# This one starts the nodes that read the results, so that it must not hold the interpreter's lock. All others take less time
# than to give the lock away and to get it back.
_RUNS_LONG = {"TF_RunAsyncOpKernelDoneCallback"}

# The dtype of torch in which a tensor is sent, by TensorFlow's number. torch has no arithmetic for unsigned integers.
_DTYPES = {
    dtype.as_datatype_enum: sent
    for sent, dtypes in {
        torch.uint8: [tf.uint8],
        torch.int8: [tf.int8],
        torch.bool: [tf.bool],
        torch.int16: [tf.int16, tf.uint16],
        torch.int32: [tf.int32, tf.uint32],
        torch.int64: [tf.int64, tf.uint64],
        torch.float16: [tf.float16],
        torch.bfloat16: [tf.bfloat16],
        torch.float32: [tf.float32],
        torch.float64: [tf.float64],
    }.items()
    for dtype in dtypes
}
# numpy's names of these dtypes. It has no bfloat16.
_TYPESTRS = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype.str for dtype in _DTYPES.values() if dtype != torch.bfloat16
}
_TYPESTRS[torch.bfloat16] = "<i2"


@functools.cache
def _api() -> dict[str, Any]:
    """Returns the functions of TensorFlow's C API by name."""
    # The package has loaded the library, so that this opens the one that is in use.
    (path, *_) = sorted(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*"))
    keeping, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(releasing if name in _RUNS_LONG else keeping, name)
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


class _Status:
    """A status of TensorFlow, in which its functions report errors."""

    def __init__(self) -> None:
        self.pointer, self._delete = _api()["TF_NewStatus"](), _api()["TF_DeleteStatus"]

    def check(self) -> None:
        """Raises RuntimeError if the status is an error."""
        api = _api()
        if api["TF_GetCode"](self.pointer):
            raise RuntimeError(api["TF_Message"](self.pointer).decode(errors="replace"))

    def __del__(self) -> None:
        self._delete(self.pointer)


@functools.cache
def is_available() -> bool:
    """Registers the operation; returns False if this TensorFlow differs from what is needed: part of the C API may change."""
    try:
        _register()
        with tf.init_scope():
            tf.function(_add_probe, autograph=False)()
    except (AttributeError, OSError, ValueError, RuntimeError, tf.errors.OpError):
        return False
    return True


def _register() -> None:
    api, status, name = _api(), _Status(), _OPERATION.encode()
    builder = api["TF_NewOpDefinitionBuilder"](name)
    for attribute in (b"Tin: list(type) >= 0", b"Tout: list(type) >= 0", b"node: int"):
        api["TF_OpDefinitionBuilderAddAttr"](builder, attribute)
    api["TF_OpDefinitionBuilderAddInput"](builder, b"inputs: Tin")
    api["TF_OpDefinitionBuilderAddOutput"](builder, b"outputs: Tout")
    # Two equal nodes are two collectives, and one that nothing reads still takes place: other ranks take part in it.
    api["TF_OpDefinitionBuilderSetIsStateful"](builder, True)
    api["TF_RegisterOpDefinition"](builder, status.pointer)
    status.check()
    kernel = api["TF_NewAsyncKernelBuilder"](name, b"CPU", _create, _compute, _delete)
    api["TF_RegisterKernelBuilder"](name, kernel, status.pointer)
    status.check()
    # Gradients are those of tf.custom_gradient.
    tf.no_gradient(_OPERATION)


def _add_probe() -> None:
    """Adds a node that fails unless kernels can keep their callbacks."""
    tf.compat.v1.get_default_graph().create_op(_OPERATION, [], [], name="probe", attrs=_attributes([], [], _PROBE))


# ---- building graphs ----


class _Node:
    """The calls of one node."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = [call.without_inputs() for call in calls]
        self.counts = [len(call.inputs) for call in calls]


_PROBE = 0
_OF_ANOTHER_PROCESS = "This collective belongs to a graph of another process. Build the graph in this process."
_numbers = itertools.count(1)
_nodes: "weakref.WeakValueDictionary[int, _Node]" = weakref.WeakValueDictionary()


def add_node(calls: Sequence[Call]) -> list[Any]:
    """Adds a node that runs the calls to the graph that is being built, and returns its outputs."""
    number, node = next(_numbers), _Node(calls)
    _nodes[number] = node
    graph = tf.compat.v1.get_default_graph()
    _keep_alive(graph, node)
    inputs = [tensor for call in calls for tensor in call.inputs]
    dtypes = [dtype for call in calls for dtype in call.dtypes]
    attributes = _attributes([tensor.dtype for tensor in inputs], dtypes, number)
    return list(graph.create_op(_OPERATION, inputs, dtypes, name=calls[0].kind, attrs=attributes).outputs)


def _attributes(inputs: Sequence[Any], outputs: Sequence[Any], number: int) -> dict[str, Any]:
    def types(dtypes: Sequence[Any]) -> Any:
        numbers = [dtype.base_dtype.as_datatype_enum for dtype in dtypes]
        return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=numbers))

    return {"Tin": types(inputs), "Tout": types(outputs), "node": tf.compat.v1.AttrValue(i=number)}


def _keep_alive(graph: Any, node: _Node) -> None:
    """Keeps the node for as long as its graph. Graphs of branches and loops end before those around them, hence in all."""
    while graph is not None:
        outer = getattr(graph, "outer_graph", None)
        if outer is None and tf.compat.v1.executing_eagerly_outside_functions():
            return  # TensorFlow's default graph, which contains nothing and never ends
        if not hasattr(graph, "_megaclass_nodes"):
            graph._megaclass_nodes = []
        graph._megaclass_nodes.append(node)
        graph = outer


# ---- running ----


class _Run:
    """One execution of a node. TensorFlow's `context` ends with the call of `done`, which was taken from TensorFlow."""

    def __init__(self, node: _Node, context: int, done: KeptCallback) -> None:
        self._node = node
        self._context = context
        self._done = done
        self._handles: list[int] = []

    def start(self) -> None:
        """Submits the calls; finish() follows when all are done."""
        node, status = self._node, _Status()
        inputs: list[Tensor] = []
        outputs: list[list[Tensor] | None] = []
        place = 0
        for call, count in zip(node.calls, node.counts, strict=True):
            numbers = range(len(inputs), len(inputs) + count)
            if call.is_like_inputs:
                pairs = [_input_and_output(self._context, i, place + i - numbers.start, status) for i in numbers]
                inputs += [given for given, _ in pairs]
                outputs.append([out for _, out in pairs])
            else:
                inputs += [_input(self._context, i, status) for i in numbers]
                outputs.append(None)
            place += len(call.dtypes)
        self._handles = submit_calls(node.calls, split(inputs, node.counts), outputs, is_awaited=False)
        num_finished, job = itertools.count(1), _basics.job()

        def one_is_done() -> None:
            # next() is one step of the interpreter: this thread and the driver may both be here.
            if next(num_finished) == len(node.calls):
                self.finish()

        for operation in [job.handles[handle] for handle in self._handles]:
            job.controller.call_when_done(operation, one_is_done)

    def finish(self) -> None:
        """Hands the results or the error to TensorFlow."""
        try:
            self._write(fetch_results(self._node.calls, self._handles))
        except Exception as error:
            self.fail(error)
        else:
            self._end()

    def _write(self, results: list[list[Tensor]]) -> None:
        place = 0
        for call, found in zip(self._node.calls, results, strict=True):
            if not call.is_like_inputs:
                for number, (result, dtype) in enumerate(zip(found, call.dtypes, strict=True)):
                    _new_output(self._context, place + number, result, dtype.as_datatype_enum)
            place += len(call.dtypes)

    def fail(self, error: Exception) -> None:
        """Ends the node with an error."""
        _report(self._context, error)
        self._end()

    def _end(self) -> None:
        _api()["TF_RunAsyncOpKernelDoneCallback"](self._done.address)
        self._done.destroy()


def _report(context: int, error: Exception) -> None:
    """Makes the error that of the node. TensorFlow's exception has its name and its text."""
    api, status = _api(), _Status()
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), _UNKNOWN)
    api["TF_SetStatus"](status.pointer, code, f"{type(error).__name__}: {error}".encode().replace(b"\0", b""))
    api["TF_OpKernelContext_Failure"](context, status.pointer)


@_CREATE
def _create(construction: int) -> int:
    number, status = ctypes.c_int64(), _Status()
    _api()["TF_OpKernelConstruction_GetAttrInt64"](construction, b"node", byref(number), status.pointer)
    return number.value


@_COMPUTE
def _compute(number: int | None, context: int, done: int) -> None:
    # A number of zero, that of the probe, arrives as None.
    node = None if number is None else _nodes.get(number)
    if node is None:
        error = _probe_error(done) if number is None else RuntimeError(_OF_ANOTHER_PROCESS)
        if error is not None:
            _report(context, error)
        _api()["TF_RunAsyncOpKernelDoneCallback"](done)
        return
    run = _Run(node, context, KeptCallback(done))
    try:
        run.start()
    except Exception as error:
        run.fail(error)


def _probe_error(done: int) -> Exception | None:
    try:
        return None if is_known_layout(done) else RuntimeError("TensorFlow's callback has a layout that is not known.")
    except Exception as error:
        return error


@_DELETE
def _delete(_: int) -> None:
    """Has nothing to release: a kernel is a number."""


# ---- memory ----


class _Memory:
    """A tensor of TensorFlow, which keeps its memory; numpy makes an array of it."""

    __slots__ = ("__array_interface__", "_delete", "_pointer", "dtype", "shape")

    def __init__(self, pointer: int) -> None:
        api = _api()
        self._pointer, self._delete = pointer, api["TF_DeleteTensor"]
        dim = api["TF_Dim"]
        self.shape = tuple([dim(pointer, axis) for axis in range(api["TF_NumDims"](pointer))])
        self.dtype = _DTYPES[api["TF_TensorType"](pointer)]
        self.__array_interface__ = {
            "version": 3,
            "shape": self.shape,
            "typestr": _TYPESTRS[self.dtype],
            "data": (api["TF_TensorData"](pointer) or 0, False),
        }

    def as_torch(self) -> Tensor:
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        tensor = torch.from_numpy(np.asarray(self))
        return tensor.view(torch.bfloat16) if self.dtype is torch.bfloat16 else tensor

    def __del__(self) -> None:
        self._delete(self._pointer)


@functools.cache
def _array_type(kind: Any, length: int) -> Any:
    """Returns an array type of ctypes. It is kept, because making the type takes longer than using it."""
    return kind * length


def _dims(shape: Sequence[int]) -> Any:
    return _array_type(ctypes.c_int64, len(shape))(*shape)


def _input_memory(context: int, number: int, status: _Status) -> _Memory:
    pointer = ctypes.c_void_p()
    _api()["TF_GetInput"](context, number, byref(pointer), status.pointer)
    status.check()
    assert pointer.value is not None
    return _Memory(pointer.value)


def _input(context: int, number: int, status: _Status) -> Tensor:
    return _input_memory(context, number, status).as_torch()


def _input_and_output(context: int, number: int, place: int, status: _Status) -> tuple[Tensor, Tensor]:
    """Returns the input, and an output of its shape: the same memory if nothing else will read the input."""
    # The memory of the input is not kept here: TensorFlow would take this for a second reader.
    shape = _input_memory(context, number, status).shape
    candidates, forwarded = ctypes.c_int(number), ctypes.c_int(-1)
    pointer = _api()["TF_ForwardInputOrAllocateOutput"](
        context, byref(candidates), 1, place, _dims(shape), len(shape), byref(forwarded), status.pointer
    )
    status.check()
    out = _Memory(pointer).as_torch()
    return (out if forwarded.value == number else _input(context, number, status)), out


def _new_output(context: int, place: int, result: Tensor, dtype: int) -> None:
    """Copies the result into a new output."""
    status = _Status()
    num_bytes = result.numel() * result.element_size()
    pointer = _api()["TF_AllocateOutput"](
        context, place, dtype, _dims(result.shape), result.ndim, num_bytes, status.pointer
    )
    status.check()
    _Memory(pointer).as_torch().copy_(result)
