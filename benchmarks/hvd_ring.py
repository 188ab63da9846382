"""Compares the two transports of hvd.allreduce in main memory: gloo and the ring (HOROVOD_CPU_OPERATIONS).

    python benchmarks/hvd_ring.py [--ranks 2 4 8] [--hosts 2 4] [--rate 100mbit] [--out benchmarks/hvd_ring.md]

The ranks run on this machine over loopback, or one per network namespace over links held to a rate (root). Both transports
are measured in the same processes and the same minutes: a round calls hvd.init() with one of them, measures every size,
calls hvd.shutdown(), and repeats that with the other one; the order alternates from round to round. The table shows the
median and the fastest call of all rounds. On a machine that has other work, the fastest calls and the CPU time (all threads
of rank 0, per call) are what can be compared.

Tensors of up to 256 KiB / (ranks - 1) use neither transport: they travel inside the control messages.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hvd_link import make_hosts, remove_hosts, start

from megaclass.world import World, environment_of

TRANSPORTS = ["gloo", "ring"]
SIZES = {"4 KB": 1 << 12, "64 KB": 1 << 16, "256 KB": 1 << 18, "1 MB": 1 << 20, "4 MB": 1 << 22}
SIZES |= {"16 MB": 1 << 24, "64 MB": 1 << 26}
Times = dict[str, dict[str, list[tuple[float, float]]]]
"""Seconds by the clock and of CPU per call, one entry per call; keyed by size and transport."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help="numbers of ranks on this machine")
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4], help="numbers of hosts with one rank each")
    parser.add_argument("--rate", default="100mbit", help="rate of each host's link")
    parser.add_argument("--rounds", type=int, default=10, help="rounds on this machine")
    parser.add_argument("--host-rounds", type=int, default=3, help="rounds over the links")
    parser.add_argument("--seconds", type=float, default=0.3, help="time per size, transport and round")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    load = os.getloadavg()[0]
    rows: list[str] = []
    for num_ranks in options.ranks:
        rows += table_rows(f"{num_ranks} ranks, loopback", on_this_machine(num_ranks))
    for num_hosts in options.hosts:
        rows += table_rows(f"{num_hosts} hosts, {options.rate}", on_hosts(num_hosts, options.rate))
    table = render(rows, options, load)
    print(table)
    if options.out:
        options.out.write_text(table)


def on_this_machine(size: int) -> Times:
    port = 20_000 + os.getpid() % 10_000

    def start_rank(rank: int, *more: str) -> "subprocess.Popen[bytes]":
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="benchmark", port=port)
        env = {**os.environ, **environment_of(world), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, *sys.argv, *more], env=env)

    return finished(size, start_rank)


def on_hosts(size: int, rate: str) -> Times:
    prefix = f"mcring{os.getpid()}"
    try:
        make_hosts(prefix, size, rate)
        return finished(size, lambda rank, *more: start(prefix, rank, size, *more))
    finally:
        remove_hosts(prefix, size)


def finished(size: int, start_rank) -> Times:
    """Starts the ranks, waits for them and returns the times that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "times.json")
        ranks = [start_rank(rank, "--result", str(result)) for rank in range(size)]
        if code := max(process.wait() for process in ranks):
            sys.exit(code)
        return json.loads(result.read_text())


def measure(options: argparse.Namespace) -> None:
    """Runs on every rank; rank 0 writes the seconds per allreduce by size, transport and round."""
    import torch

    import megaclass.hvd as hvd

    torch.set_num_threads(1)
    times: Times = {label: {transport: [] for transport in TRANSPORTS} for label in SIZES}
    is_across_hosts = os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
    for number in range(options.host_rounds if is_across_hosts else options.rounds):
        for transport in TRANSPORTS[:: -1 if number % 2 else 1]:
            os.environ["HOROVOD_CPU_OPERATIONS"] = transport
            hvd.init()
            for label, size in SIZES.items():
                # Sums of zeros stay zeros, however often they are formed.
                tensor = torch.zeros(size // 4)
                name = f"{transport} {label}"
                begun = time.perf_counter()
                hvd.allreduce_(tensor, name=name, op=hvd.Sum)  # warms up, and shows how many fit into the time
                once_s = torch.tensor([time.perf_counter() - begun])
                once_s = float(hvd.allreduce(once_s, name=f"{name} once", op=hvd.Max))
                for _ in range(max(1, min(50, int(options.seconds / once_s)))):
                    begun, begun_cpu = time.perf_counter(), time.process_time()
                    hvd.allreduce_(tensor, name=name, op=hvd.Sum)
                    times[label][transport].append((time.perf_counter() - begun, time.process_time() - begun_cpu))
            rank = hvd.rank()
            hvd.shutdown()
    if rank == 0:
        options.result.write_text(json.dumps(times))


def table_rows(where: str, times: Times) -> list[str]:
    rows = []
    for label, by_transport in times.items():
        cells = [where, label, str(len(by_transport["gloo"])), str(len(by_transport["ring"]))]
        for column, statistic in ((0, statistics.median), (0, min), (1, statistics.median)):
            gloo, ring = (statistic([call[column] for call in by_transport[name]]) for name in TRANSPORTS)
            cells += [f"{gloo * 1e3:.2f}", f"{ring * 1e3:.2f}", f"**{ring / gloo:.2f}**"]
        rows.append(f"| {' | '.join(cells)} |")
    print(*rows, sep="\n", flush=True)
    return rows


def render(rows: list[str], options: argparse.Namespace, load: float) -> str:
    from torch import __version__

    lines = [
        "# Allreduce in main memory: the ring against gloo",
        "",
        f"{datetime.date.today()} · torch {__version__} · {os.cpu_count()} cores ({platform.machine()}), load {load:.1f} "
        f"before the start · one thread per rank · float32, hvd.allreduce_ · {options.rounds} rounds over loopback, "
        f"{options.host_rounds} over links of {options.rate}, both transports in each round · times in ms per call on rank 0; "
        f"ratio below 1: the ring is faster · written by `python benchmarks/hvd_ring.py --out benchmarks/hvd_ring.md`",
        "",
        "| where | size | calls, gloo | ring | median, gloo | ring | ratio | fastest, gloo | ring | ratio | CPU, gloo | ring | ratio |",
        "|---" * 13 + "|",
        *rows,
        "",
        "Tensors of up to 256 KiB / (ranks - 1) travel inside the control messages, whatever the setting: their ratio shows",
        "the noise of the measurement.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
