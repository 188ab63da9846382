"""The data layer in numbers, as ratios in one run: python benchmarks/data.py [--out benchmarks/data.md] [--records N]

The machine may be busy, so CPU seconds decide where they can, runs alternate, and the median of the ratios counts.
"""

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image

from megaclass.data.loader import BatchLoader
from megaclass.data.loading import reader as reader_module
from megaclass.data.order import ImageOrder, rank_batch
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.synthesize import synthesize
from megaclass_launch.even_parts import even_part

BATCH, REPEATS = 256, 7


class PillowDataset(torch.utils.data.Dataset):
    """What the usual training script does: an item at a time, Pillow, the default collate."""

    def __init__(self, folder: Path) -> None:
        self.source = open_source(folder)

    def __len__(self) -> int:
        return self.source.num_images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(self.source.read(index))).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), int(self.source.labels[index])


class BatchDataset(torch.utils.data.Dataset):
    """The same batches as BatchLoader, for worker processes: they decode whole batches and send them by shared memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loader: BatchLoader | None = None

    def __len__(self) -> int:
        return open_source(self.folder).num_images // BATCH

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.loader is None:
            self.loader = BatchLoader(open_source(self.folder), global_batch=BATCH)
        batch = self.loader.load(0, step)
        return batch.images, batch.labels


def cpu_s() -> float:
    """Of this process and the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, seconds)"""
    cpu, wall = cpu_s(), time.perf_counter()
    work()
    return cpu_s() - cpu, time.perf_counter() - wall


def loader_speeds(folder: Path) -> dict[str, list[tuple[float, float]]]:
    source = open_source(folder)
    num_steps = 3 * (source.num_images // BATCH)
    in_memory = [source.read(index) for index in range(source.num_images)]
    order = ImageOrder(num_images=source.num_images, global_batch=BATCH)
    chosen = [int(i) for step in range(num_steps) for i in order.batch(*divmod(step, order.steps_per_epoch))]

    def bare() -> None:
        for index in chosen:
            simplejpeg.decode_jpeg(in_memory[index], "RGB")

    def threads(num_workers: int) -> Callable[[], None]:
        def work() -> None:
            for _ in BatchLoader(source, global_batch=BATCH, num_workers=num_workers).batches(num_steps=num_steps):
                pass

        return work

    def pillow() -> None:
        for _ in torch.utils.data.DataLoader(PillowDataset(folder), batch_size=BATCH, sampler=chosen):
            pass

    works = {"bare": bare, "one": threads(1), "two": threads(2), "pillow": pillow}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            results[name].append(measure(work))
    results["images"] = [(len(chosen), len(chosen))]
    return results


def process_speeds(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, seconds) of runs that alternate: two threads, and two forkserver processes that were started before."""
    steps = list(range(len(BatchDataset(folder)))) * 4
    processes = torch.utils.data.DataLoader(
        BatchDataset(folder),
        batch_size=None,
        sampler=steps,
        num_workers=2,
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )
    for _ in processes:
        pass
    workers = [worker.pid for worker in processes._iterator._workers]

    def in_processes() -> None:
        for _ in processes:
            pass

    def in_threads() -> None:
        for _ in BatchLoader(open_source(folder), global_batch=BATCH, num_workers=2).batches(num_steps=len(steps)):
            pass

    results: dict[str, list[tuple[float, float]]] = {"threads": [], "processes": []}
    for _ in range(REPEATS):
        before = sum(map(process_cpu_s, workers))
        cpu, wall = measure(in_processes)
        results["processes"].append((cpu + sum(map(process_cpu_s, workers)) - before, wall))
        results["threads"].append(measure(in_threads))
    return results


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def interpreter_s(folder: Path) -> float:
    """CPU seconds an image of everything but the decoding, which is what a worker holds the interpreter for."""
    source = open_source(folder)
    loader = BatchLoader(source, global_batch=BATCH)
    decode = reader_module.decode_into
    reader_module.decode_into = lambda out, encoded, name, fit: False
    try:
        steps = range(loader.steps_per_epoch)
        return min(measure(lambda: [loader.load(0, step) for step in steps])[0] for _ in range(5)) / (
            len(steps) * BATCH
        )
    finally:
        reader_module.decode_into = decode


def write_large_index(path: Path, num_records: int) -> None:
    """Keys that rise by one, records of 4 to 12 kB: what a set of hundreds of gigabytes looks like."""
    rng = np.random.default_rng(0)
    offset = 0
    with path.open("w", encoding="ascii") as file:
        for start in range(0, num_records, 2**18):
            lengths = rng.integers(1000, 3000, min(2**18, num_records - start)) * 4
            offsets = offset + np.cumsum(lengths) - lengths
            offset = int(offsets[-1] + lengths[-1])
            file.write("".join([f"{start + n}\t{o}\n" for n, o in enumerate(offsets.tolist())]))


OPEN_INDEX = """
import json, sys, time
from pathlib import Path
from megaclass.data.sources.record_index import open_index
def now():
    return time.perf_counter(), time.process_time()
def peak():
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")).split()[1]) / 1e6
before = now()
index = open_index(Path(sys.argv[1]))
after = now()
assert len(index.keys) == int(sys.argv[2]) and int(index.keys[-1]) == int(sys.argv[2]) - 1
print(json.dumps({"s": after[0] - before[0], "cpu_s": after[1] - before[1], "gb": peak()}))
"""


