"""Does a teacher help a small network? Top-1 on three designs of Glyphs that training does not have, with and without one.

    megaclass data glyphs --classes 3000 --out datasets/glyphs-small
    python benchmarks/distil.py --data datasets/glyphs-small --seeds 1,2,3 --out benchmarks/distil.md
    python benchmarks/distil.py --data datasets/glyphs --device cuda --recipe glyphs --teacher iresnet50 --student mbf \
        --teacher-epochs 3 --student-epochs 3 --size 48

The teacher is trained once, by the same recipe, unless --teacher is the folder of a run. All students see the same images in
the same order. Each way to use the teacher is tried with seed 0, and the best one by the validation design is measured with the
other seeds on the tests, next to students without a teacher.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megaclass.config.read import load_config

TESTS = ("test-a", "test-b", "test-c")
WITHOUT = "no teacher"


def ways(teacher: Path) -> dict[str, list[str]]:
    """Settings of a student, by the name of the way."""
    given = f"distil.teacher={teacher}"
    return {
        WITHOUT: [],
        "cosine 10": [given, "distil.cosine=10"],
        "cosine 50": [given, "distil.cosine=50"],
        "cosine 10, its centres": [given, "distil.cosine=10", f"train.init_centres={teacher}"],
    }


def command(*words: str) -> tuple[str, float]:
    """Runs a command of megaclass; returns what it printed, and the CPU seconds of its processes."""
    before = os.times()
    printed = subprocess.run([sys.executable, "-m", "megaclass", *words], check=True, capture_output=True, text=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return printed.stdout, spent


def train(options: argparse.Namespace, run: Path, name: str, epochs: float, seed: int, more: Sequence[str]) -> float:
    """Trains unless the run is there; returns its CPU seconds."""
    note = run / "cpu_seconds"
    if not note.exists():
        settings = [f"data.path={options.data / 'train'}", f"train.run_dir={run}", f"data.size={options.size}"]
        settings += [f"backbone.name={name}", f"train.epochs={epochs:g}", f"train.seed={seed}", "export.onnx=false"]
        settings += [f"train.device={options.device}", *more]
        _, spent = command("train", "--quiet", options.recipe, *settings, "--overwrite")
        note.write_text(str(spent))
    return float(note.read_text())


def accuracies(options: argparse.Namespace, run: Path, sets: Sequence[str]) -> list[float]:
    words = [word for one in sets for word in ("--classify", str(options.data / one))]
    found = json.loads(command("evaluate", str(run), "--json", "--device", options.device, *words)[0])
    top_1 = {Path(one["path"]).name: float(one["top_k"]["1"]) for one in found.values()}
    return [top_1[one] for one in sets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", default="glyphs-small")
    parser.add_argument("--teacher", default="mbf")
    parser.add_argument("--student", default="slim")
    parser.add_argument("--teacher-epochs", type=float, default=0.75)
    parser.add_argument("--student-epochs", type=float, default=0.5)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("runs/distil"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    teacher, how = Path(options.teacher), "trained before"
    if not teacher.exists():
        teacher, how = options.work / "teacher", f"{options.teacher_epochs:g} epochs"
        train(options, teacher, options.teacher, options.teacher_epochs, 0, ())
    network = load_config(teacher / "config.toml").backbone.name
    known = ways(teacher)
    lines = ["| network | training | CPU s | A | B | C |", "|---|---|---|---|---|---|"]
    shown = " | ".join(f"{value:.2%}" for value in accuracies(options, teacher, TESTS))
    lines.append(f"| {network} | the teacher, {how} | | {shown} |")
    validation = {}
    for way, settings in known.items():
        if way == WITHOUT:
            continue
        run = options.work / f"seed0-{way.replace(' ', '-')}"
        train(options, run, options.student, options.student_epochs, 0, settings)
        (validation[way],) = accuracies(options, run, ["validation"])
        print(f"seed 0, {way}: {validation[way]:.2%} on the validation design", flush=True)
    best = max(validation, key=lambda way: validation[way])
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found: dict[str, list[list[float]]] = {WITHOUT: [], best: []}
    seconds: dict[str, list[float]] = {WITHOUT: [], best: []}
    for seed in seeds:
        for way in found:
            run = options.work / f"seed{seed}-{way.replace(' ', '-')}"
            seconds[way].append(train(options, run, options.student, options.student_epochs, seed, known[way]))
            found[way].append(accuracies(options, run, TESTS))
            print(f"seed {seed}, {way}: {found[way][-1]}", flush=True)
    for way, by_seed in found.items():
        cells = [
            f"{statistics.fmean(of_test):.2%} ({min(of_test):.2%} to {max(of_test):.2%})"
            for of_test in zip(*by_seed, strict=True)
        ]
        lines.append(f"| {options.student} | {way} | {statistics.fmean(seconds[way]):.0f} | {' | '.join(cells)} |")
    tried = ", ".join(f"{way} {value:.2%}" for way, value in validation.items())
    text = "\n".join(
        [
            "# A small network with and without a teacher",
            "",
            f"`python benchmarks/distil.py`, {datetime.date.today()}, {platform.machine()}, {options.device}, "
            f"torch {torch.__version__}.",
            f"Recipe {options.recipe} at {options.size} pixels, students of {options.student_epochs:g} epochs, seeds "
            f"{options.seeds}: mean (lowest to highest).",
            f"Chosen with seed 0 on the validation design: {tried}.",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
