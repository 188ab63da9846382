"""Dynamic margins on rare classes of Glyphs: macro top-1 with margins by class count against one margin for all.

    megaclass data glyphs --classes 3000 --out datasets/glyphs-small
    python benchmarks/rare_classes.py --data datasets/glyphs-small --out benchmarks/rare_classes.md

Every third class is rare: it keeps two or three of its training images. Network, optimizer and augmentation are those of
the recipe glyphs-small; the head is ArcFace with one margin, or DynamicArcFace. Of five and of three candidates the best
macro top-1 on the rare classes of the validation design is taken (with seed 0). The table has the chosen ones on test A, a
design that neither training nor the choice has seen, for each seed. The closest centre answers, among all classes.
"""

import argparse
import datetime
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megaclass import ArcFace, DynamicArcFace, PartialFC, RowSGD
from megaclass.backbones import build_backbone
from megaclass.config.read import load_config, recipe_path
from megaclass.data.augment import parse_augment
from megaclass.data.decode import decode_batch
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource
from megaclass.head.margins import Margin
from megaclass.training.schedule import learning_rate

SCALE = 32.0
ONE_MARGIN = [ArcFace(scale=SCALE, margin=size) for size in (0.0, 0.05, 0.1, 0.2, 0.3)]
BY_COUNT = [
    DynamicArcFace(scale=SCALE, factor=factor, exponent=exponent, offset=offset)
    for factor, exponent, offset in ((0.45, 0.25, 0.05), (0.3, 0.25, 0.0), (0.3, 0.5, 0.15))
]


