"""Which checkpoints are kept: the last few, and the best."""

import math
from collections.abc import Iterable
from pathlib import Path

from megaclass.checkpoint.manifest import read_manifest
from megaclass.errors import CheckpointError

ACCURACY, LOSS = "verification_accuracy", "loss"


def published(checkpoints: Path) -> list[Path]:
    """Folders of checkpoints, oldest first, whole or not.

    One that stepped aside for another of the same step (checkpoint/save.py) counts where that one never came.
    """
    asides = [aside for aside in checkpoints.glob(".step-*.replaced") if not final_of(aside).exists()]
    return sorted([*checkpoints.glob("step-*"), *asides], key=lambda folder: folder.name.removeprefix("."))


def aside_of(final: Path) -> Path:
    """Where a checkpoint lies while one of the same step takes its place."""
    return final.with_name(f".{final.name}.replaced")


def final_of(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".").removesuffix(".replaced"))


def superfluous(checkpoints: Path, newest: Path, keep: int) -> list[Path]:
    """What may go once `newest` is published: all before it but the last `keep`, it included, and the best."""
    # Later ones are of a run that was resumed from before them, or damaged; they must not push out this one.
    before = [folder for folder in published(checkpoints) if folder.name < newest.name]
    best = best_folder([*before, newest])
    return [folder for folder in before[: max(0, len(before) - keep + 1)] if folder != best]


def best_folder(folders: Iterable[Path]) -> Path | None:
    """The highest verification accuracy; where none was evaluated, the lowest loss; of equals, the last.

    What has no readable manifest, or no finite number in it, is never the best.
    """
    by_accuracy: list[tuple[float, int, Path]] = []
    by_loss: list[tuple[float, int, Path]] = []
    for place, folder in enumerate(folders):
        try:
            metrics = read_manifest(folder).metrics
        except CheckpointError:
            continue
        for name, sign, ranking in ((ACCURACY, 1, by_accuracy), (LOSS, -1, by_loss)):
            if math.isfinite(metrics.get(name, math.nan)):
                ranking.append((sign * metrics[name], place, folder))
    ranking = by_accuracy or by_loss
    return max(ranking)[2] if ranking else None
