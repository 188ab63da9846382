"""How many wrong labels `megaclass data clean` finds: labels of Glyphs are flipped and classes doubled on purpose.

    megaclass data glyphs --classes 3000 --out datasets/glyphs-small
    python benchmarks/clean.py --data datasets/glyphs-small/train --seeds 1,2,3 --out benchmarks/clean.md train.epochs=1
    python benchmarks/clean.py --centres 2000000 --device cuda

    python benchmarks/clean.py --data datasets/glyphs-small/train --seeds 1,2 --others datasets/glyphs

For each seed a twentieth of the images get the label of another class, and of a fiftieth of the classes half of the images get
a new class. A model is trained on these labels by the recipe, and `megaclass data clean` looks at the same images. The settings
of the search were chosen on seed 0, which is not measured.

--others looks for the identities of tests in the training data, with the models of the first call. The characters of a test
are there, and 3,000 characters of the whole set that training does not have are not. Tests are in a design that training does
not have, or, if `megaclass data split --images 0.1` has made --data, images that were held out, in designs of training. The
settings of that search were chosen on seed 0 and the four designs.

--centres times the search for doubled classes alone, among random directions of which a thousandth are doubled.
"""

import argparse
import csv
import datetime
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import megaclass
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource
from megaclass.data.tools.pack import PackOptions, pack
from megaclass.data.tools.verify import SubsetSource
from megaclass.evaluation.images import SourceImages
from megaclass.evaluation.search import full_precision
from megaclass.evaluation.suspects import close_pairs, find_in_training, find_suspects

FLIPPED, DOUBLED = 0.05, 0.02