class Subset:
    """Some images of a source, of its first classes, decoded in memory."""

    def __init__(self, source: ImageSource, rows: NDArray[np.int64], num_classes: int) -> None:
        self.num_images, self.num_classes, self.image_size = len(rows), num_classes, source.image_size
        self.labels = source.labels[rows]
        height, width = self.image_size
        self._pixels = np.empty((len(rows), height, width), dtype=np.uint8)
        for block in np.array_split(np.arange(len(rows)), -(-len(rows) // 1024)):
            images = [source.read(int(row)) for row in rows[block]]
            self._pixels[block] = decode_batch(images, self.image_size, [""] * len(block))[..., 0]

    def pixels(self, indices: NDArray[np.int64], image_size: tuple[int, int]) -> NDArray[np.uint8]:
        return np.repeat(self._pixels[indices][..., None], 3, axis=3)

    def read(self, index: int) -> bytes:
        return self._pixels[index].tobytes()

    def name_of(self, index: int) -> str:
        return f"image {index}"

    def describe(self) -> str:
        return f"{self.num_images:,} images of {self.num_classes:,} classes"


def is_rare(classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    return classes % 3 == 0


def training_rows(source: ImageSource, num_classes: int) -> NDArray[np.int64]:
    """Returns the images of the first classes; of rare classes two, or three for every other one."""
    generator, kept = np.random.default_rng(0), []
    order = np.argsort(source.labels, kind="stable")
    starts = np.searchsorted(source.labels[order], np.arange(num_classes + 1))
    for number in range(num_classes):
        rows = order[starts[number] : starts[number + 1]]
        kept.append(generator.permutation(rows)[: 2 + number // 3 % 2] if number % 3 == 0 else rows)
    return np.sort(np.concatenate(kept))


def train(source: Subset, margin: Margin, seed: int, epochs: float) -> tuple[nn.Module, PartialFC]:
    torch.manual_seed(seed)
    config = load_config(recipe_path(Path("glyphs-small")), [f"train.epochs={epochs}"])
    batch = config.train.global_batch
    loader = BatchLoader(
        source, global_batch=batch, seed=seed, mirror=False, augment=parse_augment(config.data.augment)
    )
    num_steps = round(epochs * loader.steps_per_epoch)
    network = build_backbone(config.backbone.name, embedding_dim=config.backbone.embedding_dim, image_size=48)
    network.to(memory_format=torch.channels_last)
    head = PartialFC(
        config.backbone.embedding_dim,
        source.num_classes,
        margin=margin,
        class_counts=torch.from_numpy(np.bincount(source.labels, minlength=source.num_classes)),
        optimizer=RowSGD(momentum=config.head.momentum, weight_decay=config.head.weight_decay),
        seed=seed,
    )
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=config.optimizer.lr,
        momentum=config.optimizer.momentum,
        weight_decay=config.optimizer.weight_decay,
    )
    for step, loaded in enumerate(loader.batches(num_steps=num_steps)):
        lr = learning_rate(config.optimizer, step, num_steps, loader.steps_per_epoch)
        optimizer.param_groups[0]["lr"] = lr
        loss = head(network(loaded.prepared(torch.device("cpu"))), loaded.labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        head.step(lr=lr)
    return network.eval(), head


@torch.inference_mode()
def macro_top1(network: nn.Module, head: PartialFC, source: Subset) -> tuple[float, float]:
    """Returns the mean over the rare classes, and over the others, of the share of their images that is classified right."""
    is_right = []
    for rows in np.array_split(np.arange(source.num_images), -(-source.num_images // 512)):
        images = torch.from_numpy(source.pixels(rows, source.image_size)).permute(0, 3, 1, 2)
        answers = head.predict(network(images.float().div(127.5).sub(1)))[0][:, 0].numpy()
        is_right.append(answers == source.labels[rows])
    right = np.concatenate(is_right)
    classes = np.unique(source.labels)
    shares = np.array([right[source.labels == number].mean() for number in classes])
    return float(shares[is_rare(classes)].mean()), float(shares[~is_rare(classes)].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that `megaclass data glyphs` wrote")
    parser.add_argument("--classes", type=int, default=1500, help="the first classes of the set are used")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = {name: open_source(options.data / name) for name in ("train", "validation", "test-a")}
    sources = {
        name: Subset(one, np.flatnonzero(one.labels < options.classes), options.classes)
        for name, one in parts.items()
        if name != "train"
    }
    source = Subset(parts["train"], training_rows(parts["train"], options.classes), options.classes)
    started = time.process_time()
    lines = [
        f"{datetime.date.today()}, one thread of a CPU ({platform.machine()}), torch {torch.__version__}; "
        f"{source.describe()}, of which every third class has two or three; {options.epochs:g} epochs.",
        "",
        "| margin | validation, rare classes | other classes |",
        "|---|---|---|",
    ]
    print("\n".join(lines), flush=True)

    def add(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    chosen: list[Margin] = []
    kept = {}
    for candidates in (ONE_MARGIN, BY_COUNT):
        found: list[tuple[float, Margin]] = []
        for margin in candidates:
            kept[margin] = train(source, margin, 0, options.epochs)
            rare, others = macro_top1(*kept[margin], sources["validation"])
            add(f"| `{margin}` | {rare:.2%} | {others:.2%} |")
            found.append((rare, margin))
        chosen.append(max(found, key=lambda pair: pair[0])[1])
    lines += ["", "| chosen margin | seed | test A, rare classes | other classes |", "|---|---|---|---|"]
    print("\n".join(lines[-3:]), flush=True)
    results: dict[Margin, list[tuple[float, float]]] = {margin: [] for margin in chosen}
    for seed in range(options.seeds):
        for margin in chosen:
            models = kept[margin] if seed == 0 else train(source, margin, seed, options.epochs)
            results[margin].append(macro_top1(*models, sources["test-a"]))
            add(f"| `{margin}` | {seed} | {results[margin][-1][0]:.2%} | {results[margin][-1][1]:.2%} |")
    for margin, shares in results.items():
        mean = [statistics.mean(column) for column in zip(*shares, strict=True)]
        add(f"| `{margin}` | mean | {mean[0]:.2%} | {mean[1]:.2%} |")
    differences = [b[0] - a[0] for a, b in zip(*results.values(), strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    add("")
    add(
        f"By class count minus one margin, rare classes: {100 * statistics.mean(differences):+.2f} points "
        f"(standard deviation over the seeds {100 * spread:.2f}). {time.process_time() - started:.0f} s of CPU."
    )
    if options.out:
        text = "# Dynamic margins on rare classes\n\nMade by [rare_classes.py](rare_classes.py).\n\n"
        options.out.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
