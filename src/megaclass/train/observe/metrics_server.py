"""train.metrics_port: rank 0 offers the newest metrics in Prometheus' text format, at http://ADDRESS:PORT/metrics.

Written by hand instead of with prometheus-client: the format is one line per number, and the numbers exist already as a row.
"""

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megaclass.config.schema import TrainConfig
from megaclass.errors import ConfigError
from megaclass.train.observe.trackers import SendNumbers

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_REQUEST_S = 10.0
_MAX_CALLERS = 32


class _Server(ThreadingHTTPServer):
    """Serves at most _MAX_CALLERS connections at a time, a thread each: beyond that the oldest one is dropped.

    Anyone who reaches the port may connect. Connections that are held open must neither take up rank 0's threads and files
    nor keep Prometheus out.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        # In the order of their arrival; changed by the thread that accepts and by those that answer.
        self._callers: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._callers) >= _MAX_CALLERS:
                oldest = next(iter(self._callers))
                del self._callers[oldest]
                # Its thread wakes up and closes it.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._callers[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *arguments: object) -> None:
        """A client that hangs up must not print a traceback between the lines of a run."""


@contextmanager
def metrics_served(settings: TrainConfig) -> Iterator[SendNumbers]:
    """Serves the numbers of the last row while the block runs. Raises ConfigError if the port cannot be used."""
    page = {"text": ""}

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            is_known = self.path.split("?")[0] in ("/metrics", "/")
            body = page["text"].encode() if is_known else b"The metrics are at /metrics.\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", _CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Requests are not logged: one comes every few seconds."""

    address = (settings.metrics_address, settings.metrics_port)
    try:
        server = _Server(address, Handler)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"Cannot listen at {address[0]}:{address[1]} (train.metrics_address, train.metrics_port): {reason}. "
            f"Choose another port, or train.metrics_port=0."
        ) from error
    thread = threading.Thread(target=server.serve_forever, daemon=True, name="megaclass-metrics")
    thread.start()

    def send(numbers: Mapping[str, float], step: int) -> None:
        page["text"] = prometheus_text({"step": float(step), **numbers})

    try:
        yield send
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def prometheus_text(numbers: Mapping[str, float]) -> str:
    """Returns the numbers as gauges called megaclass_NAME."""
    lines = []
    for name, value in numbers.items():
        full = "megaclass_" + _NOT_IN_NAMES.sub("_", name)
        lines += [f"# TYPE {full} gauge", f"{full} {_number(value)}"]
    return "\n".join([*lines, ""])


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))
