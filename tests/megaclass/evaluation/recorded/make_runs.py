"""Trains the small runs on which the verdict is tested, and keeps their metrics, events and settings in `runs/`.

    python tests/megaclass/evaluation/recorded/make_runs.py            all of them, about three minutes on a quiet machine
    python tests/megaclass/evaluation/recorded/make_runs.py slow-rank  some of them

Every run is `megaclass train demo` with the settings below on a CPU: 16 drawn identities of 16 pixels, 8 epochs, 128 steps. The
table RUNS says what each one does in addition, which is what its verdict must name. Numbers are rounded to four digits, and
paths are shortened, before a run is kept.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from megaclass.backbones.slim import SlimNet

HERE = Path(__file__).parent
KEPT = HERE / "runs"
BASE = [
    "synth.identities=16",
    "synth.images_per_identity=16",
    "synth.size=16",
    "synth.pairs=200",
    "backbone.embedding_dim=32",
    "backbone.name=slim",
    "train.global_batch=16",
    "train.epochs=8",
    "train.report_steps=4",
    "train.nproc=1",
    "train.checkpoint_epochs=8",
    "optimizer.lr=0.05",
    "export.onnx=false",
]


class SlowNet(SlimNet):
    """Sleeps 30 ms in the forward of the last rank, as a throttled GPU would."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.03)
        return super().forward(x)


class HangingNet(SlimNet):
    """Does not return from its fortieth training step on the last rank."""

    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += self.training
        if self.num_forwards == 40 and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(3600)
        return super().forward(x)


@dataclass(frozen=True)
class Made:
    """How a run is made, and which rule of the verdict it shows."""

    rule: str
    settings: str
    data: Callable[[Path], None] | None = None
    """Changes a copy of the drawn data, given its folder; the run then trains on the folder `data`."""
    exit_codes: tuple[int, ...] = (0,)
    begins_trained: bool = False
    """The run starts from the backbone of a healthy run on the drawn data."""


def large_photos(folder: Path) -> None:
    """Writes the drawn images as JPEGs of 1,500 × 1,500 pixels, which take far longer to decode than to train on."""
    for path in sorted(folder.glob("data/*/*.png")):
        with Image.open(path) as image:
            image.resize((1500, 1500), Image.Resampling.BICUBIC).save(path.with_suffix(".jpg"), quality=95)
        path.unlink()


def wrong_labels(folder: Path) -> None:
    """Moves every image into the folder of an identity drawn by chance."""
    paths = sorted(folder.glob("data/*/*.png"))
    names = sorted({path.parent.name for path in paths})
    for path, chosen in zip(paths, np.random.default_rng(0).permutation(len(paths)), strict=True):
        path.rename(folder / "data" / names[chosen % len(names)] / f"{path.parent.name}-{path.name}")


RUNS: dict[str, Made] = {
    "healthy": Made("healthy", "train.evaluate_epochs=1"),
    "failed": Made("failed", "optimizer.lr=1e30 optimizer.warmup_epochs=0", exit_codes=(1, 2)),
    "hang": Made("hang", "train.nproc=2 backbone.name=make_runs:HangingNet train.hang_after_s=20", exit_codes=(134,)),
    "not-finite": Made("not finite", "optimizer.lr=1e30 optimizer.warmup_epochs=0 train.on_nan=skip"),
    # The learning rate rises to a hundred times the usual one, so the first epochs learn and the others forget.
    "rising-loss": Made("rising loss", "optimizer.lr=100 optimizer.warmup_epochs=8"),
    # From the first step on far too high: the loss falls from its peak and levels off above that of an untrained network.
    "plateau": Made("low cosine", "optimizer.lr=5"),
    "plateau-100": Made("low cosine", "optimizer.lr=100"),
    "flat-loss": Made("flat loss", "optimizer.lr=1e-7 optimizer.warmup_epochs=0"),
    "overfitting": Made("overfitting", "train.evaluate_epochs=2 train.epochs=20 data.mirror=false", wrong_labels),
    # A good model is trained further on labels drawn by chance, and loses what it knew.
    "unlearning": Made(
        "overfitting",
        "train.evaluate_epochs=2 train.epochs=20 data.mirror=false optimizer.lr=0.02",
        wrong_labels,
        begins_trained=True,
    ),
    "slow-loader": Made("waiting for data", "train.epochs=4", large_photos),
    "slow-rank": Made("slow rank", "train.nproc=2 backbone.name=make_runs:SlowNet"),
}


def make(name: str, made: Made) -> None:
    with tempfile.TemporaryDirectory(prefix="megaclass-") as scratch:
        folder = Path(scratch)
        settings = [*BASE, "data.path=drawn", "train.run_dir=run", *made.settings.split()]
        if made.data is not None:
            _as_folders(folder)
            made.data(folder)
            settings += ["synth.identities=0", "data.path=data", "data.size=16"]
        if made.begins_trained:
            _train([*BASE, "data.path=drawn", "train.run_dir=good"], folder, (0,))
            settings.append("train.init_backbone=good/model.safetensors")
        _train(settings, folder, made.exit_codes)
        keep(folder / "run", KEPT / name)


def _train(settings: list[str], folder: Path, exit_codes: tuple[int, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megaclass", "train", "demo", *settings]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode in exit_codes, f"exit code {done.returncode} of {' '.join(settings)}\n{done.stderr}"


def _as_folders(folder: Path) -> None:
    """Draws the identities and writes them as one folder per identity, with the verification pairs next to them."""
    from megaclass.data.sources.open_source import open_source
    from megaclass.data.tools.synthesize import synthesize

    synthesize(folder / "drawn", num_identities=16, images_per_identity=16, image_size=16, seed=0, num_pairs=200)
    source = open_source(str(folder / "drawn"))
    for index in range(source.num_images):
        place = folder / "data" / f"{source.labels[index]:02d}" / f"{index:03d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(source.read(index))
        with Image.open(place) as image:
            image.convert("RGB").save(place, "PNG")
    shutil.copy(folder / "drawn" / "verification.bin", folder / "data")


def keep(run: Path, place: Path) -> None:
    """Copies metrics, events and settings, without names and paths of this machine."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("metrics.jsonl", "events.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()] if (run / name).exists() else []
        (place / name).write_text("".join(json.dumps(_neutral(row)) + "\n" for row in rows))
    (place / "config.toml").write_text((run / "config.toml").read_text())
    if (run / "summary.json").exists():
        (place / "summary.json").write_text(
            json.dumps({"num_classes": json.loads((run / "summary.json").read_text())["num_classes"]}) + "\n"
        )


def _neutral(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        return {name: _neutral(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_neutral(one, key) for one in value]
    if isinstance(value, float):
        return value if key == "time" else float(f"{value:.4g}")
    if isinstance(value, str):
        named = re.sub(r"(rank \d+) \([^)]*\)", r"\1 (host)", value)
        return "host" if key == "host" else re.sub(r"(?<=\s)/\S+/(?=\S)", "", named)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="RUN", help=f"one of {', '.join(RUNS)}; all of them if none is named"
    )
    for name in parser.parse_args().names or RUNS:
        make(name, RUNS[name])
        print(f"{name}: kept in {KEPT / name}", flush=True)


if __name__ == "__main__":
    main()
