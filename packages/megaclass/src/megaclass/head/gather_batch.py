"""The gathered buffer: embeddings, labels, batch sizes and a control word in a single all-gather.

A rank's block, as bytes: [int64 batch size, int64 step | max_batch x int64 labels | max_batch x D embeddings].
Rows beyond the rank's own batch are padding: label -1, embedding 0. An image may bring several integers (labels.py).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass_launch.ranks.collectives import gather_blocks, group_size

PADDING = -1
_CONTROL_WORDS = 2


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Offsets in a rank's block, in bytes."""

    max_batch: int
    width: int
    itemsize: int
    num_words: int = 1
    """Integers per image."""

    @property
    def labels_at(self) -> int:
        return 8 * _CONTROL_WORDS

    @property
    def rows_at(self) -> int:
        return self.labels_at + 8 * self.max_batch * self.num_words

    @property
    def rows_end(self) -> int:
        return self.rows_at + self.max_batch * self.width * self.itemsize

    @property
    def num_bytes(self) -> int:
        """Rounded up to 8, so each rank's block can be viewed as int64."""
        return -(-self.rows_end // 8) * 8


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The batch that every rank holds after the all-gather; G = W * max_batch rows, rank by rank, padding included."""

    embeddings_GD: Tensor
    labels_G: Tensor
    """(G,), or (G, words) if an image brings several integers."""
    is_image_G: Tensor
    counts_W: Tensor
    steps_W: Tensor
    """Step counter of each rank; they must agree. Below 0 if a rank's centres were written to (faults.py)."""
    max_batch: int


def gather_batch(
    embeddings_BD: Tensor,
    labels_B: Tensor,
    *,
    step: int | Tensor,
    max_batch: int | None,
    group: dist.ProcessGroup | None,
) -> GlobalBatch:
    """Collective: all-gathers W * (16 + max_batch * (8 + D * itemsize)) bytes; nothing waits when max_batch is given.

    step: the control word; a tensor if the device forms it.
    labels_B: (B,), or (B, words): then 8 bytes per word and image.
    Without max_batch the sizes are gathered first (8 bytes per rank) and the host waits for them.
    """
    count, width = embeddings_BD.shape
    device = embeddings_BD.device
    if max_batch is None:
        max_batch = largest_batch(count, device, group)
    words = labels_B.shape[1:]
    layout = BlockLayout(max_batch, width, embeddings_BD.element_size(), words.numel())
    labels_at, rows_at, rows_end = layout.labels_at, layout.rows_at, layout.rows_end
    block = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    control = block[:labels_at].view(torch.int64)
    # fill_, not an assignment: that would copy the number from the host, and a GPU would wait.
    control[0].fill_(count)
    control[1].fill_(step)
    labels = block[labels_at:rows_at].view(torch.int64).view(max_batch, *words)
    labels[:count] = labels_B
    labels[count:].fill_(PADDING)
    block[rows_at:rows_end].view(embeddings_BD.dtype).view(max_batch, width)[:count] = embeddings_BD

    blocks_W = gather_blocks(block, group)
    control_W = blocks_W[:, :labels_at].view(torch.int64)
    # reshape() copies here: the labels of all ranks, which lie apart in the gathered blocks, become one vector.
    labels_G = blocks_W[:, labels_at:rows_at].view(torch.int64).reshape(-1, *words)
    embeddings_GD = blocks_W[:, rows_at:rows_end].view(embeddings_BD.dtype).reshape(len(labels_G), width)
    counts_W = control_W[:, 0].contiguous()
    places = torch.arange(max_batch, device=device)
    is_image_G = (places[None, :] < counts_W[:, None]).reshape(-1)
    return GlobalBatch(embeddings_GD, labels_G, is_image_G, counts_W, control_W[:, 1].contiguous(), max_batch)


def largest_batch(count: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Collective. Returns the largest batch of any rank. All-gathers 8 bytes per rank; the host waits for it.

    A single rank knows it without asking the device.
    """
    if group_size(group) == 1:
        return count
    return int(gather_blocks(torch.tensor([count], device=device), group).max())
