"""A whole training step on one GPU, and where its time goes.

    python benchmarks/step.py [--out benchmarks/step-h200.md] [--quick]
    python benchmarks/step.py --graphs

Each row runs two ways in the same process: as `megaclass train` does it (bf16, channels last; a transformer with
train.compile=true) and eager in float16, NCHW, with a loss scale. Images are random and stay on the device: what is timed is
the step, not the loader. --graphs compares train.cuda_graph off and on instead, in turns, with few classes.
"""

import argparse
import datetime
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megaclass.backbones import build_backbone
from megaclass.config.read import load_config_values
from megaclass.config.schema import Config
from megaclass.data.loader import Batch
from megaclass.distributed.data_parallel import data_parallel
from megaclass.training.model.build import Model, build_model
from megaclass.training.step import training_step
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

ROWS = [
    ("iresnet50", 512, 1_048_576, 1.0),
    ("iresnet100", 512, 1_048_576, 1.0),
    ("iresnet50", 512, 2_097_152, 0.1),
    ("vit_b", 256, 1_048_576, 0.3),
]
WARM_UP, TIMED, ROUNDS = 8, 20, 3
GRAPH_ROWS = [
    ("iresnet50", 64),
    ("iresnet50", 128),
    ("iresnet50", 256),
    ("iresnet50", 512),
    ("iresnet18", 128),
    ("mbf", 128),
]
GRAPH_CLASSES, GRAPH_TIMED = 20_000, 15
AIMS = [
    "InsightFace's step as shipped, measured earlier on the same kind of machine: r50 1,858 img/s, r100 1,373, r50 with",
    "2,097,152 classes 2,144, ViT-B 1,137. Required: r50 6,500, r100 3,800; aimed at: 8,000 and 4,800.",
]


class RandomImages:
    """What build_model asks of a source."""

    image_size = (112, 112)

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes


def settings(name: str, batch: int, rate: float, is_ours: bool) -> Config:
    tables = {
        "data": {"path": "unused"},
        "backbone": {"name": name, "embedding_dim": 512},
        "head": {"margin": "arcface", "sample_rate": rate},
        "train": {
            "run_dir": "unused",
            "global_batch": batch,
            "compile": is_ours and name.startswith("vit"),
            "precision": "bf16" if is_ours else "fp16",
        },
    }
    return load_config_values(tables, where="benchmark")


def milliseconds(action: Callable[[], object]) -> float:
    """Of one call in a row of TIMED, as in training: the host runs ahead, nothing waits in between. Median of ROUNDS rows."""
    for _ in range(WARM_UP):
        action()
    rounds = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(TIMED):
            action()
        stop.record()
        stop.synchronize()
        rounds.append(start.elapsed_time(stop) / TIMED)
    return statistics.median(rounds)


def parts(model: Model, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of the backbone (forward and backward) and of the head (forward, backward, update), each alone."""
    x = images.float().div(127.5).sub(1).to(memory_format=torch.channels_last)

    def backbone() -> None:
        with torch.autocast("cuda", model.precision.dtype):
            model.parallel(x).float().sum().backward()

    embeddings = torch.randn(len(images), 512, device=images.device, dtype=model.precision.dtype, requires_grad=True)

    def head() -> None:
        model.head(embeddings, labels).backward()
        model.head.step(lr=0.0)

    return milliseconds(backbone), milliseconds(head)


def eager_step(model: Model, images: torch.Tensor, labels: torch.Tensor) -> None:
    """The alternative: float16, NCHW, uncompiled, with our head and a loss scale."""
    model.optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        embeddings = model.parallel(images.float().div(127.5).sub(1))
    (model.head(embeddings, labels) * model.loss_scale.scale).backward()
    gradients = [parameter.grad for parameter in model.backbone.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, 1 / model.loss_scale.scale)
    torch.nn.utils.clip_grad_norm_(model.backbone.parameters(), 5.0)
    model.optimizer.step()
    model.head.step(lr=0.0, loss_scale=model.loss_scale.scale)


def measure(name: str, batch: int, num_classes: int, rate: float, is_ours: bool, device: torch.device) -> list[float]:
    """img/s, GiB, then milliseconds: whole step, backbone, head."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = settings(name, batch, rate, is_ours)
    model = build_model(config, RandomImages(num_classes), World(), device)  # type: ignore[arg-type]
    if not is_ours:
        plain = build_backbone(name, embedding_dim=512, image_size=112).to(device)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)
        model = replace(model, backbone=plain, parallel=data_parallel(plain), optimizer=optimizer)
    model.parallel.train()
    images = torch.randint(0, 256, (batch, 3, 112, 112), dtype=torch.uint8, device=device)
    labels = torch.randint(num_classes, (batch,), device=device)
    on_device = Batch(images=images, labels=labels, indices=np.arange(batch), epoch=0, step=0)
    if is_ours:
        whole = milliseconds(lambda: training_step(model, on_device, config, lr=1e-3, step=0, device=device))
    else:
        whole = milliseconds(lambda: eager_step(model, images, labels))
    memory = torch.cuda.max_memory_allocated() / 2**30
    backbone, head = parts(model, images, labels)
    return [batch / whole * 1000, memory, whole, backbone, head]


