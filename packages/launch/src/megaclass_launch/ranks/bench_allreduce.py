"""`megaclass bench allreduce`: measures collectives in the table format of nccl-tests and checks every result."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass_launch.errors import ConfigError, LaunchError
from megaclass_launch.ranks.collectives import all_gather_single, gather_blocks, reduce_scatter_single
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

_log = logging.getLogger("megaclass.bench")

_ELEMENT_BYTES = 4
_SETTINGS_BYTES = 1024
_PERIOD = 251
"""Values repeat with a prime period, so that a block at the wrong position does not look right by chance."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """Sizes, operations and backend to measure."""

    min_bytes: int = 8
    max_bytes: int = 256 << 20
    factor: int = 2
    iterations: int = 20
    """Largest number of repetitions per size."""
    seconds_per_size: float = 2.0
    """Sizes are repeated less often if the repetitions would take longer than this."""
    operations: tuple[str, ...] = OPERATIONS
    backend: str = "auto"
    """auto: gloo, and also nccl if every rank has its own GPU."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= self.max_bytes:
            raise ConfigError(
                f"The sizes go from {self.min_bytes} to {self.max_bytes} bytes: -b must be at least 1 and at most -e."
            )
        if self.factor < 2:
            raise ConfigError(f"-f is {self.factor}, the factor between a size and the next one: expected 2 or more.")
        if self.iterations < 1 or not self.seconds_per_size > 0:
            raise ConfigError(
                f"-n {self.iterations} and --seconds {self.seconds_per_size:g}: at least one repetition is needed."
            )
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            raise ConfigError(f"Unknown operation {unknown[0]!r}: expected {', '.join(OPERATIONS)}.")
        if self.backend not in BACKENDS:
            raise ConfigError(f"Unknown backend {self.backend!r}: expected {', '.join(BACKENDS)}.")

    def sizes(self) -> Iterator[int]:
        """Yields the sizes in bytes."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; equal on every rank."""

    operation: str
    backend: str
    ranks: int
    bytes: int
    """Size of the whole tensor: the output of all_gather, the input of reduce_scatter."""
    count: int
    """Number of elements that each rank contributes."""
    time_us: float
    algorithm_gbps: float
    """Bytes divided by time, in 1e9 bytes per second."""
    bus_gbps: float
    """Bandwidth that each link carries: comparable between operations, numbers of ranks and with the hardware's figure."""
    num_wrong: int
    """Number of elements with a wrong value, over all ranks."""


def parse_bytes(text: str) -> int:
    """Parses a size as all_reduce_perf does: '8' -> 8, '256M' -> 268435456, with the units K, M and G."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text.upper())
    if match is None:
        raise ConfigError(f"Cannot read the size {text!r}: expected bytes, or for example 64K, 256M, 1G.")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def run_bench(settings: BenchSettings, world: World, *, is_json: bool) -> int:
    """Measures and prints on rank 0; returns the exit code: 0, or 1 if a result was wrong."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # NCCL refuses two ranks on one GPU. A rank that sees one GPU of its host may have it for itself.
    may_have_gpu = world.local_size <= num_gpus or (num_gpus == 1 and settings.backend == "nccl")
    has_gpu = may_have_gpu and settings.backend != "gloo"
    if settings.backend == "nccl" and not has_gpu:
        seen = f"sees {num_gpus} GPU(s) for {world.local_size} ranks" if num_gpus else "sees no GPU"
        raise LaunchError(
            f"{world.name()} was asked for nccl, but torch {torch.__version__} {seen}: use --backend gloo."
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
    """Yields one row per size. Collective: every rank measures the same sizes with the same number of repetitions."""
    for size in settings.sizes():
        trial = _trial(operation, size, device, group)
        trial.call()  # the first call opens connections
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
    """Returns the share of the data that must cross each link with any algorithm (nccl-tests' PERFORMANCE.md)."""
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "broadcast": 1.0}[operation]