def index_speeds(folder: Path, num_records: int) -> tuple[dict[str, float], dict[str, float]]:
    """Opened for the first time and again from the cache, each in a process of its own."""
    path = folder / "large.idx"
    write_large_index(path, num_records)
    command = [sys.executable, "-c", OPEN_INDEX, str(path), str(num_records)]
    first, again = (json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(2))
    return first, again


def check_restarts(num_restarts: int) -> int:
    """Random sizes, world sizes and steps: how many restarts went on with the same images to the end of the epoch."""
    rng = np.random.default_rng(0)
    num_equal = 0
    for _ in range(num_restarts):
        num_images, batch = int(rng.integers(200, 5000)), int(rng.integers(16, 128))
        sizes = {"num_images": num_images, "global_batch": batch, "seed": int(rng.integers(2**62)), "keep_last": True}
        order, epoch, world_size = ImageOrder(**sizes), int(rng.integers(100)), int(rng.integers(1, 9))
        step = int(rng.integers(order.steps_per_epoch))
        rank = int(rng.integers(world_size))
        restarted = ImageOrder(**sizes)
        num_equal += all(
            np.array_equal(
                rank_batch(restarted, epoch, later, rank, world_size),
                order.batch(epoch, later)[even_part(order.batch_size(later), rank, world_size)],
            )
            for later in range(step, order.steps_per_epoch)
        )
    return num_equal


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="table to write, otherwise it is printed")
    parser.add_argument("--records", type=int, default=40_000_000)
    parser.add_argument("--date", default="", help="date of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        synthesize(
            folder / "set", num_identities=256, images_per_identity=10, image_size=112, num_pairs=2, num_processes=1
        )
        speeds = loader_speeds(folder / "set")
        speeds |= process_speeds(folder / "set")
        held_s = interpreter_s(folder / "set")
        first, again = index_speeds(folder, options.records)
    table = render(speeds, held_s, first, again, check_restarts(1000), options)
    if options.out:
        options.out.write_text(table, encoding="utf-8")
    print(table)


def render(speeds, held_s, first, again, num_equal, options) -> str:
    images = speeds["images"][0][0]

    def per_second(name: str, clock: int = 0) -> float:
        return images / statistics.median(run[clock] for run in speeds[name])

    def ratio(name: str, other: str, clock: int = 0) -> float:
        pairs = zip(speeds[name], speeds[other], strict=True)
        return statistics.median(b[clock] / a[clock] for a, b in pairs)

    load = os.getloadavg()[0]
    scaling_cpu = 2 * ratio("two", "one")
    # Two workers share one interpreter: one may wait while the other holds it.
    held_share = held_s * per_second("one")
    rows = [
        (
            "one worker / bare `simplejpeg.decode_jpeg` in memory, by CPU seconds",
            "≥ 0.85",
            f"{ratio('one', 'bare'):.2f}",
        ),
        ("one worker / per-item Pillow + default collate, by CPU seconds", "≥ 1.6", f"{ratio('one', 'pillow'):.2f}"),
        ("two workers / one, by CPU seconds (2 × the ratio of the cost of an image)", "≥ 1.7", f"{scaling_cpu:.2f}"),
        (
            f"two workers / one, by the clock (load average {load:.0f} on {os.cpu_count()} cores)",
            "",
            f"{ratio('two', 'one', 1):.2f}",
        ),
        (
            f"index of {options.records:,} records, first opening",
            "≤ 10 s",
            f"{first['s']:.1f} s ({first['cpu_s']:.1f} s CPU)",
        ),
        ("  its peak memory, mapped pages included", "≤ 1 GB", f"{first['gb']:.2f} GB"),
        ("  opened again from its cache", "≤ 1 s", f"{again['s']:.3f} s"),
        ("exact resume: random (world size, step) restarts with the same remaining order", "1,000", f"{num_equal:,}"),
        (
            "share of an image's cost that holds the interpreter, which threads cannot do side by side",
            "",
            f"{held_share:.0%}",
        ),
        ("threads / forkserver processes, two workers, by CPU seconds", "", f"{ratio('threads', 'processes'):.2f}"),
        ("threads / forkserver processes, two workers, by the clock", "", f"{ratio('threads', 'processes', 1):.2f}"),
    ]
    lines = [
        "# Data layer",
        "",
        f"{options.date}, {processor()}, {os.cpu_count()} cores, load average {load:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, simplejpeg {simplejpeg.__version__}.",
        "Made by `python benchmarks/data.py`: 112 × 112 JPEGs of drawn faces, "
        f"batches of {BATCH}, median of {REPEATS} alternating runs.",
        "",
        "| what | must be | is |",
        "|---|---|---|",
        *(f"| {what} | {must} | {value} |" for what, must, value in rows),
        "",
        "| images per second of CPU | |",
        "|---|---|",
        *(
            f"| {text} | {per_second(name):,.0f} |"
            for name, text in (
                ("bare", "bare decode loop"),
                ("one", "loader, one worker"),
                ("two", "loader, two workers"),
                ("pillow", "Pillow, item by item"),
            )
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
