"""The loader alone: images per second by number of processes and threads, without a training step.

    python benchmarks/loader.py [--out benchmarks/loader.md] [--seconds 3]

Data: a .rec of drawn 112 x 112 JPEGs in the page cache. Batches of 512. With a GPU the batches go there, as in training. The
alternative in the same run: bare `simplejpeg.decode_jpeg` of the same bytes in as many processes, which neither chooses,
reads, collates nor delivers anything.
"""

import argparse
import datetime
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch

from megaclass.data.loader import BatchLoader
from megaclass.data.loading.choose import LoaderSettings, available_cores, choose_processes
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.synthesize import synthesize

BATCH, NUM_IDENTITIES, IMAGES_PER_IDENTITY = 512, 1024, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def speed(loader: BatchLoader, seconds: float) -> float:
    """Images per second after the batches that were prepared while the workers started."""
    batches = loader.batches(num_steps=10**9)
    for _ in range(24):
        next(batches)
    begun, number = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < seconds:
        next(batches)
        number += 1
    batches.close()  # type: ignore[attr-defined]
    return number * BATCH / elapsed


def in_processes(path: Path, num_processes: int, seconds: float) -> float:
    settings = LoaderSettings(path=str(path), num_processes=num_processes)
    source = open_source(path)
    loader = BatchLoader(source, global_batch=BATCH, processes=settings, device=DEVICE)
    return speed(loader, seconds)


def first_batch_s(path: Path, num_processes: int) -> float:
    """Seconds to the first batch; the fork server runs from the second time on."""
    settings = LoaderSettings(path=str(path), num_processes=num_processes)
    source = open_source(path)
    begun = time.perf_counter()
    batches = BatchLoader(source, global_batch=BATCH, processes=settings, device=DEVICE).batches(num_steps=10**9)
    next(batches)
    elapsed = time.perf_counter() - begun
    batches.close()  # type: ignore[attr-defined]
    return elapsed


def check_same_bytes(path: Path) -> None:
    """What is measured must be right: the same batches as from one thread, wherever they are."""
    source = open_source(path)
    settings = LoaderSettings(path=str(path), num_processes=3)
    there = BatchLoader(source, global_batch=BATCH, processes=settings, device=DEVICE).batches(num_steps=60)
    for batch, truth in zip(there, BatchLoader(source, global_batch=BATCH).batches(num_steps=60), strict=True):
        assert torch.equal(batch.images.cpu(), truth.images) and torch.equal(batch.labels.cpu(), truth.labels)
        assert batch.images.device.type == DEVICE.type
    print(f"60 batches are the same on {DEVICE} from 3 processes and from one thread", flush=True)


def decode_bare(path: Path, seconds: float, ready: "multiprocessing.Barrier", counts: "multiprocessing.Queue") -> None:
    import simplejpeg

    source = open_source(path)
    encoded = [source.read(index) for index in range(min(2048, source.num_images))]
    ready.wait()
    begun, number = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < seconds:
        for item in encoded[:256]:
            simplejpeg.decode_jpeg(item, "RGB")
        number += 256
    counts.put(number / elapsed)


def bare(path: Path, num_processes: int, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    ready, counts = context.Barrier(num_processes), context.Queue()
    workers = [context.Process(target=decode_bare, args=(path, seconds, ready, counts)) for _ in range(num_processes)]
    for worker in workers:
        worker.start()
    total = sum(counts.get() for _ in workers)
    for worker in workers:
        worker.join()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    cores = available_cores()
    counts = sorted({1, 2, 4, 8, 12, cores} & set(range(1, cores + 1)))
    lines = ["| data | decoders | img/s | bare decoding in as many processes | ratio |", "|---|---|---|---|---|"]

    def add(kind: str, decoders: str, images_per_second: float, alternative: float | None = None) -> None:
        ratio = "" if alternative is None else f"{images_per_second / alternative:.2f}"
        other = "" if alternative is None else f"{alternative:,.0f}"
        lines.append(f"| {kind} | {decoders} | {images_per_second:,.0f} | {other} | {ratio} |")
        print(lines[-1], flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "jpeg"
        synthesize(
            folder, num_identities=NUM_IDENTITIES, images_per_identity=IMAGES_PER_IDENTITY, image_size=112, num_pairs=20
        )
        source = open_source(folder)
        check_same_bytes(folder)
        for num_threads in sorted({1, min(8, cores)}):
            loader = BatchLoader(source, global_batch=BATCH, num_workers=num_threads)
            add("JPEG", f"{num_threads} threads of the rank", speed(loader, options.seconds))
        for num_processes in counts:
            alternative = bare(folder, num_processes, options.seconds)
            add(
                "JPEG",
                f"{num_processes} processes",
                in_processes(folder, num_processes, options.seconds),
                alternative,
            )
        first_s = [first_batch_s(folder, min(8, cores)) for _ in range(3)]
        chosen = choose_processes(str(folder), workers="auto", device=torch.device("cuda"), num_local_ranks=1)
    assert chosen is not None
    title = (
        f"{datetime.date.today()}, {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'no GPU'}, {cores} CPU cores "
        f"({os.cpu_count()} in the machine). Made by `python benchmarks/loader.py`;"
    )
    text = "\n".join(
        [
            "# The loader alone",
            "",
            title,
            f"data.workers = auto chooses {chosen.num_processes} processes here.",
            "",
            *lines,
            "",
            f"The first batch is there after {', '.join(f'{seconds:.1f}' for seconds in first_s)} s "
            f"with {min(8, cores)} processes.",
            "",
        ]
    )
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
