"""`megaclass train` on real files against its step alone, in one run on one GPU.

    python benchmarks/whole_run.py [--rows r50,r50-augmented,r18,mbf] [--out benchmarks/whole_run.md]

The data is a .rec of drawn faces, 112 x 112 JPEGs, made here; it is in the page cache. Each row starts the real command in a
process of its own and reads its metrics.jsonl; the step alone runs before and after it, in a process of its own, on images
that stay on the GPU. Rows of the first steps are left out.
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

import numpy as np
import torch

ALL_AUGMENTATIONS = "crop,low_resolution,blur,colour,grey,occlusion,jpeg"
# Name of the row -> backbone, data.augment, least share of the step alone, images per second that are enough in any case.
ROWS = {
    "r50": ("iresnet50", "", 0.97, None),
    "r50-augmented": ("iresnet50", ALL_AUGMENTATIONS, 0.95, None),
    "r18": ("iresnet18", "", 0.90, 30_000),
    "mbf": ("mbf", "", 0.90, 30_000),
}
BATCH, NUM_IDENTITIES, IMAGES_PER_IDENTITY = 512, 2048, 16
REPORT_STEPS, SKIPPED_ROWS = 100, 1
SECONDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, help="draw the data there, or use what is there")
    parser.add_argument(
        "--set", action="append", default=[], help="further settings of megaclass train, such as data.workers=4"
    )
    parser.add_argument("--step-alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step_alone:
        print(json.dumps(step_alone(options.step_alone)))
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/whole_run.py needs a GPU.")
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or Path(scratch) / "data"
        draw(data)
        results = []
        for name in options.rows.split(","):
            results.append(measure(name, data, Path(scratch) / name, options.set))
            print(results[-1], flush=True)
            text = table(results, options.set)
            if options.out:
                options.out.write_text(text)
    print(text)


def draw(folder: Path) -> None:
    from megaclass.data.tools.synthesize import synthesize

    begun = time.perf_counter()
    synthesize(
        folder, num_identities=NUM_IDENTITIES, images_per_identity=IMAGES_PER_IDENTITY, image_size=112, num_pairs=20
    )
    print(f"data drawn or found in {time.perf_counter() - begun:.1f} s", flush=True)


def measure(name: str, data: Path, run: Path, settings: list[str]) -> dict[str, object]:
    # Each part is printed as soon as it is known: a run that is cut short has still measured something.
    before = in_own_process(name)
    print(f"{name}: step alone {before['images_per_second']:,.0f} images/s", flush=True)
    num_steps = max(4 * REPORT_STEPS, int(SECONDS * before["images_per_second"] / BATCH) // REPORT_STEPS * REPORT_STEPS)
    backbone, augment, share, enough = ROWS[name]
    steps_per_epoch = NUM_IDENTITIES * IMAGES_PER_IDENTITY // BATCH
    recipe = run.with_suffix(".toml")
    recipe.write_text(f'[data]\npath = "{data}"\n[train]\nrun_dir = "{run}"\n')
    command = [
        *(sys.executable, "-m", "megaclass", "train", str(recipe), "--quiet"),
        *(f"data.augment={augment}", f"backbone.name={backbone}"),
        *(f"train.global_batch={BATCH}", f"train.epochs={num_steps / steps_per_epoch}", "optimizer.lr=0.01"),
        *(f"train.report_steps={REPORT_STEPS}", "train.checkpoint_epochs=100000", "export.onnx=false"),
        *settings,
    ]
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole_s = time.perf_counter() - begun
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][SKIPPED_ROWS:]
    speed = statistics.median(row["images_per_second"] for row in rows)
    print(f"{name}: whole run {speed:,.0f} images/s, {speed / before['images_per_second']:.3f} of it", flush=True)
    after = in_own_process(name)
    alone = statistics.mean(result["images_per_second"] for result in (before, after))
    return {
        "name": name,
        "images_per_second": speed,
        "alone": alone,
        "alone_before_after": [before["images_per_second"], after["images_per_second"]],
        "ratio": speed / alone,
        "must": share,
        "enough": enough,
        "step_ms": statistics.median(row["step_ms"] for row in rows),
        "step_ms_p99": statistics.median(row["step_ms_p99"] for row in rows),
        "step_ms_p99_worst": max(row["step_ms_p99"] for row in rows),
        "data_wait_share": statistics.median(row["data_wait_share"] for row in rows),
        "steps": num_steps,
        "first_row_s": rows[0]["elapsed_s"],
        "whole_command_s": whole_s,
    }


def in_own_process(name: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--step-alone", name]
    result: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]
    )
    return result


def step_alone(name: str) -> dict[str, float]:
    """The step of `megaclass train` with this backbone and as many classes, on images that are on the GPU already."""
    from megaclass.config.read import load_config_values
    from megaclass.data.loader import Batch
    from megaclass.training.model.build import build_model
    from megaclass.training.step import training_step
    from megaclass_launch.ranks.process_group import process_group
    from megaclass_launch.world import World

    class RandomImages:
        image_size = (112, 112)
        num_classes = NUM_IDENTITIES

    tables = {
        "data": {"path": "unused"},
        "backbone": {"name": ROWS[name][0]},
        "train": {"run_dir": "unused", "global_batch": BATCH},
    }
    config = load_config_values(tables, where="benchmark")
    with process_group(World()) as device:
        model = build_model(config, RandomImages(), World(), device)  # type: ignore[arg-type]
        model.parallel.train()
        images = torch.randint(0, 256, (BATCH, 112, 112, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
        labels = torch.randint(NUM_IDENTITIES, (BATCH,), device=device)
        batch = Batch(images=images, labels=labels, indices=np.arange(BATCH), epoch=0, step=0)

        def steps(number: int) -> float:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for step in range(number):
                training_step(model, batch, config, lr=0.001, step=step, device=device)
            torch.cuda.synchronize()
            return time.perf_counter() - begun

        steps(20)
        num_timed = max(50, int(2.0 / (steps(20) / 20)))
        return {"images_per_second": statistics.median(BATCH * num_timed / steps(num_timed) for _ in range(3))}


def table(results: list[dict[str, object]], settings: list[str]) -> str:
    lines = [
        "# The whole run against its step alone",
        "",
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, {len(os.sched_getaffinity(0))} CPU cores, torch "
        f"{torch.__version__}. Made by `python benchmarks/whole_run.py`: the real",
        f"command on a .rec of {NUM_IDENTITIES * IMAGES_PER_IDENTITY:,} drawn 112 × 112 JPEGs in the page cache, global "
        f"batch {BATCH}, {NUM_IDENTITIES:,} classes, default settings",
        f"except train.report_steps = {REPORT_STEPS}{''.join(', ' + text for text in settings)}. The step alone: mean of one "
        "measurement before and one after.",
        "Step times are measured on the GPU, median over rows of metrics.jsonl.",
        "",
        "| row | backbone | augmentation | img/s | step alone img/s | ratio | must be | median step ms | p99 ms "
        "| p99 / median | waiting for data |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        backbone, augment, share, enough = ROWS[str(result["name"])]
        must = f"≥ {share}" + (f" or {enough:,} img/s" if enough else "")
        median, p99 = float(result["step_ms"]), float(result["step_ms_p99"])  # type: ignore[arg-type]
        cells = [
            result["name"],
            backbone,
            "all seven" if augment else "mirror only",
            f"{result['images_per_second']:,.0f}",
            f"{result['alone']:,.0f}",
            f"{result['ratio']:.3f}",
            must,
            f"{median:.2f}",
            f"{p99:.2f}",
            f"{p99 / median:.3f}",
            f"{result['data_wait_share']:.1%}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
