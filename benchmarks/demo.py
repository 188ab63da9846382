"""The demo on this machine: this tree against an earlier commit, in turns.

    python benchmarks/demo.py --before COMMIT [--rounds 2] [--out benchmarks/demo.md]

Both train on the demo's recipe with two processes, evaluate, write the report and export: `megaclass train demo` here, the same
recipe by its path in a commit that has no recipes in the package. Each run draws its data in an empty folder.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
            runs: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
            for _ in range(options.rounds):
                for name, tree in trees.items():
                    runs[name].append(demo(tree, scratch))
                    print(f"{name}: {runs[name][-1][0]:.1f} s, {runs[name][-1][1]:,.0f} images per second", flush=True)
        finally:
            git("worktree", "remove", "--force", str(before))
    text = table(runs)
    print(text)
    if options.out:
        options.out.write_text(text)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def demo(tree: Path, scratch: str) -> tuple[float, float]:
    """Seconds of the whole command, and images per second in training."""
    recipe = tree / "recipes/demo.toml"
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "megaclass", "train", str(recipe) if recipe.exists() else "demo", "--overwrite"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
            check=True,
            capture_output=True,
        )
        seconds = time.perf_counter() - start
        summary = json.loads((Path(folder) / "runs/demo/summary.json").read_text())
        return seconds, summary["images_per_second"]


def table(runs: dict[str, list[tuple[float, float]]]) -> str:
    lines = [
        "# The demo on CPUs",
        "",
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, torch {torch.__version__}. Made by `python benchmarks/demo.py`: "
        "the recipe of the demo, in turns.",
        "",
        "| tree | seconds of the whole command | images per second in training |",
        "|---|---|---|",
    ]
    for name, values in runs.items():
        seconds = ", ".join(f"{seconds:.1f}" for seconds, _ in values)
        speeds = ", ".join(f"{speed:,.0f}" for _, speed in values)
        lines.append(f"| {name} | {seconds} | {speeds} |")
    medians = [statistics.median(seconds for seconds, _ in values) for values in runs.values()]
    lines += ["", f"Median of this tree / before, whole command: {medians[1] / medians[0]:.2f}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
