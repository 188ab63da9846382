"""Seconds per epoch of training on features: the trainer's steps against a plain loop of torch, in turns on the same file.

    python benchmarks/features.py                                              # a small size, for CPUs
    python benchmarks/features.py --rows 10000000 --width 512 --classes 1000000 --batch 4096 --folder /tmp/features
    python benchmarks/features.py … --out benchmarks/features.md               # also write the table

The features are drawn: a direction per class, and noise. Both sides read random rows of the mapped file, or all of them
from the memory of the GPU (`data.on_gpu`), and train a linear layer, a CosFace margin and SGD with momentum. The plain loop
forms all logits. Each runs STEPS steps after a warm-up; an epoch is extrapolated from them.
"""

import argparse
import datetime
import gc
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaclass.config.read import load_config_values
from megaclass.data.sources.features import FeatureSource
from megaclass.data.sources.open_source import open_source
from megaclass.training.model.build import build_model
from megaclass.training.run.run import make_loader
from megaclass.training.step import training_step
from megaclass_launch.ranks.process_group import choose_device, process_group
from megaclass_launch.world import World

WARM_UP, BLOCK = 5, 1 << 18
SCALE, MARGIN, LR, MOMENTUM, WEIGHT_DECAY = 32.0, 0.1, 0.1, 0.9, 5e-4


def draw(folder: Path, num_rows: int, width: int, num_classes: int, device: torch.device) -> Path:
    """Writes features in float16 and their labels, unless they are there."""
    path = folder / f"{num_rows}x{width}-{num_classes}.npy"
    if path.with_suffix(".labels.npy").is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    centres_CD = torch.randn(num_classes, width, device=device, generator=generator)
    labels_N = torch.arange(num_rows) % num_classes
    rows_NW = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(num_rows, width))
    for start in range(0, num_rows, BLOCK):
        own_B = labels_N[start : start + BLOCK].to(device)
        noise_BD = torch.randn(len(own_B), width, device=device, generator=generator)
        rows_NW[start : start + len(own_B)] = (centres_CD[own_B] + noise_BD).half().cpu().numpy()
    np.save(path.with_suffix(".labels.npy"), labels_N.numpy())
    return path


def timed(steps: Iterator[Tensor], num_steps: int, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a step and the last loss."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(WARM_UP):
        next(steps)
    wait()
    begun = time.perf_counter()
    for _ in range(num_steps):
        loss = next(steps)
    wait()
    return (time.perf_counter() - begun) / num_steps, float(loss)


def trainer(
    source: FeatureSource, batch: int, rate: float, is_resident: bool, device: torch.device
) -> Iterator[Tensor]:
    """Yields the loss of each step of `megaclass train`."""
    width = source.image_size[1]
    config = load_config_values(
        {
            "data": {"path": str(source.path), "on_gpu": is_resident},
            "backbone": {"name": "linear", "embedding_dim": width},
            "head": {"margin": "cosface", "margin_size": MARGIN, "scale": SCALE, "sample_rate": rate},
            "optimizer": {"lr": LR},
            "train": {"run_dir": "unused", "global_batch": batch},
        },
        where="benchmark",
    )
    loader = make_loader(config, source, World(), device)
    model = build_model(config, source, World(), device)
    model.parallel.train()
    for step, loaded in enumerate(loader.batches(num_steps=10**9)):
        yield training_step(model, loaded, config, lr=LR, step=step, device=device).loss


def plain_loop(source: FeatureSource, batch: int, is_resident: bool, device: torch.device) -> Iterator[Tensor]:
    """Yields the loss of each step of a loop that forms all logits."""
    width, labels_N = source.image_size[1], torch.from_numpy(source.labels)
    features_NW = source.features_NW.to(device) if is_resident else source.features_NW
    torch.manual_seed(0)
    layer = nn.Linear(width, width).to(device)
    centres_CD = nn.Parameter(0.01 * torch.randn(source.num_classes, width, device=device))
    weights = [*layer.parameters(), centres_CD]
    fused = device.type == "cuda"
    optimizer = torch.optim.SGD(weights, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused)
    while True:
        for places_B in torch.randperm(len(labels_N)).split(batch):
            rows_BW = features_NW[places_B.to(features_NW.device)].to(device, non_blocking=True).float()
            labels_B = labels_N[places_B].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=fused):
                logits_BC = SCALE * F.linear(F.normalize(layer(rows_BW)), F.normalize(centres_CD))
                logits_BC[torch.arange(len(labels_B), device=device), labels_B] -= SCALE * MARGIN
                loss = F.cross_entropy(logits_BC, labels_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megaclass-features"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    world = World()
    device = choose_device("auto", world)
    lines = []
    with process_group(world, device=device.type):
        source = open_source(draw(options.folder, options.rows, options.width, options.classes, device))
        assert isinstance(source, FeatureSource)
        places = ("file", "GPU") if device.type == "cuda" else ("file",)
        best: dict[tuple[str, str], tuple[float, float, float]] = {}
        for _ in range(options.rounds):
            for place in places:
                is_resident = place == "GPU"
                for name in ("plain loop of torch", "megaclass", "megaclass, a tenth of the negatives"):
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    steps = (
                        plain_loop(source, options.batch, is_resident, device)
                        if name.startswith("plain")
                        else trainer(source, options.batch, 0.1 if "tenth" in name else 1.0, is_resident, device)
                    )
                    seconds, loss = timed(steps, options.steps, device)
                    gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
                    best[name, place] = min(best.get((name, place), (np.inf, 0.0, 0.0)), (seconds, loss, gib))
                    del steps
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
    hardware = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()}, CPU, {torch.get_num_threads()} thread(s)"
    )
    command = (
        f"python benchmarks/features.py --rows {options.rows} --width {options.width} --classes {options.classes} "
        f"--batch {options.batch} --steps {options.steps}"
    )
    lines = [
        f"{datetime.date.today()}, {hardware}, torch {torch.__version__}. Made by",
        f"`{command}`:",
        f"{options.rows:,} × {options.width} features in float16, {options.classes:,} classes, batches of {options.batch:,};",
        f"the faster of {options.rounds} rounds of {options.steps} steps in turns; an epoch is extrapolated.",
        "",
        "| | rows from | seconds per epoch | rows/s | GiB of the GPU | loss after the steps |",
        "|---|---|---|---|---|---|",
    ]
    for (name, place), (seconds, loss, gib) in best.items():
        rate = options.batch / seconds
        memory = f"{gib:.1f}" if gib else "–"
        lines.append(f"| {name} | {place} | {options.rows / rate:,.1f} | {rate:,.0f} | {memory} | {loss:.2f} |")
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("# Training on features\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
