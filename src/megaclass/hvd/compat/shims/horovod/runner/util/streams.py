"""A pipe between threads of one process."""

import threading
from typing import Any


class Pipe:
    """Holds one written text at a time: writers wait until it has been read, readers until something is written."""

    def __init__(self) -> None:
        self._text: Any = None
        self._is_closed = False
        self._changed = threading.Condition()

    def write(self, buf: Any) -> None:
        """Writes a text; raises RuntimeError if the pipe is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._text is None or self._is_closed)
            if self._is_closed:
                raise RuntimeError("Pipe is closed")
            self._text = buf
            self._changed.notify_all()

    def read(self, length: int = -1) -> Any:
        """Returns up to `length` characters or bytes, all if it is 0 or less; None at the end of a closed pipe."""
        with self._changed:
            self._changed.wait_for(lambda: self._text is not None or self._is_closed)
            if self._text is None:
                return None
            taken, rest = (self._text[:length], self._text[length:]) if length > 0 else (self._text, None)
            self._text = rest or None
            self._changed.notify_all()
            return taken

    def flush(self) -> None:
        """Does nothing: readers see a write at once."""

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