class WrongLabels(SubsetSource):
    """A source with flipped labels and doubled classes."""

    def __init__(self, inner: ImageSource, seed: int) -> None:
        super().__init__(inner, np.arange(inner.num_images))
        rng = np.random.default_rng(seed)
        labels, num_classes = np.array(inner.labels), inner.num_classes
        self.doubled = np.sort(rng.choice(num_classes, round(DOUBLED * num_classes), replace=False))
        for number, label in enumerate(self.doubled.tolist()):
            images = rng.permutation(np.flatnonzero(labels == label))
            labels[images[: len(images) // 2]] = num_classes + number
        self.num_classes = num_classes + len(self.doubled)
        self.identities = np.concatenate([np.arange(num_classes), self.doubled])
        """Identity of each class."""
        self.flipped = np.sort(rng.choice(len(labels), round(FLIPPED * len(labels)), replace=False))
        self.true_labels = labels.copy()
        for image in self.flipped.tolist():
            while self.identities[labels[image]] == self.identities[self.true_labels[image]]:
                labels[image] = rng.integers(self.num_classes)
        self.labels = labels


def measure(options: argparse.Namespace, seed: int) -> dict[str, float]:
    work = options.work / f"seed-{seed}"
    data, run = work / "data", work / "run"
    wrong = WrongLabels(open_source(options.data), seed)
    if not data.exists():
        pack(wrong, data, PackOptions(shuffle_seed=None))
    # pack orders images by class; the number of the image in the packed set is its place in that order.
    order = np.argsort(wrong.labels, kind="stable")
    python = [sys.executable, "-m", "megaclass"]
    started = time.monotonic()
    if not (run / "summary.json").exists():
        settings = [f"data.path={data}", f"train.run_dir={run}", f"train.seed={seed}", f"train.device={options.device}"]
        settings += ["export.onnx=false", *options.settings]
        subprocess.run([*python, "train", "--quiet", options.recipe, *settings, "--overwrite"], check=True)
    trained = time.monotonic()
    subprocess.run(
        [*python, "data", "clean", str(run), "--out", str(work / "review"), "--device", options.device], check=True
    )
    cleaned = time.monotonic()
    lines = (work / "review" / "findings.tsv").read_text().splitlines()[2:]
    found = [(row[1], row[2], int(row[3]), row[4]) for row in csv.reader(lines, delimiter="\t")]
    images = np.array(
        [order[int(image)] for kind, image, _, _ in found if kind in ("mislabelled", "outlier")], dtype=int
    )
    moved = {int(order[int(image)]): int(other) for kind, image, _, other in found if kind == "mislabelled"}
    pairs = [(label, int(other)) for kind, _, label, other in found if kind == "doubled"]
    right_pairs = {label for label, other in pairs if wrong.identities[label] == wrong.identities[other]}
    right_moves = sum(
        wrong.identities[moved[image]] == wrong.identities[wrong.true_labels[image]]
        for image in set(moved) & set(wrong.flipped.tolist())
    )
    num_flipped, num_images = len(wrong.flipped), wrong.num_images
    num_right = len(np.intersect1d(images, wrong.flipped))
    return {
        "seed": seed,
        "flipped found": num_right / num_flipped,
        "moved to the right class": right_moves / num_flipped,
        "images wrongly accused": (len(images) - num_right) / (num_images - num_flipped),
        "doubled found": len(right_pairs) / len(wrong.doubled),
        "classes wrongly accused": (len(pairs) - len(right_pairs)) / wrong.num_classes,
        "training s": round(trained - started),
        "cleaning s": round(cleaned - trained),
    }


# Folders of the sets, and images per identity in each. `holdout` is what `megaclass data split --images` held out.
TESTS = (("validation", 1), ("test-a", 1), ("test-b", 1), ("test-c", 1), ("holdout", 1), ("holdout", 3))
NUM_OTHERS = 3000


def measure_tests(options: argparse.Namespace, seed: int) -> list[dict[str, float | str]]:
    work = options.work / f"seed-{seed}"
    model, source = megaclass.load(work / "run", device=options.device), open_source(work / "data")

    def embedded(images: ImageSource) -> NDArray[np.float32]:
        treated = SourceImages(source=images, image_size=model.image_size, fit=model.treatment.fit)
        return model.embed_source(treated, mirror=model.treatment.mirror)

    kept = work / "embeddings.npy"
    if not kept.exists():
        np.save(kept, embedded(source))
    rows, labels = np.load(kept), np.asarray(source.labels)
    suspects = find_suspects(rows, labels, source.num_classes, model.device)
    trained = names_of(options.data)
    known_names = set(trained)
    # Classes with the number of a character and those made by doubling it are both right.
    identities = WrongLabels(open_source(options.data), seed).identities

    def found_in(path: Path, wanted: Callable[[str], bool], per_identity: int) -> tuple[int, int, int]:
        """Returns how many identities there are, how many are found, and how many of these are the right ones."""
        test, names = open_source(path), names_of(path)
        rng = np.random.default_rng(0)
        order = rng.permutation(test.num_images)
        order = order[np.argsort(test.labels[order], kind="stable")]
        counts = np.bincount(test.labels, minlength=test.num_classes)
        chosen = [n for n in range(test.num_classes) if counts[n] >= per_identity and wanted(names[n])]
        chosen = rng.permutation(chosen)[:NUM_OTHERS].tolist()
        starts = np.cumsum(counts) - counts
        images = np.concatenate([order[starts[n] : starts[n] + per_identity] for n in chosen])
        test_labels = np.repeat(chosen, per_identity)
        found = find_in_training(embedded(SubsetSource(test, images)), test_labels, rows, labels, suspects)
        right = sum(trained[identities[label]] == names[number] for number, label, _, _ in found)
        return len(chosen), len(found), right

    results: list[dict[str, float | str]] = []
    for part, per_identity in TESTS:
        known = options.data.parent / part
        if not known.exists():
            continue
        others = options.others / ("train" if part == "holdout" else part)
        num_known, _, right = found_in(known, lambda name: True, per_identity)
        num_others, wrong, _ = found_in(others, lambda name: name not in known_names, per_identity)
        row = {"seed": seed, "test": part, "images per identity": per_identity}
        results.append(row | {"found": right / num_known, "wrongly accused": wrong / num_others})
        print(results[-1], flush=True)
    return results


def names_of(path: Path) -> list[str]:
    return (path / "classes.txt").read_text(encoding="utf-8").splitlines()


def time_centres(num_classes: int, width: int, device: str) -> None:
    generator = torch.Generator(device=device).manual_seed(0)
    rows = torch.randn(num_classes, width, generator=generator, device=device)
    num_doubled = num_classes // 1000
    rows[-num_doubled:] = rows[:num_doubled] + 0.3 * torch.randn(num_doubled, width, generator=generator, device=device)
    rows = torch.nn.functional.normalize(rows)
    seconds = []
    for _ in range(2):  # the first includes start-up
        started = time.monotonic()
        with full_precision():
            first, second = close_pairs(rows, 0.5)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    num_right = int((second - first == num_classes - num_doubled).sum())
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        "| centres | numbers each | device | first s | second s | doubled found | others found |\n|---|---|---|---|---|---|---|"
    )
    print(
        f"| {num_classes:,} | {width} | {name} | {seconds[0]:.1f} | {seconds[1]:.1f} | {num_right:,} of {num_doubled:,} "
        f"| {len(first) - num_right:,} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("datasets/glyphs-small/train"))
    parser.add_argument("--recipe", default="glyphs-small")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("runs/clean"))
    parser.add_argument("--centres", type=int, default=0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--others", type=Path, help="the whole set of glyphs: measure tests in the training data")
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    if options.centres:
        time_centres(options.centres, options.width, options.device)
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.others is None:
        rows: list[dict[str, float | str]] = [{**measure(options, seed)} for seed in seeds]
    else:
        rows = [row for seed in seeds for row in measure_tests(options, seed)]
    keys = list(rows[0])
    lines = [f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
    for row in rows:
        cells = [
            f"{row[key]:.2%}" if "found" in key or "right" in key or "wrongly" in key else f"{row[key]}" for key in keys
        ]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        when = datetime.date.today().isoformat()
        options.out.write_text(
            f"# Wrong labels that are found\n\n{when}, {options.device} of {platform.machine()}, torch {torch.__version__}:\n"
            f"`python benchmarks/clean.py --data {options.data} --seeds {options.seeds}`\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
