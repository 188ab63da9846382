"""`megaclass bench allreduce`: how fast the ranks talk, in the table of NCCL's own tests, every result checked."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import all_gather_single, gather_blocks, reduce_scatter_single
from megaclass.distributed.process_group import process_group
from megaclass.errors import ConfigError, LaunchError
from megaclass.world import World

_ELEMENT_BYTES = 4
_SETTINGS_BYTES = 1024
_PERIOD = 251
"""Values repeat with a prime period, so that a block at a wrong place does not look right by chance."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    min_bytes: int = 8
    max_bytes: int = 256 << 20
    factor: int = 2
    iterations: int = 20
    """At most so many repetitions of each size."""
    seconds_per_size: float = 2.0
    """Fewer when they would take longer than this."""
    operations: tuple[str, ...] = OPERATIONS
    backend: str = "auto"
    """auto: gloo, and nccl too where every rank has a GPU of its own."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= self.max_bytes:
            raise ConfigError(
                f"The sizes go from {self.min_bytes} to {self.max_bytes} bytes: -b must be 1 or more and not above -e."
            )
        if self.factor < 2:
            raise ConfigError(f"-f is {self.factor}; each size is so many times the one before: 2 or more.")
        if self.iterations < 1 or not self.seconds_per_size > 0:
            raise ConfigError(
                f"-n {self.iterations} and --seconds {self.seconds_per_size:g}: at least one repetition is needed."
            )
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            raise ConfigError(f"Unknown operation {unknown[0]!r}: expected {', '.join(OPERATIONS)}.")
        if self.backend not in BACKENDS:
            raise ConfigError(f"Unknown backend {self.backend!r}: expected {', '.join(BACKENDS)}.")

    def sizes(self) -> Iterator[int]:
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; the same on every rank."""

    operation: str
    backend: str
    ranks: int
    bytes: int
    """Of the whole: what all_gather yields, what reduce_scatter is given."""
    count: int
    """Elements each rank puts in."""
    time_us: float
    algorithm_gbps: float
    """Bytes by time, in 1e9 bytes a second."""
    bus_gbps: float
    """What each link carries: comparable between operations and numbers of ranks, and with the hardware's figure."""
    num_wrong: int
    """Elements with a wrong value, over all ranks."""


def parse_bytes(text: str) -> int:
    """'8' -> 8, '256M' -> 268435456; K, M and G as all_reduce_perf takes them."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text.upper())
    if match is None:
        raise ConfigError(f"Cannot read the size {text!r}: expected bytes, or for example 64K, 256M, 1G.")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def run_bench(settings: BenchSettings, world: World, *, is_json: bool) -> int:
    """Exit code: 0, or 1 when a result was wrong. Rank 0 prints."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # NCCL refuses two ranks on one GPU.
    has_gpu = world.local_size <= num_gpus and settings.backend != "gloo"
    if settings.backend == "nccl" and not has_gpu:
        seen = f"sees {num_gpus} GPU(s) for {world.local_size} ranks" if num_gpus else "sees no GPU"
        raise LaunchError(
            f"{world.name()} was asked for nccl, but torch {torch.__version__} {seen}: take --backend gloo."
        )
    rows: list[Row] = []
    with process_group(world, device="cuda" if has_gpu else "cpu") as device:
        _check_same_settings(settings, device)
        for backend, where in _backends(settings, device):
            group = dist.new_group(backend=backend)
            for operation in settings.operations:
                if world.is_main and not is_json:
                    print(_header(operation, backend, world), flush=True)
                for row in measure(settings, operation, backend, where, group):
                    rows.append(row)
                    if world.is_main and not is_json:
                        print(_line(row), flush=True)
    if world.is_main:
        print(json.dumps([asdict(row) for row in rows], indent=1) if is_json else _footer(rows), flush=True)
    return 1 if any(row.num_wrong for row in rows) else 0


