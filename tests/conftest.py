"""`run_ranks`: a function in N real gloo processes.

Ranks are forked by a server that has torch loaded, so a world starts in well under a second. A rank that raises fails
the test with its traceback; ranks that do not finish in time have their stacks printed and are killed.
"""

import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["torch", "torch.distributed", "numpy"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_main(
    rank: int,
    size: int,
    port: int,
    stacks: str,
    outcome: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch

    from megaclass.distributed.process_group import process_group
    from megaclass.world import World

    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        torch.set_num_threads(1)
        try:
            world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=port)
            with process_group(world, device="cpu", timeout_s=60):
                outcome.send((True, function(*args)))
        except BaseException:
            outcome.send((False, traceback.format_exc()))


def _run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            receiver, sender = _forkserver.Pipe(duplex=False)
            stacks = str(Path(folder) / f"{rank}.txt")
            process = _forkserver.Process(
                target=_rank_main, args=(rank, size, port, stacks, sender, function, args), daemon=True
            )
            process.start()
            sender.close()
            ranks.append((process, receiver, stacks))
        try:
            return _outcomes(ranks, time.monotonic() + timeout_s)
        finally:
            for process, _, _ in ranks:
                process.kill()
                process.join()


def _outcomes(ranks: list[Any], deadline: float) -> list[Any]:
    open_ranks = {receiver: rank for rank, (_, receiver, _) in enumerate(ranks)}
    results: list[Any] = [None] * len(ranks)
    failures: list[str] = []
    while open_ranks and not failures:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"ranks {sorted(open_ranks.values())} did not finish in time\n{_stacks(ranks, open_ranks)}")
        # The first failure makes the others fail too: give them a moment, then show all of them, root cause included.
        for receiver in ready:
            rank = open_ranks.pop(receiver)
            try:
                succeeded, value = receiver.recv()
            except EOFError:
                ranks[rank][0].join(5)
                succeeded, value = False, f"ended without a result, exit code {ranks[rank][0].exitcode}"
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"--- rank {rank} ---\n{value}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return results


def _stacks(ranks: list[Any], open_ranks: dict[Any, int]) -> str:
    texts = []
    for rank in sorted(open_ranks.values()):
        process, _, stacks = ranks[rank]
        os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.2)
        texts.append(f"--- rank {rank}, pid {process.pid} ---\n{Path(stacks).read_text()}")
    return "\n".join(texts)


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """run_ranks(size, function, *args): results by rank; function is a module-level function."""
    return _run_ranks
