"""The AllReduce laboratory in one run: what compressing gradients saves, and what it costs.

    python examples/compression_lab.py [--epochs 3] [--seeds 5] [--drawn 4000] [--data-dir DIR] [--out FILE]

Trains the same net on the same images for the same number of epochs: serially, on 2 and 4 processes, and on 2 and 4
processes with gradients of 16 and 8 bits. The batch over all processes is the same in each row, so only the
arithmetic of the gradients differs. Prints time per epoch, bytes sent by all processes in an epoch (counted by the
kernel's TCP), and the final accuracy: means over `--seeds` runs, each with weights and an order of images of its own.
"Against uncompressed" is the mean over seeds of the difference, in points, with its standard error.
"""

import argparse
import math
import os
import statistics
import time
from pathlib import Path

import torch
from mnist import MIRROR, Net, datasets, evaluate
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from wire_bytes import SentBytes

import horovod
import horovod.torch as hvd

ROWS = [
    ("serial", 1, "none"),
    ("data parallel", 2, "none"),
    ("data parallel", 4, "none"),
    ("16 bits (bf16)", 2, "bf16"),
    ("16 bits (bf16)", 4, "bf16"),
    ("8 bits (fp8)", 2, "fp8"),
    ("8 bits (fp8)", 4, "fp8"),
    ("8 bits (int8)", 2, "int8"),
    ("8 bits (int8)", 4, "int8"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seeds", type=int, default=5, help="runs of every row")
    parser.add_argument("--drawn", type=int, default=4000, help="training images to draw without --data-dir")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--mirror", default=MIRROR)
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    lines: list[str] = []

    def write(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    write("# The AllReduce laboratory\n")
    write(
        f"{options.seeds} seeds · {options.epochs} epochs · batch {options.global_batch} over all processes · "
        f"{options.data_dir or f'{options.drawn:,} drawn'} training images · load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores before the start\n"
    )
    titles = ["what", "processes", "seconds per epoch", "bytes sent per epoch", "of uncompressed", "accuracy"]
    write(f"| {' | '.join(titles)} | against uncompressed |")
    write("|---|---|---|---|---|---|---|")
    plain: dict[int, tuple[int, list[float]]] = {}
    for what, size, compression in ROWS:
        results = horovod.run(train_all, args=(options, compression), num_proc=size)
        seconds = statistics.median(run[0] for run in results[0])
        sent = sum(run[1] for result in results for run in result) // options.seeds
        accuracies = [run[2] for run in results[0]]
        plain_sent, plain_accuracies = plain.setdefault(size, (sent, accuracies))
        share = f"{sent / plain_sent:.3f}" if size > 1 else "–"
        difference = "–" if compression == "none" else points(accuracies, plain_accuracies)
        accuracy = statistics.mean(accuracies)
        write(f"| {what} | {size} | {seconds:.2f} | {sent:,} | {share} | {accuracy:.2%} | {difference} |")


def points(ours: list[float], plain: list[float]) -> str:
    """Mean and standard error of the differences, in points."""
    differences = [100 * (one - two) for one, two in zip(ours, plain, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return f"{statistics.mean(differences):+.2f} ± {error:.2f}"


def train_all(options: argparse.Namespace, compression: str) -> list[tuple[float, int, float]]:
    """A run for every seed."""
    torch.set_num_threads(1)
    return [train(options, compression, seed) for seed in range(options.seeds)]


def train(options: argparse.Namespace, compression: str, seed: int) -> tuple[float, int, float]:
    """(seconds per epoch, bytes this process sent per epoch, accuracy)."""
    # A job for each seed: none starts with the rounding errors of the previous one.
    hvd.init()
    torch.manual_seed(seed)
    train_set, test_set = datasets(options)
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=options.global_batch // hvd.size(), sampler=sampler, drop_last=True)
    test_sampler = DistributedSampler(test_set, hvd.size(), hvd.rank(), shuffle=False)
    model = Net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    hvd.barrier()
    sent, begun = SentBytes(), time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        schedule.step()
    hvd.barrier()
    seconds, num_bytes = (time.perf_counter() - begun) / options.epochs, sent.count() // options.epochs
    _, accuracy = evaluate(model, DataLoader(test_set, 500, sampler=test_sampler), torch.device("cpu"))
    hvd.shutdown()
    return seconds, num_bytes, accuracy


if __name__ == "__main__":
    main()
