"""horovod.torch against plain torch.distributed, in the same processes and the same minutes.

    python benchmarks/hvd.py [--pairs 40] [--out benchmarks/hvd.md] [--ranks 2] [--only-small | --only-step | --phases]

Two ranks (or --ranks), gloo, float32, one thread each. Each figure is the median over alternating pairs (plain, hvd, hvd,
plain, …) of the ratio of their times, with the 95 % interval of that median by order statistics: a machine that is busy with
other things slows both halves of a pair. CPU time is that of all threads of rank 0: what is left to compare where the machine
has other work. Targets are those of the project's issue on Horovod's API.
"""

import argparse
import datetime
import itertools
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from megaclass_launch.world import World, environment_of

SIZES = [("4 KB", 1024, 40, 2.0), ("1 MiB", 256 * 1024, 15, 1.3), ("64 MiB", 16 * 1024 * 1024, 1, 1.1)]


@dataclass
class Time:
    """Of one run: seconds by the clock, seconds of CPU."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only-step", action="store_true", help="only the training step")
    parser.add_argument("--only-small", action="store_true", help="only the rows about 1,000 small tensors")
    parser.add_argument("--phases", action="store_true", help="only the phases of 1,000 small tensors, on rank 0")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(start_ranks(options.ranks))
    torch.set_num_threads(1)
    # hvd has private groups, so the plain one is made here. First: without a store of its own, hvd then uses the same one.
    dist.init_process_group("gloo")
    hvd.init()
    plain = dist.new_group(backend="gloo")
    load = os.getloadavg()[0]
    if options.phases:
        print_phases(options.pairs)
        return
    if options.only_step:
        rows = [step(plain, options.pairs)]
    elif options.only_small:
        rows = many(plain, options.pairs)
    else:
        rows = [*reductions(plain, options.pairs), step(plain, options.pairs), *many(plain, options.pairs), idle()]
    if hvd.rank() == 0:
        table = render(rows, options.pairs, load)
        print(table)
        if options.out:
            options.out.write_text(table)


def start_ranks(size: int) -> int:
    port = 20_000 + os.getpid() % 10_000
    ranks = []
    for rank in range(size):
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="benchmark", port=port)
        env = {**os.environ, **environment_of(world), "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    return max(process.wait() for process in ranks)


def alternate(runs: dict[str, Callable[[], object]], repeats: int, pairs: int) -> dict[str, list[Time]]:
    """Times of one run, the median of `repeats`, by name; the order turns round from pair to pair."""
    times: dict[str, list[Time]] = {name: [] for name in runs}
    for pair in range(pairs + 2):
        for name in list(runs)[:: -1 if pair % 2 else 1]:
            hvd.barrier()
            measured = time_of(runs[name], repeats)
            if pair >= 2:  # the first ones warm up
                times[name].append(measured)
    return times


def time_of(run: Callable[[], object], repeats: int) -> Time:
    seconds = []
    cpu = time.process_time()
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return Time(statistics.median(seconds), (time.process_time() - cpu) / repeats)


def reductions(plain: dist.ProcessGroup, pairs: int) -> list[list[str]]:
    rows = []
    for label, count, repeats, target in SIZES:
        # Sums of zeros stay what they are however often they are made.
        tensor = torch.zeros(count)
        times = alternate(
            {
                "plain": lambda t=tensor: dist.all_reduce(t, group=plain),
                "in place": lambda t=tensor, n=label: hvd.allreduce_(t, name=f"in place {n}", op=hvd.Sum),
                "new": lambda t=tensor, n=label: hvd.allreduce(t, name=f"new {n}", op=hvd.Sum),
            },
            repeats,
            pairs,
        )
        rows.append(row(f"allreduce_, {label}", times["in place"], times["plain"], target))
        rows.append(row(f"allreduce (new tensor), {label}", times["new"], times["plain"], target))
    return rows


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


def step(plain: dist.ProcessGroup, pairs: int) -> list[str]:
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

    runs = {"plain": lambda: train(parallel, plain_optimizer), "hvd": lambda: train(ours, optimizer)}
    times = alternate(runs, 5, pairs)
    return row("step of a conv net (1.2M parameters), against DDP", times["hvd"], times["plain"], 1.05)


def many(plain: dist.ProcessGroup, pairs: int) -> list[list[str]]:
    tensors = [torch.zeros(100) for _ in range(1000)]

    def one_by_one() -> None:
        for i, tensor in enumerate(tensors):
            hvd.allreduce_(tensor, name=f"small {i}", op=hvd.Sum)

    def named() -> None:
        for handle in [hvd.allreduce_async_(t, name=f"small {i}", op=hvd.Sum) for i, t in enumerate(tensors)]:
            hvd.synchronize(handle)

    def unnamed() -> None:
        for handle in [hvd.allreduce_async_(tensor, op=hvd.Sum) for tensor in tensors]:
            hvd.synchronize(handle)

    def torchs() -> None:
        for work in [dist.all_reduce(tensor, group=plain, async_op=True) for tensor in tensors]:
            work.wait()

    runs = {
        "torch": torchs,
        "one by one": one_by_one,
        "named": named,
        "unnamed": unnamed,
        "grouped": lambda: hvd.grouped_allreduce_(tensors, name="small", op=hvd.Sum),
    }
    times = alternate(runs, 1, pairs)
    what = "1,000 small tensors"
    return [
        row(
            f"{what}, allreduce_async_ under names, against allreduce_ one by one",
            times["named"],
            times["one by one"],
            0.2,
        ),
        row(f"{what}, allreduce_async_ under names, against torch's all_reduce", times["named"], times["torch"], 1.0),
        row(
            f"{what}, allreduce_async_ without names, against torch's all_reduce", times["unnamed"], times["torch"], 1.0
        ),
        row(f"{what}, grouped_allreduce_, against torch's all_reduce", times["grouped"], times["torch"], 1.0),
    ]


def print_phases(repeats: int) -> None:
    """Prints the least and the median milliseconds of each phase; run old and new code in turn to compare them."""
    tensors = [torch.zeros(100) for _ in range(1000)]
    for way in ("named", "unnamed", "grouped"):
        rows = []
        for _ in range(repeats + 10):
            hvd.barrier()
            cpu, times = time.process_time(), [time.perf_counter()]
            if way == "grouped":
                handles = [hvd.grouped_allreduce_async_(tensors, name="small", op=hvd.Sum)]
            else:
                names = [f"small {i}" if way == "named" else None for i in range(len(tensors))]
                handles = [hvd.allreduce_async_(t, name=n, op=hvd.Sum) for t, n in zip(tensors, names, strict=True)]
            times.append(time.perf_counter())
            hvd.synchronize(handles[0])
            times.append(time.perf_counter())
            for handle in handles[1:]:
                hvd.synchronize(handle)
            times.append(time.perf_counter())
            phases = [end - begun for begun, end in itertools.pairwise(times)]
            rows.append([*phases, times[-1] - times[0], time.process_time() - cpu])
        if hvd.rank() == 0:
            columns = list(zip(*rows[10:], strict=True))  # the first ones warm up
            for what, pick in (("least", min), ("median", statistics.median)):
                numbers = " ".join(f"{pick(column) * 1e3:8.2f}" for column in columns)
                print(f"{way:8} {what:6} (submit, first done, rest, total, CPU): {numbers} ms")


def idle(seconds: float = 5.0) -> list[str]:
    hvd.barrier()
    time.sleep(0.2)
    begun = time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - begun) / seconds
    return ["share of a core while idle", f"{share:.2%}", "", "", "", "1%", verdict(share, 0.01), "", "", ""]


def row(what: str, ours: list[Time], plain: list[Time], target: float) -> list[str]:
    middle, low, high = ratio([one.wall / two.wall for one, two in zip(ours, plain, strict=True)])
    cpu = ratio([one.cpu / two.cpu for one, two in zip(ours, plain, strict=True)])
    return [
        what,
        milliseconds([one.wall for one in ours]),
        milliseconds([one.wall for one in plain]),
        f"{middle:.2f}",
        f"{low:.2f} – {high:.2f}",
        str(target),
        verdict(middle, target),
        milliseconds([one.cpu for one in ours]),
        milliseconds([one.cpu for one in plain]),
        "{:.2f} ({:.2f} – {:.2f})".format(*cpu),
    ]


def ratio(ratios: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval: the order statistics around it, by the normal approximation of the binomial."""
    ratios = sorted(ratios)
    reach = 0.98 * math.sqrt(len(ratios))
    low = ratios[max(0, math.floor(len(ratios) / 2 - reach))]
    high = ratios[min(len(ratios) - 1, math.ceil(len(ratios) / 2 + reach) - 1)]
    return statistics.median(ratios), low, high


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms"


def verdict(value: float, target: float) -> str:
    return "yes" if value <= target else "no"


def render(rows: list[list[str]], pairs: int, load: float) -> str:
    titles = ["what", "hvd", "plain", "ratio (median of pairs)", "95 % interval", "at most", "met"]
    titles += ["CPU, hvd", "CPU, plain", "CPU ratio (95 % interval)"]
    lines = [
        "# Horovod's API against plain torch.distributed",
        "",
        f"{datetime.date.today()} · torch {torch.__version__} · {os.cpu_count()} cores ({platform.machine()}), load "
        f"{load:.1f} before the start · {hvd.size()} ranks, gloo, float32, one thread each · {pairs} alternating pairs · "
        f"written by `python benchmarks/hvd.py --ranks {hvd.size()} --pairs {pairs}`",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(f"| {' | '.join(entry)} |" for entry in rows),
        "",
        "Horovod 0.28.1 as measured for the issue, on another machine: 4 KB 2.4, 1 MiB 1.5, 64 MiB 1.25, step 1.08, idle",
        "7–10 %.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
