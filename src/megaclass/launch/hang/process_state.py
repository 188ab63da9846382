"""The kernel's view of a process that may hang: whether it is stopped, and what its threads wait for."""

import contextlib
import platform
from pathlib import Path

# Numbers of the system calls in which programs wait, by machine; the first argument of those in _OF_FILES is a descriptor.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 16: "ioctl", 17: "pread", 18: "pwrite",
        19: "readv", 20: "writev", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
        45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync",
        202: "futex", 217: "getdents", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat",
        262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 295: "preadv", 332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 61: "getdents", 63: "read", 64: "write",
        65: "readv", 66: "writev", 67: "pread", 68: "pwrite", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat",
        82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 203: "connect",
        206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4", 291: "statx",
    },
}  # fmt: skip
_OF_FILES = {
    *(
        "read",
        "write",
        "pread",
        "pwrite",
        "readv",
        "writev",
        "preadv",
        "fstat",
        "flock",
        "fsync",
        "fdatasync",
        "getdents",
    ),
    *("fcntl", "ioctl", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept"),
}
ASLEEP = ("nanosleep", "clock_nanosleep", "pause")
_WAITS_FOR_FILE = ("read", "pread", "readv", "preadv", "open", "openat", "stat", "lstat", "fstat", "newfstatat", "statx",
                   "getdents", "flock", "fcntl", "fsync", "fdatasync", "write", "pwrite", "writev")  # fmt: skip


def state_of(pid: int) -> str:
    """Returns the state letter of a process (T: stopped, D: waits in the kernel, Z: ended), or an empty text if it is gone."""
    try:
        # The name in parentheses before the state may itself contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def children_of(pid: int) -> list[int]:
    """Returns the processes that a process has started and that still run; none if the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return sorted(found)


def system_call(pid: int, thread: int) -> str:
    """Returns what a thread waits for, such as "read of /data/train.rec" or "futex"; empty if it runs or cannot be asked."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    except OSError:
        return ""
    # "running", or -1 for a thread that is in no system call.
    if len(fields) < 2 or not fields[0].isdecimal():
        return ""
    name = _CALLS.get(platform.machine(), {}).get(int(fields[0]), f"system call {fields[0]}")
    if name not in _OF_FILES:
        return name
    with contextlib.suppress(OSError, ValueError):
        return f"{name} of {Path(f'/proc/{pid}/fd/{int(fields[1], 16)}').readlink()}"
    return name


def main_thread_waits_for(pid: int) -> str:
    """Describes what the main thread does: the system call in which it waits, or that it computes."""
    call = system_call(pid, pid)
    return call or ("running on the CPU" if state_of(pid) == "R" else "")


def file_wait(pid: int) -> str:
    """Returns the file operation in which some other thread waits, a reader thread for example; empty if there is none."""
    try:
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return ""
    for thread in sorted(threads):
        call = system_call(pid, thread) if thread != pid else ""
        name, _, target = call.partition(" of ")
        # Libraries keep threads that wait for events in sockets, pipes and the like; those are idle.
        if name in _WAITS_FOR_FILE and not target.startswith(("socket:", "anon_inode:", "pipe:")):
            return call
    return ""
