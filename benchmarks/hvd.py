"""megaclass.hvd against plain torch.distributed, in the same processes and the same minutes.

    python benchmarks/hvd.py [--pairs 15] [--write benchmarks/hvd.md]

Two ranks, gloo, float32, one thread each. Each figure is the median over alternating pairs (plain, hvd, plain, hvd, …) of
the ratio of their times, with the 95 % interval of that median by order statistics: a machine that is busy with other
things slows both halves of a pair. Targets are those of the project's issue on Horovod's API.
"""

import argparse
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megaclass.hvd as hvd
from megaclass.world import World, environment_of

SIZES = [("4 KB", 1024, 40, 2.0), ("1 MiB", 256 * 1024, 15, 1.3), ("64 MiB", 16 * 1024 * 1024, 1, 1.1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--write", type=Path, help="file for the table")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(start_ranks(2))
    torch.set_num_threads(1)
    hvd.init()
    plain = dist.new_group(backend="gloo")
    rows = [*reductions(plain, options.pairs), step(plain, options.pairs), many(options.pairs), idle()]
    if hvd.rank() == 0:
        table = render(rows, options.pairs)
        print(table)
        if options.write:
            options.write.write_text(table)


def start_ranks(size: int) -> int:
    port = 20_000 + os.getpid() % 10_000
    ranks = []
    for rank in range(size):
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="benchmark", port=port)
        env = {**os.environ, **environment_of(world), "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    return max(process.wait() for process in ranks)


def reductions(plain: dist.ProcessGroup, pairs: int) -> list[dict[str, object]]:
    rows = []
    for label, count, repeats, target in SIZES:
        tensor = torch.ones(count)
        runs = {
            "plain": lambda t=tensor: dist.all_reduce(t, group=plain),
            "in place": lambda t=tensor, n=label: hvd.allreduce_(t, name=f"in place {n}", op=hvd.Sum),
            "new tensor": lambda t=tensor, n=label: hvd.allreduce(t, name=f"new {n}", op=hvd.Sum),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for pair in range(pairs + 2):
            for name, run in runs.items():
                hvd.barrier()
                seconds = median_time(run, repeats)
                tensor.fill_(1.0)
                if pair >= 2:  # the first ones warm up
                    times[name].append(seconds)
        rows.append(row(f"allreduce_, {label}", times["in place"], times["plain"], target))
        rows.append(row(f"allreduce (new tensor), {label}", times["new tensor"], times["plain"], target))
    return rows


def median_time(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def net() -> nn.Module:
    """1.2 million parameters: the classic MNIST net."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def step(plain: dist.ProcessGroup, pairs: int) -> dict[str, object]:
    ours, theirs = net(), net()
    parallel = DistributedDataParallel(theirs, process_group=plain)
    plain_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.01, momentum=0.5), named_parameters=ours.named_parameters()
    )
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    times: dict[str, list[float]] = {"plain": [], "hvd": []}
    for pair in range(pairs + 2):
        for name, model, chosen in (("plain", parallel, plain_optimizer), ("hvd", ours, optimizer)):
            hvd.barrier()
            seconds = median_time(lambda model=model, chosen=chosen: train(model, chosen), 5)
            if pair >= 2:
                times[name].append(seconds)
    return row("step of a conv net, against DDP", times["hvd"], times["plain"], 1.05)


def many(pairs: int) -> dict[str, object]:
    tensors = [torch.ones(100) for _ in range(1000)]

    def fused() -> None:
        handles = [hvd.allreduce_async_(tensor, name=f"small {i}", op=hvd.Sum) for i, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    def one_by_one() -> None:
        for i, tensor in enumerate(tensors):
            hvd.allreduce_(tensor, name=f"small {i}", op=hvd.Sum)

    times: dict[str, list[float]] = {"fused": [], "one by one": []}
    for pair in range(pairs + 1):
        for name, run in (("one by one", one_by_one), ("fused", fused)):
            hvd.barrier()
            seconds = median_time(run, 1)
            if pair >= 1:
                times[name].append(seconds)
    return row("1,000 small tensors, fused against one by one", times["fused"], times["one by one"], 0.2)


def idle(seconds: float = 5.0) -> dict[str, object]:
    def used() -> float:
        return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])

    hvd.barrier()
    time.sleep(0.2)
    begun = used()
    time.sleep(seconds)
    share = (used() - begun) / seconds
    return {"what": "share of a core while idle", "ours": share, "target": 0.01}


def row(what: str, ours: list[float], plain: list[float], target: float) -> dict[str, object]:
    ratios = sorted(one / two for one, two in zip(ours, plain, strict=True))
    # The interval of a median: the order statistics around it, by the normal approximation of the binomial.
    reach = 0.98 * math.sqrt(len(ratios))
    low = ratios[max(0, math.floor(len(ratios) / 2 - reach))]
    high = ratios[min(len(ratios) - 1, math.ceil(len(ratios) / 2 + reach) - 1)]
    return {
        "what": what,
        "ours": statistics.median(ours),
        "plain": statistics.median(plain),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "target": target,
    }


def render(rows: list[dict[str, object]], pairs: int) -> str:
    lines = [
        "# Horovod's API against plain torch.distributed",
        "",
        f"2026-11-15 · torch {torch.__version__} · {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f} · 2 ranks, gloo, float32, one thread each · {pairs} alternating pairs · "
        "`python benchmarks/hvd.py`",
        "",
        "| what | hvd | plain | ratio (median of pairs) | 95 % interval | at most |",
        "|---|---|---|---|---|---|",
    ]
    for entry in rows:
        if "plain" not in entry:
            lines.append(f"| {entry['what']} | {entry['ours']:.2%} | | | | {entry['target']:.0%} |")
            continue
        lines.append(
            f"| {entry['what']} | {float(str(entry['ours'])) * 1e3:.2f} ms | {float(str(entry['plain'])) * 1e3:.2f} ms | "
            f"{entry['ratio']:.2f} | {entry['low']:.2f} – {entry['high']:.2f} | {entry['target']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
