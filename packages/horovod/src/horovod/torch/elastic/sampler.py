"""A sampler that deals out the samples of an epoch again when the number of ranks changes."""

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from horovod.common.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals out the samples that are left of an epoch to the current ranks; every rank gets as many as the others.

    As part of a TorchState it continues after a change of the ranks where the last commit left off. Call record_batch() after
    each batch and set_epoch() at the end of each epoch, not at its beginning: it forgets what was processed.

    If the samples left cannot be divided evenly, the first of them are dealt out twice, as in Horovod. All ranks must use
    batches of the same size.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """seed: the same on all ranks."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """Samples of this epoch that all ranks together have processed."""
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        """Samples for this rank."""
        self.total_size = 0
        """Samples for all ranks, with those that are dealt out twice."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch, whose order depends on the seed and on its number."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Deals out the samples that are left to the ranks of the current generation."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        # Whole copies first: there may be fewer samples left than ranks.
        repeats = math.ceil(self.total_size / len(left)) if left else 0
        return iter((left * repeats)[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


# Names that Horovod's own module has as well.
from horovod.common.basics import rank, size
