"""Bad images of a run: counted, each reported once, and too many of them end the run."""

import logging
import threading

from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError

_log = logging.getLogger("megaclass.data")

# With fewer images the share of bad ones says little; smaller sets are judged by their own size.
_IMAGES_BEFORE_JUDGING = 10_000


class BadImages:
    """Counts the images of a run that could not be read, reports each once, and stops the run when there are too many.

    Workers update all fields under _lock.
    """

    def __init__(self, source: ImageSource, max_fraction: float) -> None:
        self._source = source
        self._max_fraction = max_fraction
        self._lock = threading.Lock()
        self.num_read = 0
        """Images requested on this rank."""
        self.num_bad = 0
        """Failed attempts; an image that fails in every epoch counts every time."""
        self.indices: set[int] = set()
        """Indices of the images that failed."""

    def describe(self) -> str:
        return (
            f"{self.num_bad:,} of {self.num_read:,} images could not be read and were replaced, "
            f"{len(self.indices):,} different ones; megaclass data verify lists them."
        )

    def add_read(self, num_images: int) -> None:
        with self._lock:
            self.num_read += num_images

    def add_bad(self, index: int, error: DataError) -> None:
        with self._lock:
            self.num_bad += 1
            is_new = index not in self.indices
            self.indices.add(index)
            # A run that has only read a few images is judged as if it had read more, unless there are no more.
            judged = max(self.num_read, min(self._source.num_images, _IMAGES_BEFORE_JUDGING))
            # An image that fails in every epoch counts once here.
            num_different = len(self.indices)
            fraction = num_different / judged
        # Outside of the lock: logging may block on a full pipe, and other threads count meanwhile.
        if is_new:
            _log.warning("skipped a bad image: %s", error)
        if fraction > self._max_fraction:
            raise DataError(
                f"{num_different} of {judged} images could not be read, more than data.max_bad_fraction = "
                f"{self._max_fraction} allows. The last one: {error} "
                f"megaclass data verify lists them, and writes a clean copy with --repair."
            )
