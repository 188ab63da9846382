"""Errors in the data of one rank, which must end the run on all ranks, without a collective of their own.

A rank whose data fails cannot raise at once: the other ranks would wait for it in the next all-gather. It keeps the error
and sends batches whose labels are all NO_CLASS. Every rank finds such a label in the head's all-gather and refuses the
step (head/faults.py); then the ranks exchange the reason, and all of them raise.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from megaclass.data.loader import Batch, BatchLoader
from megaclass.distributed.agreement import on_every_rank
from megaclass.errors import HeadError
from megaclass.head.faults import NO_CLASS
from megaclass_launch.errors import UserError

T = TypeVar("T")


class DataErrors:
    """Keeps an error of this rank's data until all ranks are at a point where they can exchange it."""

    def __init__(self) -> None:
        self._error: UserError | OSError | None = None

    @property
    def is_any(self) -> bool:
        return self._error is not None

    def keep_error(self, batches: Iterable[T], instead: T) -> Iterator[T]:
        """Yields the batches; after an error, which is kept, yields `instead` without end."""
        try:
            yield from batches
        except (UserError, OSError) as error:
            self._error = error
            while True:
                yield instead

    @contextmanager
    def raised_on_all_ranks(self, device: torch.device) -> Iterator[None]:
        """Wraps a step: if the head refuses `batch_of_no_class`, raises the kept error on every rank instead."""
        try:
            yield
        except HeadError:
            on_every_rank(self.check, device)
            raise

    def check(self) -> None:
        """Raises the kept error, if there is one."""
        if self._error is not None:
            raise self._error


def batch_of_no_class(num_images: int, loader: BatchLoader) -> Batch:
    """Returns the batch that stands for data that cannot be read.

    Every rank refuses it: on a CPU in the same forward, on a GPU some steps later, and nothing is updated until then.
    """
    return loader.blank(num_images, NO_CLASS)
