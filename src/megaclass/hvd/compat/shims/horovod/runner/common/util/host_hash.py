import hashlib
import os
import socket


def _hash(string: str) -> str:
    return hashlib.md5(string.encode(), usedforsecurity=False).hexdigest()


def host_hash(salt: str | None = None) -> str:
    """The same for all processes of a host, another one for each container; `salt` makes it another one again."""
    hostname = os.environ.get("CONTAINER_ID") or socket.gethostname()
    return f"{hostname.split('.')[0]}-{_hash(hostname + (f'-{salt}' if salt else ''))}"
