"""Batches of a TensorSource: features as they are, sequences padded to the longest of the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.sources.source import TensorSource
from megaclass.errors import DataError
from megaclass.image_size import ImageSize, height_and_width, is_sequence


def collated(
    source: TensorSource, indices: NDArray[np.int64], name_of: Callable[[int], str]
) -> tuple[Tensor, Tensor | None]:
    """Returns features (B, W) and None, or sequences (B, T, ...) padded with 0, and their lengths (B,).

    Raises a DataError that names the first sample with a number that is not finite, or a sequence of no rows.
    """
    samples = source.tensors(indices)
    lengths = None if isinstance(samples, Tensor) else torch.tensor([len(sample) for sample in samples])
    if lengths is not None and len(lengths):
        if not lengths.all():
            raise DataError(f"{name_of(int(indices[int(lengths.argmin())]))} is empty: expected at least one row.")
        shapes = {(sample.shape[1:], sample.dtype) for sample in samples}
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


class GivenSamples:
    """Features (N, W), one row (W,), or a list of sequences that a caller gives to a model."""

    num_classes = 0

    def __init__(self, given: Any, image_size: ImageSize) -> None:
        self.image_size = height_and_width(image_size)
        width, is_array = self.image_size[1], isinstance(given, np.ndarray | Tensor)
        try:
            if is_sequence(image_size):
                self._samples: Tensor | list[Tensor] = [
                    torch.as_tensor(one) for one in ([given] if is_array else given)
                ]
            else:
                matrix = torch.as_tensor(given if is_array else np.asarray(given)).detach().cpu()
                self._samples = matrix[None] if matrix.ndim == 1 else matrix
                if self._samples.ndim != 2 or self._samples.shape[1] != width or not matrix.is_floating_point():
                    raise ValueError(f"a matrix of shape {tuple(matrix.shape)} and {matrix.dtype}")
        except (TypeError, ValueError, RuntimeError) as error:
            expected = (
                f"a list of tensors (T, {width})" if is_sequence(image_size) else f"a matrix (N, {width}) of floats"
            )
            raise DataError(f"Cannot embed {type(given).__name__}: {error}. The model takes {expected}.") from error
        self.num_images = len(self._samples)
        self.labels: NDArray[np.int64] = np.zeros(self.num_images, dtype=np.int64)

    def tensors(self, indices: NDArray[np.int64]) -> Tensor | Sequence[Tensor]:
        if isinstance(self._samples, Tensor):
            return self._samples[torch.from_numpy(indices)]
        return [self._samples[index] for index in indices.tolist()]

    def read(self, index: int) -> bytes:
        return bytes(self._samples[index].numpy())

    def name_of(self, index: int) -> str:
        return f"sample {index}"

    def describe(self) -> str:
        return f"{self.num_images} samples in memory"
