"""The program of each rank of run(): receives the function, calls it and sends back its result."""

import multiprocessing.spawn
import os
import pickle
import socket
import sys
import threading
import traceback
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

from megaclass.errors import LaunchError
from megaclass.hvd.pickling import pickled
from megaclass.hvd.run_function import FUNCTION_SERVER

_CONNECT_S = 5.0
_NUM_ROUNDS = 3


def main() -> int:
    """Returns the exit code: 0 if the function returned, 1 if it raised."""
    connection = _connected()
    place, call = pickle.loads(connection.recv_bytes())
    # Before the function is unpickled: its module may be on the caller's path only.
    _take_over(place)
    threading.Thread(target=_end_with, args=(connection,), name="lifeline", daemon=True).start()
    succeeded, value = False, ""
    try:
        func, args, kwargs = pickle.loads(call)
        value = func(*args, **kwargs)
        answer = pickled((int(os.environ["HOROVOD_RANK"]), True, value), "the result")
        succeeded = True
    except BaseException:
        traceback.print_exc()
        answer = pickle.dumps((int(os.environ["HOROVOD_RANK"]), False, traceback.format_exc()))
    connection.send_bytes(answer)
    # Leave only when the caller has the result: a process that ends closes the connection under it.
    _is_received.wait()
    return 0 if succeeded else 1


_is_received = threading.Event()


def _connected() -> Connection:
    *addresses, port, key = os.environ.pop(FUNCTION_SERVER).split()
    # If the caller's own addresses are not reachable (NAT), it may be reached where the ssh connection came from.
    came_from = os.environ.get("SSH_CONNECTION", "").split()[:1]
    # Several rounds: foreign connections may fill the caller's backlog, from which they are dropped after some seconds.
    for address in _NUM_ROUNDS * [*addresses, *came_from]:
        try:
            # Client() has no timeout and would wait minutes for a host that does not answer.
            socket.create_connection((address, int(port)), _CONNECT_S).close()
            return Client((address, int(port)), authkey=bytes.fromhex(key))
        except (OSError, EOFError, AuthenticationError):
            continue
    raise LaunchError(
        f"{socket.gethostname()} cannot reach the process that called run() at {', '.join(addresses)}, port {port}: "
        f"let it through the firewall, or name another interface with network_interfaces."
    )


def _take_over(place: dict[str, Any]) -> None:
    """Takes over the caller's sys.path and arguments, and imports its main script if functions were pickled by name."""
    place["sys_path"] = [*sys.path, *[folder for folder in place["sys_path"] if folder not in sys.path]]
    multiprocessing.spawn.prepare(place)


def _end_with(connection: Connection) -> None:
    """Ends this process when the caller is gone; any message means that the caller has the result."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    _is_received.set()


if __name__ == "__main__":
    sys.exit(main())
