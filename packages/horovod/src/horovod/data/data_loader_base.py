"""`horovod.data`: base classes of data loaders, one of which reads ahead in a thread."""

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

_log = logging.getLogger("megaclass.horovod")


class BaseDataLoader:
    """A loader that passes each batch of the subclass's `_iterate` through `_process_batch`."""

    def __len__(self) -> int:
        """Number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Returns the batch; trainers override it to reshape batches."""
        return batch


class _Failed(NamedTuple):
    error: Exception


_END = object()


class AsyncDataLoaderMixin:
    """Mixin, placed before a loader class, that reads up to `async_loader_queue_size` batches ahead; 0 disables it.

    As in Horovod, the thread starts with the first iteration and continues with the next epoch by itself, until
    close_async_loader(). An error in `_iterate` is raised in the consumer.
    """

    _process_batch: Any
    _iterate: Any

    def __init__(
        self, async_loader_queue_size: int = 5, *args: Any, debug_data_loader: bool = False, **kwargs: Any
    ) -> None:
        """debug_data_loader: log when reading ahead starts and ends."""
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(max(1, async_loader_queue_size))
        self.thread = threading.Thread(target=self._async_worker, name="horovod.data", daemon=True)

    def close_async_loader(self) -> None:
        """Ends the thread and drops the batches it has read ahead."""
        self._debug("closed")
        self.finished_event.set()
        while self.started and self.thread.is_alive():
            try:
                self.queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _debug(self, what: str) -> None:
        if self.debug_data_loader:
            _log.warning("%s, at most %d batches ahead: %s", type(self).__name__, self.async_loader_queue_size, what)

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
        self._debug("iteration starts")
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self.queue.get()) is not _END:
            if isinstance(batch, _Failed):
                # Put it back: the thread has ended, and the next iteration must fail as well instead of waiting.
                self.queue.put(batch)
                raise batch.error
            yield self._process_batch(batch)
