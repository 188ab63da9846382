"""Batches of features, as they are, and of sequences, padded to the longest of the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.errors import DataError
from megaclass.image_size import ImageSize, height_and_width, is_sequence

ReadSamples = Callable[[NDArray[np.int64]], Tensor | Sequence[Tensor]]
"""`TensorSource.tensors`."""


def collated(
    read: ReadSamples, indices: NDArray[np.int64], name_of: Callable[[int], str]
) -> tuple[Tensor, Tensor | None]:
    """Returns features (B, W) and None, or sequences (B, T, ...) padded with 0, and their lengths (B,).

    Raises a DataError that names the first sample with a number that is not finite, or a sequence of no rows.
    """
    samples = read(indices)
    lengths = None if isinstance(samples, Tensor) else torch.tensor([len(sample) for sample in samples])
    if lengths is not None and not lengths.all():
        raise DataError(f"{name_of(int(indices[int(lengths.argmin())]))} is empty: expected at least one row.")
    shapes = {(sample.shape[1:], sample.dtype) for sample in samples} if lengths is not None else ()
    if len(shapes) > 1:
        raise DataError(
            f"{name_of(int(indices[0]))} and others of its batch have rows of different shapes or dtypes: {shapes}."
        )
    padded = samples if isinstance(samples, Tensor) else nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    if padded.is_floating_point():
        is_finite_B = padded.isfinite().flatten(1).all(1)
        if not is_finite_B.all():
            raise DataError(f"{name_of(int(indices[int((~is_finite_B).int().argmax())]))} holds NaN or infinity.")
    return padded, lengths


def given_samples(given: Any, image_size: ImageSize) -> Tensor | list[Tensor]:
    """Returns what a caller gives to a model: features (N, W) or one row (W,), or a list of sequences."""
    width, is_array, has_lengths = (
        height_and_width(image_size)[1],
        isinstance(given, np.ndarray | Tensor),
        is_sequence(image_size),
    )
    try:
        if has_lengths:
            return [torch.as_tensor(one) for one in ([given] if is_array else given)]
        matrix = torch.as_tensor(given if is_array else np.asarray(given)).detach().cpu()
        matrix = matrix[None] if matrix.ndim == 1 else matrix
        if matrix.ndim != 2 or matrix.shape[1] != width or not matrix.is_floating_point():
            raise ValueError(f"a matrix of shape {tuple(matrix.shape)} and {matrix.dtype}")
        return matrix
    except (TypeError, ValueError, RuntimeError) as error:
        expected = f"a list of tensors (T, {width})" if has_lengths else f"a matrix (N, {width}) of floats"
        raise DataError(f"Cannot embed {type(given).__name__}: {error}. The model takes {expected}.") from error
