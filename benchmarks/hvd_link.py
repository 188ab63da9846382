"""Measures what compression saves over a slow link: two ranks in two network namespaces. Needs root.

    python benchmarks/hvd_link.py [--rate 100mbit] [--steps 20] [--pairs 3] [--out benchmarks/hvd_link.md]

An epoch is `--steps` steps of a net with 1.2 million parameters through hvd.DistributedOptimizer. Epochs with and without
compression alternate; bytes are those that the interface counted, headers included. Nothing outside the namespaces is
touched; they are removed at the end.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

WIRES = ["none", "fp16", "bf16", "fp8", "int8"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--wires", nargs="+", default=WIRES)
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    prefix = f"mchvd{os.getpid()}"
    try:
        make_hosts(prefix, 2, options.rate)
        ranks = [start(prefix, rank, 2) for rank in range(2)]
        code = max(process.wait() for process in ranks)
    finally:
        remove_hosts(prefix, 2)
    sys.exit(code)


def make_hosts(prefix: str, num_hosts: int, rate: str) -> None:
    """Makes network namespaces {prefix}0, {prefix}1, … with addresses 10.211.77.1, .2, …, joined by a bridge in {prefix}s."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    switch = f"{prefix}s"
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "br0", "type", "bridge")
    ip("-n", switch, "link", "set", "br0", "up")
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
    for number in range(num_hosts):
        host, port = f"{prefix}{number}", f"p{number}"
        ip("netns", "add", host)
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        ip("-n", switch, "link", "set", port, "master", "br0", "up")
        ip("-n", host, "addr", "add", f"10.211.77.{number + 1}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "eth0", "up")
        # Both directions of the host's cable: what it sends, and what the switch sends to it.
        for place, device in ((host, "eth0"), (switch, port)):
            subprocess.run(["ip", "netns", "exec", place, "tc", "qdisc", "add", "dev", device, *limit], check=True)


def remove_hosts(prefix: str, num_hosts: int) -> None:
    for name in ("s", *range(num_hosts)):
        subprocess.run(["ip", "netns", "del", f"{prefix}{name}"], check=False, stderr=subprocess.DEVNULL)


def start(prefix: str, rank: int, size: int, *more: str) -> "subprocess.Popen[bytes]":
    """Starts this script again as one rank on its own host, with `more` arguments."""
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(size),
        "MASTER_ADDR": "10.211.77.1",
        "MASTER_PORT": "29500",
        "HOROVOD_HOSTNAME": f"host{rank}",
        "HOROVOD_GLOO_IFACE": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    command = ["ip", "netns", "exec", f"{prefix}{rank}", sys.executable, *sys.argv, *more]
    return subprocess.Popen(command, env=env)


def measure(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import torch
    from mnist import Net
    from torch import nn

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    images, labels = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
    trainers = {}
    for wire in options.wires:
        torch.manual_seed(0)
        model = Net()
        named = [(f"{wire}.{name}", parameter) for name, parameter in model.named_parameters()]
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        trainers[wire] = (
            model,
            hvd.DistributedOptimizer(inner, named_parameters=named, compression=getattr(hvd.Compression, wire)),
        )

    def epoch(wire: str, steps: int) -> tuple[float, int]:
        model, optimizer = trainers[wire]
        hvd.barrier()
        sent, begun = int(counter.read_text()), time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        hvd.barrier()
        return time.perf_counter() - begun, int(counter.read_text()) - sent

    results: dict[str, list[tuple[float, int]]] = {wire: [] for wire in options.wires}
    for wire in options.wires:
        epoch(wire, 2)
    for _ in range(options.pairs):
        for wire in options.wires:
            results[wire].append(epoch(wire, options.steps))
    if hvd.rank() == 0:
        table = render(results, options, torch.__version__)
        print(table)
        if options.out:
            options.out.write_text(table)


def render(results: dict[str, list[tuple[float, int]]], options: argparse.Namespace, version: str) -> str:
    lines = [
        f"# Compression over a link held to {options.rate}",
        "",
        f"{datetime.date.today()} · torch {version} · {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f} · 2 ranks in two network namespaces, one thread each · {options.pairs} alternating "
        f"epochs of {options.steps} steps, medians; faster: median of the ratios · bytes as the interface counted them · a "
        f"net of 1.2 million parameters · written by `python benchmarks/hvd_link.py --rate {options.rate} --steps "
        f"{options.steps} --pairs {options.pairs} --out benchmarks/hvd_link.md`",
        "",
        f"| compression | seconds per epoch of {options.steps} steps | faster | bytes sent by rank 0 | of none |",
        "|---|---|---|---|---|",
    ]
    plain = results[options.wires[0]]
    for wire, runs in results.items():
        faster = statistics.median(one[0] / two[0] for one, two in zip(plain, runs, strict=True))
        seconds = statistics.median(run[0] for run in runs)
        sent = statistics.median(run[1] for run in runs)
        share = sent / statistics.median(run[1] for run in plain)
        lines.append(f"| {wire} | {seconds:.2f} | {faster:.2f} | {sent:,.0f} | {share:.3f} |")
    lines += [
        "",
        "8 bits must be at least 2.5 times faster, with at most 0.27 of the bytes; 16 bits send at most 0.52.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
