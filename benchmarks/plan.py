"""`megaclass plan` against reality: predicted and measured peak memory and images per second of six training steps.

    python benchmarks/plan.py [--out benchmarks/plan.md] [--predict]

Needs a GPU of the table in packages/megaclass/src/megaclass/capacity/job.py; --predict prints the predictions only, on any
machine. Each row
builds the model as `megaclass train` does and takes whole steps on random images that are already on the device.
"""

import argparse
import datetime
import gc
import sys
import time
from pathlib import Path

import numpy as np
import torch

from megaclass.capacity.job import PlannedJob, gpu_named, head_costs
from megaclass.capacity.memory import plan_memory
from megaclass.capacity.speed import step_time
from megaclass.config.read import load_config_values
from megaclass.config.schema import Config
from megaclass.data.loader import Batch
from megaclass.training.model.build import build_model
from megaclass.training.step import training_step
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

MILLION = 1_000_000
# backbone, images, classes, sample rate, train.compile
ROWS = [
    ("iresnet50", 512, MILLION, 1.0, False),
    ("iresnet50", 512, 10 * MILLION, 0.1, False),
    ("iresnet100", 512, MILLION, 0.1, False),
    ("iresnet100", 512, 10 * MILLION, 1.0, False),
    ("vit_b", 256, MILLION, 1.0, False),
    ("vit_b", 256, 10 * MILLION, 0.1, True),
]
WARM_UP, TIMED = 6, 20
GIB = 2**30


class RandomImages:
    """What build_model asks of a source."""

    image_size = (112, 112)

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes


def settings(name: str, batch: int, rate: float, is_compiled: bool) -> Config:
    tables = {
        "data": {"path": "unused"},
        "backbone": {"name": name, "embedding_dim": 512},
        "head": {"margin": "arcface", "sample_rate": rate},
        "train": {"run_dir": "unused", "global_batch": batch, "compile": is_compiled},
    }
    return load_config_values(tables, where="benchmark")


def job_of(config: Config, num_classes: int, gpu_name: str | None) -> PlannedJob:
    return PlannedJob(
        config=config,
        gpu=gpu_named(gpu_name),
        num_ranks=1,
        ranks_per_host=1,
        num_classes=num_classes,
        num_images=10 * num_classes,
        image_size=(112, 112),
        network=1e9,
    )


def measure(config: Config, num_classes: int, device: torch.device) -> tuple[float, float, float]:
    """Returns peak bytes over everything, peak bytes of the steps alone, and images per second."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build_model(config, RandomImages(num_classes), World(), device)  # type: ignore[arg-type]
    building = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.parallel.train()
    batch = config.train.global_batch
    images = torch.randint(0, 256, (batch, 3, 112, 112), dtype=torch.uint8, device=device)
    labels = torch.randint(num_classes, (batch,), device=device)
    on_device = Batch(images=images, labels=labels, indices=np.arange(batch), epoch=0, step=0)

    def steps(count: int) -> None:
        for _ in range(count):
            training_step(model, on_device, config, lr=1e-3, step=0, device=device)

    steps(WARM_UP)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    steps(TIMED)
    torch.cuda.synchronize()
    speed = TIMED * batch / (time.perf_counter() - begun)
    stepping = torch.cuda.max_memory_allocated()
    return max(building, stepping), stepping, speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--predict", action="store_true", help="print the predictions for an H200, measure nothing")
    options = parser.parse_args()
    if not options.predict and not torch.cuda.is_available():
        sys.exit("benchmarks/plan.py needs a GPU, or --predict.")
    lines = [
        "| backbone | batch | classes | r | compiled | GiB predicted | measured | ratio | img/s predicted | measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    measured = {}
    if not options.predict:
        with process_group(World()) as device:
            for row in ROWS:
                measured[row] = measure(settings(row[0], row[1], row[3], row[4]), row[2], device)
                peak, stepping, speed = measured[row]
                print(
                    row, f"{peak / GIB:.2f} GiB, steps alone {stepping / GIB:.2f} GiB, {speed:,.0f} img/s", flush=True
                )
    for row in ROWS:
        name, batch, num_classes, rate, is_compiled = row
        job = job_of(settings(name, batch, rate, is_compiled), num_classes, "h200" if options.predict else None)
        memory, seconds = plan_memory(job), step_time(job)
        print(row, memory.peak_moment, {k: round(v / GIB, 2) for k, v in memory.parts.items()})
        print({k: round(1e3 * v, 2) for k, v in vars(seconds).items()}, head_costs(job), flush=True)
        cells = [name, batch, f"{num_classes:,}", rate, "yes" if is_compiled else "no", f"{memory.peak / GIB:.2f}"]
        predicted = batch / seconds.compute
        if options.predict:
            cells += ["", "", f"{predicted:,.0f}", "", ""]
        else:
            peak, _, speed = measured[row]
            cells += [f"{peak / GIB:.2f}", f"{memory.peak / peak:.3f}"]
            cells += [f"{predicted:,.0f}", f"{speed:,.0f}", f"{predicted / speed:.3f}"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        print(lines[-1], flush=True)
    if options.out is not None:
        write(lines, options.out)


def write(lines: list[str], out: Path) -> None:
    title = (
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}; 112 x 112, ArcFace, D = 512, "
        f"SGD with momentum, bf16; {TIMED} steps after {WARM_UP}.\nMemory is `torch.cuda.max_memory_allocated`, building "
        "included. Predictions are those of `megaclass plan`, ratios are predicted / measured;\nrequired: memory within "
        "10 %, images per second within 15 %.\n"
    )
    out.write_text("\n".join(["# The plan against reality", "", title, *lines, ""]))


if __name__ == "__main__":
    main()
