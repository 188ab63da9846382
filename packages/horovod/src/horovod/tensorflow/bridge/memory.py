"""Tensors of TensorFlow as tensors of torch, and back, that share their memory."""

from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

# What the public functions call. After an exchange with other ranks little code is in the processor's caches, so that every
# function of Python on the way takes microseconds.
_torch_to_dlpack, _torch_from_dlpack = torch._C._to_dlpack, torch._C._from_dlpack
try:
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager.context import context

    _tf_to_dlpack, _from_capsule = pywrap_tfe.TFE_ToDlpackCapsule, pywrap_tfe.TFE_FromDlpackCapsule

    def _tf_from_dlpack(capsule: Any) -> Any:
        current = context()
        current.ensure_initialized()
        return _from_capsule(capsule, current._handle)

except (ImportError, AttributeError):
    _tf_to_dlpack, _tf_from_dlpack = tf.experimental.dlpack.to_dlpack, tf.experimental.dlpack.from_dlpack

# torch has these dtypes but no arithmetic for them. They are sent as the signed integers of the same width.
_SENT_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def to_torch(tensor: Any) -> Tensor:
    """Returns an eager tensor or a numpy array as a tensor of torch that shares its memory. It must not be written to."""
    if isinstance(tensor, tf.Tensor):
        shared = _torch_from_dlpack(_tf_to_dlpack(tensor))
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
    shared = _tf_from_dlpack(_torch_to_dlpack(tensor.contiguous()))
    # TensorFlow has one object per dtype, and compares them by a function of Python.
    return shared if shared.dtype is dtype or shared.dtype == dtype else tf.bitcast(shared, dtype)


def to_numpy(tensor: Tensor, dtype: Any) -> Any:
    """Returns the tensor as an array of TensorFlow's dtype, which shares the memory of a tensor in main memory."""
    tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().view(dtype.as_numpy_dtype)