def measure(
    settings: BenchSettings, operation: str, backend: str, device: torch.device, group: dist.ProcessGroup | None
) -> Iterator[Row]:
    """One row a size. Collective: every rank goes through the same sizes with the same number of repetitions."""
    for size in settings.sizes():
        trial = _TRIALS[operation](size, device, group)
        trial.call()  # the first call makes connections
        once_s = _seconds(trial.call, 1, device, group)
        repetitions = max(1, min(settings.iterations, int(settings.seconds_per_size / max(once_s, 1e-9))))
        time_s = _seconds(trial.call, repetitions, device, group)
        wrong = torch.tensor([trial.num_wrong()], dtype=torch.int64, device=device)
        dist.all_reduce(wrong, group=group)
        num_ranks = dist.get_world_size(group)
        algorithm_gbps = trial.num_bytes / time_s / 1e9
        yield Row(
            operation=operation,
            backend=backend,
            ranks=num_ranks,
            bytes=trial.num_bytes,
            count=trial.count,
            time_us=time_s * 1e6,
            algorithm_gbps=algorithm_gbps,
            bus_gbps=algorithm_gbps * bus_factor(operation, num_ranks),
            num_wrong=int(wrong),
        )


def bus_factor(operation: str, num_ranks: int) -> float:
    """Share of the data that must cross each link, however clever the algorithm: nccl-tests' PERFORMANCE.md."""
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "broadcast": 1.0}[operation]


# ---- the operations ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    num_bytes: int
    count: int
    call: Callable[[], object]
    num_wrong: Callable[[], int]
    """One more call on fresh values; how many elements of this rank's result are not what they must be."""


def _values(count: int, rank: int, device: torch.device) -> Tensor:
    """Small whole numbers: sums over ranks are exact in float32, in whatever order they are formed."""
    return ((torch.arange(count, device=device) + rank) % _PERIOD).float()


def _sum_of_values(count: int, num_ranks: int, device: torch.device) -> Tensor:
    total = torch.zeros(count, device=device)
    for rank in range(num_ranks):
        total += _values(count, rank, device)
    return total


