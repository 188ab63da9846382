"""Measures images per second for each stage of loading: reading, decoding, collating, augmenting."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megaclass.data.augment import AUGMENTATIONS, Augment
from megaclass.data.decode import decode_image
from megaclass.data.loader import BatchLoader
from megaclass.data.order import rank_batch
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass.progress import OnProgress, no_progress


@dataclass(frozen=True)
class StageSpeed:
    """Speed of one stage alone."""

    stage: str
    images_per_second: float
    cpu_s_per_1000: float
    """CPU seconds of this process per thousand images, over all its threads."""


def bench_stages(
    source: ImageSource,
    *,
    num_threads: int,
    batch: int,
    seconds: float,
    device: torch.device,
    on_progress: OnProgress = no_progress,
) -> list[StageSpeed]:
    """Runs each stage alone for `seconds`, over the same shuffled images."""
    batch = min(batch, source.num_images)
    loader = BatchLoader(source, global_batch=batch, max_bad_fraction=1.0)
    many = BatchLoader(source, global_batch=batch, max_bad_fraction=1.0, num_workers=num_threads)
    every = Augment(tuple((name, 0.2) for name in AUGMENTATIONS))
    augmented = BatchLoader(source, global_batch=batch, max_bad_fraction=1.0, augment=every)
    first = loader.load(0, 0)
    indices = rank_batch(loader.order, 0, 0, 0, 1).tolist()
    encoded = [source.read(index) for index in indices if index not in loader.bad_images.indices]
    ready = augmented.load(0, 0)
    batches = iter(many.batches(num_steps=10**9))

    def step_of(number: int) -> tuple[int, int]:
        return divmod(number, loader.steps_per_epoch)

    def read(number: int) -> None:
        for index in rank_batch(loader.order, *step_of(number), 0, 1).tolist():
            # The loader names bad images.
            with contextlib.suppress(DataError):
                source.read(index)

    def decode(number: int) -> None:
        for item in encoded:
            decode_image(item, "an image")

    stages: list[tuple[str, Callable[[int], object]]] = [
        ("read", read),
        ("decode", decode),
        ("read + decode + collate", lambda number: loader.load(*step_of(number))),
        (f"loader, {num_threads} threads", lambda number: next(batches)),
        ("to the device, mirror, normalise", lambda number: _finished(first.prepared(device))),
        ("the same with every augmentation", lambda number: _finished(ready.prepared(device))),
    ]
    speeds = []
    try:
        for number, (name, work) in enumerate(stages, start=1):
            speeds.append(_measure(name, work, batch, seconds))
            on_progress(number, len(stages))
        return speeds
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def read_and_decode_rate(source: ImageSource, *, seconds: float, batch: int = 64) -> float:
    """Returns how many images per second one thread reads and decodes, measured for `seconds`."""
    batch = min(batch, source.num_images)
    loader = BatchLoader(source, global_batch=batch, max_bad_fraction=1.0)
    steps = loader.steps_per_epoch
    return _measure("", lambda number: loader.load(*divmod(number, steps)), batch, seconds).images_per_second


def _measure(name: str, work: Callable[[int], object], batch: int, seconds: float) -> StageSpeed:
    work(0)
    begun, begun_cpu, number = time.perf_counter(), time.process_time(), 0
    while (elapsed := time.perf_counter() - begun) < seconds or number == 0:
        number += 1
        work(number)
    cpu_s = time.process_time() - begun_cpu
    return StageSpeed(name, number * batch / elapsed, 1000 * cpu_s / (number * batch))


def _finished(images: torch.Tensor) -> torch.Tensor:
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)
    return images
