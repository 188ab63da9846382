"""The demo on this machine: this tree against an earlier commit, in turns.

    python benchmarks/demo.py --before COMMIT [--rounds 2] [--out benchmarks/demo.md]

Both train on the demo's recipe with two processes, evaluate, write the report and export: `megaclass train demo` here, the same
recipe by its path in a commit that has no recipes in the package. Each run draws its data in an empty folder.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        git("worktree", "add", "--detach", str(before), options.before)
        try:
            trees = {f"before, {git('rev-parse', '--short', options.before)}": before, "this tree": ROOT}
            runs: dict[str, list[Run]] = {name: [] for name in trees}
            for _ in range(options.rounds):
                for name, tree in trees.items():
                    runs[name].append(demo(tree, scratch))
                    print(f"{name}: {runs[name][-1]}", flush=True)
        finally:
            git("worktree", "remove", "--force", str(before))
    text = table(runs)
    print(text)
    if options.out:
        options.out.write_text(text)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Run:
    seconds: float
    """Of the whole command."""
    cpu_seconds: float
    """Of all its processes."""
    images_per_second: float
    """In training."""


def demo(tree: Path, scratch: str) -> Run:
    recipe = tree / "recipes/demo.toml"
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        start, cpu_start = time.perf_counter(), cpu_seconds()
        subprocess.run(
            [sys.executable, "-m", "megaclass", "train", str(recipe) if recipe.exists() else "demo", "--overwrite"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
            check=True,
            capture_output=True,
        )
        seconds = time.perf_counter() - start
        summary = json.loads((Path(folder) / "runs/demo/summary.json").read_text())
        return Run(seconds, cpu_seconds() - cpu_start, summary["images_per_second"])


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(runs: dict[str, list[Run]]) -> str:
    lines = [
        "# The demo on CPUs",
        "",
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, torch {torch.__version__}. Made by `python benchmarks/demo.py`: "
        "the recipe of the demo, in turns.",
        "",
        "| tree | seconds of the whole command | CPU seconds of its processes | images per second in training |",
        "|---|---|---|---|",
    ]
    for name, values in runs.items():
        seconds = ", ".join(f"{run.seconds:.1f}" for run in values)
        cpu = ", ".join(f"{run.cpu_seconds:.1f}" for run in values)
        speeds = ", ".join(f"{run.images_per_second:,.0f}" for run in values)
        lines.append(f"| {name} | {seconds} | {cpu} | {speeds} |")
    ratios = []
    for field in ("seconds", "cpu_seconds"):
        medians = [statistics.median(getattr(run, field) for run in values) for values in runs.values()]
        ratios.append(medians[1] / medians[0])
    lines += ["", f"Median of this tree / before: whole command {ratios[0]:.2f}, CPU seconds {ratios[1]:.2f}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
