"""The labels of a batch: one per image, several, with weights. Several are padded with -1 to the head's max_labels."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.gather_batch import PADDING

Labels = Tensor | Sequence[Sequence[int]]
Weights = Tensor | Sequence[Sequence[float]]


def padded(lists: Sequence[Sequence[float]], width: int, fill: float, dtype: torch.dtype, what: str) -> Tensor:
    """Returns (B, width); rows of different lengths are filled up."""
    for place, row in enumerate(lists):
        if not isinstance(row, Sequence) or len(row) > width:
            raise HeadError(
                f"The {what} of image {place} are {row!r}; expected a list of at most max_labels={width} numbers. "
                f"Build the head with max_labels set to the largest number of labels of an image."
            )
    rows = [[*row, *[fill] * (width - len(row))] for row in lists]
    return torch.tensor(rows, dtype=dtype).view(len(rows), width)


def label_words(
    labels: Labels, weights: Weights | None, max_labels: int, is_weighted: bool, *, is_shared: bool
) -> Tensor:
    """Returns the integers that travel with the embedding of each image.

    One label without weights: (B,), the tensor itself. Otherwise (B, max_labels) labels, and with weights the bits of as many
    float64 numbers behind them. is_shared: without weights, and with one weight per image, its labels share the weight.
    """
    if isinstance(labels, Tensor) and max_labels == 1 and not is_weighted:
        return labels.flatten()
    if not isinstance(labels, Tensor):
        labels = padded(labels, max_labels, PADDING, torch.int64, "labels")
    labels_BP = labels[:, None] if labels.ndim == 1 else labels
    missing = max_labels - labels_BP.shape[1]
    labels_BP = torch.nn.functional.pad(labels_BP.to(torch.int64), (0, missing), value=PADDING)
    if not is_weighted:
        return labels_BP
    is_label_BP = labels_BP != PADDING
    if weights is not None and not isinstance(weights, Tensor):
        weights = padded(weights, max_labels, math.nan, torch.float64, "weights").to(labels_BP.device)
    if weights is not None and weights.ndim == 2:
        # A label without a weight gets one that is not a number, which is a fault.
        weights_BP = torch.nn.functional.pad(weights.double(), (0, max_labels - weights.shape[1]), value=math.nan)
    else:
        weights_BP = default_weights(is_label_BP, is_shared=is_shared)
        weights_BP = weights_BP if weights is None else weights_BP * weights.double()[:, None]
    return torch.cat([labels_BP, weights_BP.where(is_label_BP, 0).view(torch.int64)], 1)


def default_weights(is_label_GP: Tensor, *, is_shared: bool) -> Tensor:
    """Returns 1 per label, or one over the number of the image's labels; 0 for padding; float64."""
    weights_GP = is_label_GP.double()
    return weights_GP / weights_GP.sum(1, keepdim=True).clamp_min(1) if is_shared else weights_GP


def read_words(words_G: Tensor, max_labels: int) -> tuple[Tensor, Tensor | None]:
    """Returns (G, P) labels, and (G, P) weights if they travelled."""
    if words_G.ndim == 1:
        return words_G[:, None], None
    # Contiguous, because the programs of the GPU read them as they lie.
    labels_GP, bits_GP = words_G[:, :max_labels].contiguous(), words_G[:, max_labels:].contiguous()
    return labels_GP, bits_GP.view(torch.float64) if bits_GP.shape[1] else None
