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

tests/distributed/test_gloo_exit.py repeats the measurement (mark `soak`).
"""

import atexit
import functools
import gc
import time
from pathlib import Path

import torch.distributed as dist

_THREADS_END_S = 0.2
"""Releasing takes microseconds. Threads that are still there then are idle, or wait for a rank that does not answer."""


@functools.cache
def end_gloo_at_exit() -> None:
    """Makes this process end gloo before it finalises. For scripts that make their own groups and may not destroy them."""
    atexit.register(end_gloo)


def end_gloo() -> None:
    """Destroys the default group if it is gloo's and still there, then waits until gloo's threads have ended or are idle."""
    # A group of NCCL stays: destroying it would wait for the GPU, and its threads hold no Python objects.
    if dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:
        dist.destroy_process_group()
    if _has_gloo_threads():
        # A DistributedDataParallel that is garbage already may be part of a cycle, and keeps the group until it is collected.
        gc.collect()
    ends_at = time.monotonic() + _THREADS_END_S
    while _has_gloo_threads() and time.monotonic() < ends_at:
        time.sleep(0.01)


def _has_gloo_threads() -> bool:
    try:
        return any(file.read_text().startswith("pt_gloo_runloop") for file in Path("/proc/self/task").glob("*/comm"))
    except OSError:
        # A thread ended while its name was read, or this process has no free file: assume that threads are left.
        return True
