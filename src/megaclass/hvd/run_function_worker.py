"""What every rank of run() executes: asks for the function, calls it, sends what it returned."""

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
    connection = _connected()
    place, call = pickle.loads(connection.recv_bytes())
    _take(place)
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
    _taken.wait()
    return 0 if succeeded else 1


_taken = threading.Event()


def _connected() -> Connection:
    *addresses, port, key = os.environ.pop(FUNCTION_SERVER).split()
    # Behind an address of its own the caller is where the ssh connection came from.
    came_from = os.environ.get("SSH_CONNECTION", "").split()[:1]
    # Strangers may have filled the caller's queue, which is emptied every few seconds.
    for address in _NUM_ROUNDS * [*addresses, *came_from]:
        try:
            # Client() itself would wait minutes for a host that is not there.
            socket.create_connection((address, int(port)), _CONNECT_S).close()
            return Client((address, int(port)), authkey=bytes.fromhex(key))
        except (OSError, EOFError, AuthenticationError):
            continue
    raise LaunchError(
        f"{socket.gethostname()} cannot reach the process that called run() at {', '.join(addresses)}, port {port}: "
        f"let it through the firewall, or name another interface with network_interfaces."
    )


def _take(place: dict[str, Any]) -> None:
    """The caller's path and arguments; its main script too, where functions were pickled by name."""
    place["sys_path"] = [*sys.path, *[folder for folder in place["sys_path"] if folder not in sys.path]]
    multiprocessing.spawn.prepare(place)


def _end_with(connection: Connection) -> None:
    """Nobody waits for the result of a caller that is gone."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    _taken.set()


if __name__ == "__main__":
    sys.exit(main())