def print_graphs_table(device: torch.device) -> None:
    """Steps with and without CUDA graphs of the backbone, whatever the size. In turns: machines slow down and recover."""
    print("| backbone | batch | train.cuda_graph | img/s | step ms | host ms | GiB allocated | GiB reserved |")
    print("|---|---|---|---|---|---|---|---|")
    for name, batch in GRAPH_ROWS:
        for setting in ("off", "on") * 2:
            print(f"| {name} | {batch} | {setting} | {graphs_cells(name, batch, setting, device)} |", flush=True)
    print("\nHost: time in which the host starts a step while the GPU has nothing else to do.")


def graphs_cells(name: str, batch: int, setting: str, device: torch.device) -> str:
    """Returns the measured cells of one row of the table."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = settings(name, batch, 1.0, True)
    config = replace(config, train=replace(config.train, cuda_graph=setting))  # type: ignore[arg-type]
    step = new_step(config, GRAPH_CLASSES, device)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    # One step at a time: the queue has room for about 1,000 launches, and a host that is far ahead waits for the GPU.
    host_s = []
    for _ in range(6):
        begun = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(GRAPH_TIMED):
        step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - begun) / GRAPH_TIMED
    peaks = [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
    cells = [f"{batch / step_s:,.0f}", f"{step_s * 1e3:.1f}", f"{statistics.median(host_s) * 1e3:.1f}"]
    return " | ".join([*cells, *(f"{peak:.2f}" for peak in peaks)])


def new_step(config: Config, num_classes: int, device: torch.device) -> Callable[[], object]:
    """Returns a training step of a new model on random images that stay on the device."""
    model = build_model(config, RandomImages(num_classes), World(), device)  # type: ignore[arg-type]
    model.parallel.train()
    batch = config.train.global_batch
    images = torch.randint(0, 256, (batch, 3, 112, 112), dtype=torch.uint8, device=device)
    batch_on_device = Batch(
        images=images.contiguous(memory_format=torch.channels_last),
        labels=torch.randint(num_classes, (batch,), device=device),
        indices=np.arange(batch),
        epoch=0,
        step=0,
        index_tensor=torch.arange(batch, device=device),
    )
    return lambda: training_step(model, batch_on_device, config, lr=1e-3, step=0, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="the first row only")
    parser.add_argument("--graphs", action="store_true", help="print a table of steps without and with CUDA graphs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/step.py needs a GPU.")
    lines = [
        "| backbone | batch | classes | r | img/s | GiB | step ms | backbone ms | head ms | eager fp16 NCHW img/s | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    with process_group(World()) as device:
        if options.graphs:
            print_graphs_table(device)
            return
        for name, batch, num_classes, rate in ROWS[:1] if options.quick else ROWS:
            ours = measure(name, batch, num_classes, rate, True, device)
            print(name, batch, num_classes, rate, [round(value, 1) for value in ours], flush=True)
            theirs = measure(name, batch, num_classes, rate, False, device)
            cells = [name, batch, f"{num_classes:,}", rate, f"{ours[0]:,.0f}", *(f"{value:.1f}" for value in ours[1:])]
            cells += [f"{theirs[0]:,.0f}", f"{ours[0] / theirs[0]:.2f}"]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
            print(lines[-1], flush=True)
            write(lines, options.out)


def write(lines: list[str], out: Path | None) -> None:
    """After every row: a run that is cut short keeps what it measured."""
    title = (
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}; 112 x 112, ArcFace, D = 512, "
        f"SGD with momentum; median of {ROUNDS} rows of {TIMED} steps. Ours: bf16, channels last,\n"
        "the defaults of `megaclass train` (vit_b with train.compile=true). The rest of a step is the backbone's optimizer.\n"
    )
    if out is not None:
        out.write_text("\n".join(["# A training step on one GPU", "", title, *lines, "", *AIMS, ""]))


if __name__ == "__main__":
    main()
