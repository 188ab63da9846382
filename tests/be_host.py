"""`be_host`: lets several ranks share a GPU. Imports nothing else, so a rank can call it before it loads torch."""

import ctypes
import os
import socket


def be_host(number: int) -> None:
    """Make this process look like a host of its own with one GPU.

    NCCL refuses two ranks of one host on one GPU, and tells hosts apart by NCCL_HOSTID. Root also gets a host name of its own,
    for what looks at host names.
    """
    names = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    os.environ.update(names, NCCL_HOSTID=f"h{number}")
    clone_newuts = 0x04000000
    if ctypes.CDLL(None).unshare(clone_newuts) == 0:
        socket.sethostname(f"h{number}")
