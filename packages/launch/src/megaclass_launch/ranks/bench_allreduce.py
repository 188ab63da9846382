"""`bench allreduce`: the time and bandwidth of all-reduce by size, in the words of nccl-tests, with every result checked.

It tells whether the network is as fast as it should be and computes rightly. For other collectives there is nccl-tests.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass_launch.errors import ConfigError, LaunchError
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

_log = logging.getLogger("megaclass.bench")

_ELEMENT_BYTES = 4
_PERIOD = 251
"""Values repeat with a prime period, so a block at the wrong position does not look right by chance."""
_REPETITIONS = 20
_SECONDS_PER_SIZE = 2.0
"""Sizes are repeated less often if the repetitions would take longer than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; equal on every rank."""

    backend: str
    ranks: int
    bytes: int
    time_us: float
    algorithm_gbps: float
    """Bytes divided by time, in 1e9 bytes per second."""
    bus_gbps: float
    """Bandwidth that each link carries: comparable between numbers of ranks and with the hardware's figure."""
    num_wrong: int
    """Number of elements with a wrong value, over all ranks."""


def sizes_between(first: int, last: int, factor: int) -> list[int]:
    """Returns the sizes to measure, in bytes."""
    if not 1 <= first <= last:
        raise ConfigError(f"The sizes go from {first} to {last} bytes: -b must be at least 1 and at most -e.")
    if factor < 2:
        raise ConfigError(f"-f is {factor}, the factor between a size and the next one: expected 2 or more.")
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def run_bench(sizes: Sequence[int], backend: str, world: World, *, is_json: bool) -> int:
    """Measures and prints on rank 0; returns the exit code: 0, or 1 if a result was wrong.

    backend: gloo, nccl, or auto, which is gloo, and also nccl if every rank has its own GPU.
    """
    if world.size == 1:
        _log.warning("a single rank sends nothing: start this command with two ranks or more.")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # NCCL refuses two ranks on one GPU. A rank that sees one GPU of its host may have it for itself.
    may_have_gpu = world.local_size <= num_gpus or (num_gpus == 1 and backend == "nccl")
    has_gpu = may_have_gpu and backend != "gloo"
    if backend == "nccl" and not has_gpu:
        seen = f"sees {num_gpus} GPU(s) for {world.local_size} ranks" if num_gpus else "sees no GPU"
        raise LaunchError(
            f"{world.name()} was asked for nccl, but torch {torch.__version__} {seen}: use --backend gloo."
        )
    rows: list[Row] = []
    shows_table = world.is_main and not is_json
    with process_group(world, device="cuda" if has_gpu else "cpu") as device:
        on_gpu = [("nccl", device)] if has_gpu else []
        for name, where in on_gpu if backend == "nccl" else [*on_gpu, ("gloo", torch.device("cpu"))]:
            if shows_table:
                print(_header(name, world), flush=True)
            for row in measure(sizes, name, where, dist.new_group(backend=name)):
                rows.append(row)
                if shows_table:
                    print(_line(row), flush=True)
    num_wrong = sum(row.num_wrong for row in rows)
    if shows_table:
        verdict = "OK" if num_wrong == 0 else "WRONG: do not train on these hosts; check network, driver and memory"
        print(f"\n# Wrong values: {num_wrong} {verdict}", flush=True)
    elif world.is_main:
        print(json.dumps([asdict(row) for row in rows], indent=1), flush=True)
    return 1 if num_wrong else 0


def measure(sizes: Sequence[int], backend: str, device: torch.device, group: dist.ProcessGroup | None) -> Iterator[Row]:
    """Yields one row per size. Collective: every rank measures the same sizes with the same number of repetitions."""
    num_ranks = dist.get_world_size(group)
    for size in sizes:
        # Zeros stay zeros; repeated sums of other numbers would grow until they overflow.
        numbers = torch.zeros(max(1, size // _ELEMENT_BYTES), device=device)
        dist.all_reduce(numbers, group=group)  # the first call opens connections
        once_s = _seconds(numbers, 1, group)
        time_s = _seconds(numbers, max(1, min(_REPETITIONS, int(_SECONDS_PER_SIZE / max(once_s, 1e-9)))), group)
        wrong = torch.tensor([_num_wrong(numbers, group)], dtype=torch.int64, device=device)
        dist.all_reduce(wrong, group=group)
        algorithm_gbps = numbers.nbytes / time_s / 1e9
        yield Row(
            backend=backend,
            ranks=num_ranks,
            bytes=numbers.nbytes,
            time_us=time_s * 1e6,
            algorithm_gbps=algorithm_gbps,
            # With any algorithm this share of the data must cross each link, twice (nccl-tests' PERFORMANCE.md).
            bus_gbps=algorithm_gbps * 2 * (num_ranks - 1) / num_ranks,
            num_wrong=int(wrong),
        )


def _seconds(numbers: Tensor, repetitions: int, group: dist.ProcessGroup | None) -> float:
    """Returns the mean time of a call on the slowest rank; equal on all ranks, so all choose the same repetitions."""
    dist.barrier(group=group)
    begun = time.perf_counter()
    for _ in range(repetitions):
        dist.all_reduce(numbers, group=group)
    if numbers.is_cuda:
        torch.cuda.synchronize(numbers.device)
    mean = torch.tensor([(time.perf_counter() - begun) / repetitions], dtype=torch.float64, device=numbers.device)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX, group=group)
    return float(mean)


def _num_wrong(numbers: Tensor, group: dist.ProcessGroup | None) -> int:
    """Sums different numbers of all ranks once and returns how many of this rank's results are wrong."""

    def values(rank: int) -> Tensor:
        # Small integers, whose sums over ranks are exact in float32 in any order.
        return ((torch.arange(len(numbers), device=numbers.device) + rank) % _PERIOD).float()

    expected = torch.zeros_like(numbers)
    for rank in range(dist.get_world_size(group)):
        expected += values(rank)
    numbers.copy_(values(dist.get_rank(group)))
    dist.all_reduce(numbers, group=group)
    num_wrong = int((numbers != expected).sum())
    numbers.zero_()
    return num_wrong


def _header(backend: str, world: World) -> str:
    hosts = f"{world.cross_size} host{'s' if world.cross_size > 1 else ''}"
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    return (
        f"\n# all_reduce of float32, {backend}, {ranks} on {hosts}\n"
        f"#{'size':>11}{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}\n"
        f"#{'(B)':>11}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}"
    )


def _line(row: Row) -> str:
    return f" {row.bytes:>11}{row.time_us:>11.1f}{row.algorithm_gbps:>9.3f}{row.bus_gbps:>9.3f}{row.num_wrong:>8}"
