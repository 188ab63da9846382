"""Ends gloo's worker threads before the interpreter finalises, which otherwise aborts some processes after a good run.

The symptom is "terminate called without an active exception" and exit code -6. The cause, from the backtrace of a core dump:

    ProcessGroupGloo::runLoop -> ~AsyncAllreduceWork -> TensorImpl::decref_pyobject -> gil_scoped_acquire -> take_gil
    -> PyThread_exit_thread -> pthread_exit -> _Unwind_ForcedUnwind -> std::terminate -> abort

`wait()` of an operation returns before the worker thread releases the operation. If the thread then holds the last reference
to a tensor, it needs the GIL to release the tensor's Python object. Python, while it finalises, ends every thread that asks
for the GIL with pthread_exit, and the forced unwinding meets a C++ destructor that must not throw.

So the threads have to be done while Python still hands out the GIL: in a function registered with atexit at the latest.
Destroying the group joins its threads. Where something else still refers to the group (DistributedDataParallel in a global
variable does), the threads stay but become idle, because waiting here leaves them the GIL to release what they hold.

A DistributedDataParallel that is garbage must not be collected before that: its C++ part destroys the group while this thread
holds the GIL, and joining a thread that waits for the GIL never ends.

tests/launch/ranks/test_gloo_exit.py repeats both measurements.
"""

import atexit
import functools
import gc
import time
from pathlib import Path

import torch.distributed as dist

_THREADS_END_S = 0.2
"""Releasing takes microseconds. Threads that are still busy then wait for a core, or for a rank that does not answer."""
_SLEEPING = "S"


@functools.cache
def end_gloo_at_exit() -> None:
    """Makes this process end gloo before it finalises. For scripts that make their own groups and may not destroy them."""
    atexit.register(end_gloo)


def end_gloo() -> None:
    """Destroys the default group if it is gloo's and still there, then waits until gloo's threads have ended or are idle."""
    # A group of NCCL stays: destroying it would wait for the GPU, and its threads hold no Python objects.
    if dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:
        dist.destroy_process_group()
    if _wait_until_idle():
        # A DistributedDataParallel that is garbage already may be part of a cycle, and keeps the group until it is collected.
        gc.collect()


def _wait_until_idle() -> bool:
    """Waits for gloo's threads without holding the GIL; returns whether there are some, and all of them are idle.

    A thread that sleeps at two looks in a row, between which it could have had the GIL, has released what it held.
    """
    num_idle_looks = 0
    ends_at = time.monotonic() + _THREADS_END_S
    while states := _states_of_gloo_threads():
        num_idle_looks = num_idle_looks + 1 if set(states) == {_SLEEPING} else 0
        if num_idle_looks == 2:
            return True
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)
    return False


def _states_of_gloo_threads() -> list[str]:
    """Returns the kernel's letter for the state of each of gloo's threads."""
    states = []
    for folder in Path("/proc/self/task").glob("*"):
        try:
            if (folder / "comm").read_text().startswith("pt_gloo_runloop"):
                # The name before it, in brackets, may contain anything.
                states.append((folder / "stat").read_text().rpartition(")")[2].split()[0])
        except FileNotFoundError:
            continue  # it has ended
        except OSError:
            states.append("?")  # this process has no free file: assume that threads are left
    return states
