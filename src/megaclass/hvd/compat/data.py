"""`horovod.data`: base classes for loaders of batches, one of which reads ahead in a thread."""

import queue
import threading
from collections.abc import Iterator
from typing import Any


class BaseDataLoader:
    """A loader that yields what `_iterate` of a subclass does, each batch through `_process_batch`."""

    def __len__(self) -> int:
        """Number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """A hook for trainers, which reshape batches here."""
        return batch


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


_END = object()


class AsyncDataLoaderMixin:
    """Before a loader among the base classes: a thread reads up to `async_loader_queue_size` batches ahead; 0: none.

    The thread starts with the first iteration and begins the next epoch by itself, as Horovod's does, until
    close_async_loader(). An error in `_iterate` is raised where batches are taken.
    """

    _process_batch: Any
    _iterate: Any

    def __init__(self, async_loader_queue_size: int = 5, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(max(1, async_loader_queue_size))
        self.thread = threading.Thread(target=self._async_worker, name="horovod.data", daemon=True)

    def close_async_loader(self) -> None:
        """Ends the thread; batches that were read and not taken are dropped."""
        self.finished_event.set()
        while self.started and self.thread.is_alive():
            try:
                self.queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _async_worker(self) -> None:
        while not self.finished_event.is_set():
            try:
                for batch in self._iterate():
                    if self.finished_event.is_set():
                        return
                    self.queue.put(batch)
            except Exception as error:
                self.queue.put(_Failed(error))
                return
            self.queue.put(_END)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self.queue.get()) is not _END:
            if isinstance(batch, _Failed):
                # For the next one who iterates, too: the thread is gone.
                self.queue.put(batch)
                raise batch.error
            yield self._process_batch(batch)
