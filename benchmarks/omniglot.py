"""One-shot recognition of handwriting: Omniglot's two minimal splits, 20 published runs of 20 trials, mean over seeds.

    python benchmarks/omniglot.py --data FOLDER [--seeds 3] [--splits 1,2] [--out benchmarks/omniglot.md] [key=value ...]
    python benchmarks/omniglot.py --data FOLDER --recipe omniglot-minimal-cpu          # a small network, on a CPU

FOLDER holds images_background_small1.zip, images_background_small2.zip and all_runs.zip as published by the authors
(https://github.com/brendenlake/omniglot, folder python/). The network is trained by `megaclass train
omniglot-minimal` on five alphabets, each character in its rotations (and mirrored) as a class of its own. A trial
shows one image of each of 20 characters from an alphabet that is in neither split; the nearest embedding answers.
"""

import argparse
import datetime
import platform
import resource
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import megaclass
from megaclass.inference import LoadedModel

ROOT = Path(__file__).parents[1]
TURNS = {0: None, 90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def prepare(archive: Path, out: Path, *, is_mirrored: bool) -> None:
    """Unpacks SET/ALPHABET/characterNN/*.png into one folder per class: a character in one of its rotations."""
    if out.exists():
        return
    partial = out.with_name(out.name + ".partial")
    with zipfile.ZipFile(archive) as images:
        for name in sorted(images.namelist()):
            if not name.endswith(".png"):
                continue
            alphabet, character, file = Path(name).parts[-3:]
            with images.open(name) as stream:
                image = Image.open(stream).convert("L")
            for flip in (False, True)[: 1 + is_mirrored]:
                flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image
                for degrees, turn in TURNS.items():
                    folder = partial / f"{alphabet}-{character}-{degrees:03}{'m' if flip else ''}"
                    folder.mkdir(parents=True, exist_ok=True)
                    (flipped.transpose(turn) if turn is not None else flipped).save(folder / file)
    partial.rename(out)


def unpack_runs(archive: Path, out: Path) -> list[Path]:
    """Returns the folders of the 20 one-shot runs."""
    if not out.exists():
        partial = out.with_name(out.name + ".partial")
        with zipfile.ZipFile(archive) as files:
            files.extractall(partial)
        partial.rename(out)
    return sorted(path.parent for path in out.rglob("class_labels.txt"))


def one_shot_errors(model: LoadedModel, runs: list[Path]) -> list[float]:
    """Returns the share of wrong answers in each run: the nearest of the 20 known images must show the same character."""
    errors = []
    for run in runs:
        # Each line pairs a test image with the training image of the same character.
        pairs = [line.split() for line in (run / "class_labels.txt").read_text().splitlines() if line.strip()]
        root = run.parent
        known = sorted({answer for _, answer in pairs})
        tests = model.embed([root / test for test, _ in pairs], fit="squash")
        answers = (tests @ model.embed([root / name for name in known], fit="squash").T).argmax(1)
        errors.append(
            float(np.mean([known[choice] != right for choice, (_, right) in zip(answers, pairs, strict=True)]))
        )
    return errors


def cpu_seconds() -> float:
    """Returns the user and system time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(recipe: str, data: Path, run_dir: Path, seed: int, settings: list[str]) -> tuple[float, float]:
    """Trains by the command and returns the seconds and the CPU seconds it took."""
    started, cpu_before = time.monotonic(), cpu_seconds()
    command = [sys.executable, "-m", "megaclass", "train", "--quiet", recipe, f"data.path={data}"]
    command += [f"train.run_dir={run_dir}", f"train.seed={seed}", *settings]
    subprocess.run([*command, "--overwrite"], check=True)
    return time.monotonic() - started, cpu_seconds() - cpu_before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, default=Path("datasets/omniglot"), help="folder for unpacked images and runs"
    )
    parser.add_argument("--splits", default="1,2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--no-mirrored-classes", dest="is_mirrored", action="store_false")
    parser.add_argument("--device", help="default: as the recipe says, or the CPU if there is no GPU")
    parser.add_argument("--recipe", default="omniglot-minimal")
    parser.add_argument("--label", help="name of the row in the table; default: the recipe")
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="settings as for `megaclass train`")
    options = parser.parse_args()
    label = options.label or options.recipe
    device = options.device or (None if torch.cuda.is_available() else "cpu")
    settings = [*([f"train.device={device}"] if device else []), *options.settings]
    runs = unpack_runs(options.data / "all_runs.zip", options.work / "runs")
    classes = "mirrored" if options.is_mirrored else "rotated"
    rows = []
    for split in options.splits.split(","):
        data = options.work / f"split{split}-{classes}"
        prepare(options.data / f"images_background_small{split}.zip", data, is_mirrored=options.is_mirrored)
        errors, seconds, cpu = [], [], []
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            run_dir = options.work / "trained" / f"{label.replace('/', '-')}-split{split}-seed{seed}"
            took = train(options.recipe, data, run_dir, seed, settings)
            seconds.append(took[0])
            cpu.append(took[1])
            errors.append(statistics.mean(one_shot_errors(megaclass.load(run_dir), runs)))
            shown = f"{errors[-1]:.2%} in {took[0]:.0f} s, {took[1]:.0f} CPU s"
            print(f"{label}, split {split}, seed {seed}: {shown}", flush=True)
        rows.append((split, errors, seconds, cpu))
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    lines = [
        f"{datetime.date.today()}, {machine}, torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| settings | split | one-shot error, mean over seeds | each seed | training, seconds | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    for split, errors, seconds, cpu in rows:
        each = ", ".join(f"{error:.2%}" for error in errors)
        lines.append(
            f"| {label} | {split} | {statistics.mean(errors):.2%} | {each} | {statistics.mean(seconds):.0f} "
            f"| {statistics.mean(cpu):.0f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        with options.out.open("a") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
