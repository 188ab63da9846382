"""Reads the stacks that Python's faulthandler writes, and says in words where a thread is."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from megaclass_launch import rank_status

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
# Files of other packages and of Python's library: the place that interests the reader is the one that called them.
_LIBRARY = re.compile(r"/(site-packages|dist-packages)/|/lib/python3\.\d+/")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: str
    function: str
    own_path: str = ""
    """Path inside the folder of the rank's package, such as "data/loader.py"; empty for all other files."""

    @property
    def is_library(self) -> bool:
        return not self.own_path and bool(_LIBRARY.search(self.file) or self.file.startswith("<frozen"))

    def waits(self, what: Callable[..., object]) -> bool:
        """Returns whether this is one of the functions of rank_status that say what a thread waits for."""
        return self.function == what.__name__ and self.file.endswith("/rank_status.py")

    def shown(self) -> str:
        """Returns a short place: inside the rank's package "data/loader.py:142", elsewhere the last two parts of the path."""
        path = self.own_path or "/".join(PurePosixPath(self.file).parts[-2:]).lstrip("/")
        return f"{path}:{self.line}"


Thread = list[Frame]
"""Frames of one thread, the innermost first."""


def threads_of(stacks: str, package: str) -> dict[int, Thread]:
    """Returns the frames of each thread by its identifier, in the order of the text: the main thread is the last.

    package: the folder of the package that the process runs. Folders of a user may have the same name.
    """
    threads: dict[int, Thread] = {}
    current: Thread = []
    for line in stacks.splitlines():
        if match := _THREAD.match(line):
            current = threads.setdefault(int(match[1], 16), [])
        elif match := _FRAME.match(line):
            file = match[1]
            own_path = file.removeprefix(f"{package}/") if package and file.startswith(f"{package}/") else ""
            current.append(Frame(file, match[2], match[3], own_path))
    return threads


def main_thread_of(threads: dict[int, Thread], identifier: int) -> Thread:
    """Returns the main thread's frames; without its identifier, which other programs do not tell, the last thread's."""
    if identifier in threads:
        return threads[identifier]
    return next(reversed(threads.values()), [])


def collective_of(thread: Thread) -> str:
    """Returns the collective in which a thread waits, such as "all_gather"; empty if it is in none."""
    inner = thread[:8]
    for index, frame in enumerate(inner):
        if frame.file.endswith("torch/distributed/distributed_c10d.py"):
            # Of nested ones the outermost is what the program called: barrier, all_gather_object.
            outer = [f.function for f in inner[index:] if f.file.endswith("torch/distributed/distributed_c10d.py")]
            return _plain(outer[-1])
        if not frame.is_library:
            break
    return "backward, which averages the gradients" if inner and inner[0].function == "_engine_run_backward" else ""


def waits_for_ranks(thread: Thread) -> bool:
    """Tells whether the thread says that it waits for other ranks."""
    return any(frame.waits(rank_status.wait_for_ranks) for frame in thread)


def waits_for_gpu(thread: Thread) -> bool:
    """Tells whether the thread waits for its GPU: for queued work, which may contain a collective."""
    if thread and thread[0].function == "synchronize" and "/torch/cuda/" in thread[0].file:
        return True
    return any(frame.waits(rank_status.wait_for_gpu) for frame in thread)


def place_of(thread: Thread) -> Frame | None:
    """Returns the innermost frame that is not a library's, or the innermost one if all are."""
    return next((frame for frame in thread if not frame.is_library), thread[0] if thread else None)


def waits_for_other_thread(thread: Thread) -> bool:
    """Tells whether a thread waits for another one of its process, as the loop waits for the threads that read images."""
    names = ("threading.py", "concurrent/futures/_base.py", "queue.py", "concurrent/futures/thread.py")
    return bool(thread) and thread[0].file.endswith(names)


def waits_for_helper(thread: Thread) -> bool:
    """Tells whether a thread waits for a process that the rank has started, such as a loader."""
    return any(frame.waits(rank_status.wait_for_helper) for frame in thread)


def busy_thread(threads: Sequence[Thread]) -> Thread:
    """Returns the thread for whose result the main thread waits; empty if there is none.

    That is one that runs code of the rank's package, a reader of images for example.
    """
    for thread in threads:
        if not waits_for_other_thread(thread) and any(frame.own_path for frame in thread):
            return thread
    return []


def _plain(function: str) -> str:
    """Names of torch's functions without the endings that tell how tensors are passed."""
    for ending in ("_into_tensor", "_tensor", "_single", "_coalesced"):
        function = function.removesuffix(ending)
    return function
