"""Data that fails on one rank ends the run on all of them, told by exchanges that happen anyway."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from megaclass.data.loader import Batch
from megaclass.distributed.agreement import on_every_rank
from megaclass.errors import HeadError, UserError

T = TypeVar("T")
_NO_CLASS = -1


class DataErrors:
    """Keeps what this rank's data raised until all ranks are where they can hear of it."""

    def __init__(self) -> None:
        self._error: UserError | OSError | None = None

    @property
    def is_any(self) -> bool:
        return self._error is not None

    def kept(self, batches: Iterable[T], instead: T) -> Iterator[T]:
        """The same batches; after an error `instead`, for ever."""
        try:
            yield from batches
        except (UserError, OSError) as error:
            self._error = error
            while True:
                yield instead

    @contextmanager
    def heard_by_all(self, device: torch.device) -> Iterator[None]:
        """Around a step with `batch_of_no_class`: the head refuses that on every rank at once, and this rank says why."""
        try:
            yield
        except HeadError:
            on_every_rank(self.check, device)
            raise

    def check(self) -> None:
        """Raises what was kept."""
        if self._error is not None:
            raise self._error


def batch_of_no_class(num_images: int, image_size: tuple[int, int]) -> Batch:
    """Instead of a batch that cannot be read: labels that every rank finds in the head's all-gather, and refuses.

    On a CPU in the same forward; on a GPU some steps later, until when nothing is updated.
    """
    return Batch(
        images=torch.zeros((num_images, 3, *image_size), dtype=torch.uint8),
        labels=torch.full((num_images,), _NO_CLASS),
        indices=np.zeros(num_images, dtype=np.int64),
        epoch=0,
        step=0,
    )
