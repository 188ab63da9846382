"""A file with results of checks that need not be repeated for a while."""

import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaclass.files import write_text


class Cache:
    """Values by key that expire after some minutes or when the parameters change. An unreadable file counts as empty."""

    def __init__(self, cache_folder: str, cache_staleness_threshold_minutes: float, parameters_hash: str) -> None:
        self._file = Path(cache_folder) / "cache.json"
        self._staleness_s = cache_staleness_threshold_minutes * 60
        self._parameters_hash = parameters_hash
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {}
        try:
            known = json.loads(self._file.read_text())
            if known["parameters_hash"] == parameters_hash:
                self._content = dict(known["values"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def get(self, key: Any) -> Any:
        """Returns the value; None if there is none or it has expired."""
        with self._lock:
            since, value = self._content.get(str(key), (0.0, None))
            return value if time.time() - since < self._staleness_s else None

    def put(self, key: Any, val: Any) -> None:
        with self._lock:
            self._content[str(key)] = (time.time(), val)
            text = json.dumps({"parameters_hash": self._parameters_hash, "values": self._content})
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, text)


def use_cache() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function whose callers may pass `fn_cache`, a Cache from which results are taken."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, fn_cache: Cache | None = None, **kwargs: Any) -> Any:
            if fn_cache is None:
                return function(*args, **kwargs)
            key = f"{function.__name__} {args} {sorted(kwargs.items())}"
            found = fn_cache.get(key)
            if found is None:
                found = function(*args, **kwargs)
                fn_cache.put(key, found)
            return found

        return call

    return decorated