def _elements(size: int) -> int:
    return max(1, size // _ELEMENT_BYTES)


def _all_reduce_trial(size: int, device: torch.device, group: dist.ProcessGroup | None) -> _Trial:
    count, rank, num_ranks = _elements(size), dist.get_rank(group), dist.get_world_size(group)
    # Zeros stay zeros: repeated sums of anything else would grow until they overflow.
    tensor = torch.zeros(count, device=device)

    def num_wrong() -> int:
        tensor.copy_(_values(count, rank, device))
        dist.all_reduce(tensor, group=group)
        return int((tensor != _sum_of_values(count, num_ranks, device)).sum())

    return _Trial(
        num_bytes=count * _ELEMENT_BYTES,
        count=count,
        call=lambda: dist.all_reduce(tensor, group=group),
        num_wrong=num_wrong,
    )


def _all_gather_trial(size: int, device: torch.device, group: dist.ProcessGroup | None) -> _Trial:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    count = max(1, _elements(size) // num_ranks)
    given, result = _values(count, rank, device), torch.zeros(num_ranks * count, device=device)

    def num_wrong() -> int:
        result.zero_()
        all_gather_single(result, given, group=group)
        expected = torch.cat([_values(count, other, device) for other in range(num_ranks)])
        return int((result != expected).sum())

    return _Trial(
        num_bytes=num_ranks * count * _ELEMENT_BYTES,
        count=count,
        call=lambda: all_gather_single(result, given, group=group),
        num_wrong=num_wrong,
    )


def _reduce_scatter_trial(size: int, device: torch.device, group: dist.ProcessGroup | None) -> _Trial:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    count = max(1, _elements(size) // num_ranks)
    given, result = _values(num_ranks * count, rank, device), torch.zeros(count, device=device)

    def num_wrong() -> int:
        result.zero_()
        reduce_scatter_single(result, given, group=group)
        expected = _sum_of_values(num_ranks * count, num_ranks, device)[rank * count : (rank + 1) * count]
        return int((result != expected).sum())

    return _Trial(
        num_bytes=num_ranks * count * _ELEMENT_BYTES,
        count=num_ranks * count,
        call=lambda: reduce_scatter_single(result, given, group=group),
        num_wrong=num_wrong,
    )


def _broadcast_trial(size: int, device: torch.device, group: dist.ProcessGroup | None) -> _Trial:
    count, rank = _elements(size), dist.get_rank(group)
    tensor = _values(count, rank, device)

    def num_wrong() -> int:
        tensor.copy_(_values(count, rank, device))
        dist.broadcast(tensor, src=0, group=group)
        return int((tensor != _values(count, 0, device)).sum())

    return _Trial(
        num_bytes=count * _ELEMENT_BYTES,
        count=count,
        call=lambda: dist.broadcast(tensor, src=0, group=group),
        num_wrong=num_wrong,
    )


_TRIALS: dict[str, Callable[[int, torch.device, dist.ProcessGroup | None], _Trial]] = {
    "all_reduce": _all_reduce_trial,
    "all_gather": _all_gather_trial,
    "reduce_scatter": _reduce_scatter_trial,
    "broadcast": _broadcast_trial,
}


def _seconds(
    call: Callable[[], object], repetitions: int, device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Mean time of a call on the slowest rank; the same number on every rank, which therefore all repeat alike."""
    dist.barrier(group=group)
    begun = time.perf_counter()
    for _ in range(repetitions):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mean = torch.tensor([(time.perf_counter() - begun) / repetitions], dtype=torch.float64, device=device)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX, group=group)
    return float(mean)


def _backends(settings: BenchSettings, device: torch.device) -> list[tuple[str, torch.device]]:
    on_gpu = [("nccl", device)] if device.type == "cuda" else []
    return on_gpu if settings.backend == "nccl" else [*on_gpu, ("gloo", torch.device("cpu"))]


def _check_same_settings(settings: BenchSettings, device: torch.device) -> None:
    """Collectives of different sizes would hang, or give wrong numbers in silence. One all-gather of 1 KiB per rank."""
    text = str(settings).encode().ljust(_SETTINGS_BYTES)[:_SETTINGS_BYTES]
    blocks_W = gather_blocks(torch.tensor(list(text), dtype=torch.uint8, device=device), None).cpu()
    everybody = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in blocks_W]
    others = [rank for rank, theirs in enumerate(everybody) if theirs != everybody[0]]
    if others:
        raise LaunchError(
            f"Ranks were started with different options: rank 0 has {everybody[0]}, rank {others[0]} has "
            f"{everybody[others[0]]}. Start all of them with the same command line."
        )


# ---- the table ----


def _header(operation: str, backend: str, world: World) -> str:
    hosts = f"{world.cross_size} host{'s' if world.cross_size > 1 else ''}"
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    return (
        f"\n# {operation}, {backend}, {ranks} on {hosts}\n"
        f"#{'size':>11}{'count':>13}{'type':>8}{'redop':>8}{'root':>6}{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}\n"
        f"#{'(B)':>11}{'(elements)':>13}{'':>8}{'':>8}{'':>6}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}"
    )


def _line(row: Row) -> str:
    reduction = "sum" if "reduce" in row.operation else "none"
    root = 0 if row.operation == "broadcast" else -1
    return (
        f" {row.bytes:>11}{row.count:>13}{'float':>8}{reduction:>8}{root:>6}"
        f"{row.time_us:>11.1f}{row.algorithm_gbps:>9.3f}{row.bus_gbps:>9.3f}{row.num_wrong:>8}"
    )


def _footer(rows: list[Row]) -> str:
    num_wrong = sum(row.num_wrong for row in rows)
    mean = sum(row.bus_gbps for row in rows) / len(rows)
    verdict = "OK" if num_wrong == 0 else "WRONG: these ranks must not train; look at network, driver and memory"
    return f"\n# Wrong values      : {num_wrong} {verdict}\n# Avg bus bandwidth : {mean:.4f}"


def warn_of_one_rank(world: World) -> None:
    if world.size == 1:
        print(
            "megaclass: one rank has nobody to talk to. Start several: megaclass run -np 2 megaclass bench allreduce",
            file=sys.stderr,
        )