# ---- the operations ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """One operation with its tensors, ready to be called."""

    num_bytes: int
    count: int
    call: Callable[[], object]
    num_wrong: Callable[[], int]
    """Calls the operation once more on new values; returns the number of wrong elements in this rank's result."""


def _values(count: int, rank: int, device: torch.device) -> Tensor:
    """Returns small integers, whose sums over ranks are exact in float32 in any order."""
    return ((torch.arange(count, device=device) + rank) % _PERIOD).float()


def _sum_of_values(count: int, num_ranks: int, device: torch.device) -> Tensor:
    total = torch.zeros(count, device=device)
    for rank in range(num_ranks):
        total += _values(count, rank, device)
    return total


def _elements(size: int) -> int:
    return max(1, size // _ELEMENT_BYTES)


def _trial(operation: str, size: int, device: torch.device, group: dist.ProcessGroup | None) -> _Trial:
    """Returns the operation on a tensor of about `size` bytes, in which every rank has values of its own."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    count = _elements(size)
    # The whole tensor consists of a block per rank where an operation gathers or scatters.
    block = max(1, count // num_ranks)
    whole = {"all_gather": num_ranks * block, "reduce_scatter": num_ranks * block}.get(operation, count)
    num_given = block if operation == "all_gather" else whole
    result = torch.zeros(block if operation == "reduce_scatter" else whole, device=device)
    given = _values(num_given, rank, device) if operation in ("all_gather", "reduce_scatter") else result

    def call() -> None:
        if operation == "all_reduce":
            # Zeros stay zeros; repeated sums of other numbers would grow until they overflow.
            dist.all_reduce(result, group=group)
        elif operation == "all_gather":
            all_gather_single(result, given, group=group)
        elif operation == "reduce_scatter":
            reduce_scatter_single(result, given, group=group)
        else:
            dist.broadcast(result, src=0, group=group)

    def num_wrong() -> int:
        if operation == "all_gather":
            expected = torch.cat([_values(block, other, device) for other in range(num_ranks)])
        elif operation == "broadcast":
            expected = _values(whole, 0, device)
        else:
            expected = _sum_of_values(whole, num_ranks, device)
            expected = expected[rank * block : (rank + 1) * block] if operation == "reduce_scatter" else expected
        result.copy_(_values(whole, rank, device)) if given is result else result.zero_()
        call()
        return int((result != expected).sum())

    return _Trial(num_bytes=whole * _ELEMENT_BYTES, count=num_given, call=call, num_wrong=num_wrong)


def _seconds(
    call: Callable[[], object], repetitions: int, device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Returns the mean time of a call on the slowest rank; equal on all ranks, so that all choose the same repetitions."""
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
    """Raises LaunchError if ranks differ in their settings, and would hang or compute nonsense. All-gathers 1 KiB per rank."""
    text = str(settings).encode().ljust(_SETTINGS_BYTES)[:_SETTINGS_BYTES]
    blocks_W = gather_blocks(torch.tensor(list(text), dtype=torch.uint8, device=device), None).cpu()
    settings_W = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in blocks_W]
    others = [rank for rank, theirs in enumerate(settings_W) if theirs != settings_W[0]]
    if others:
        raise LaunchError(
            f"Ranks were started with different options: rank 0 has {settings_W[0]}, rank {others[0]} has "
            f"{settings_W[others[0]]}. Start all of them with the same command line."
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
    verdict = "OK" if num_wrong == 0 else "WRONG: do not train on these hosts; check network, driver and memory"
    return f"\n# Wrong values      : {num_wrong} {verdict}\n# Avg bus bandwidth : {mean:.4f}"


def warn_of_one_rank(world: World) -> None:
    """Warns if there is only one rank, so that nothing can be measured."""
    if world.size == 1:
        _log.warning("a single rank sends nothing. Start several: megaclass run -np 2 megaclass bench allreduce")
