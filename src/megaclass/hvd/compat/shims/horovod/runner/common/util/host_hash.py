import hashlib
import os
import socket


def _hash(string: str) -> str:
    return hashlib.md5(string.encode(), usedforsecurity=False).hexdigest()


def host_hash(salt: str | None = None) -> str:
    """Returns a text that is equal for all processes of a host or container and depends on `salt`."""
    hostname = os.environ.get("CONTAINER_ID") or socket.gethostname()
    return f"{hostname.split('.')[0]}-{_hash(hostname + (f'-{salt}' if salt else ''))}"
