"""Which checkpoints are kept: the last few, and the best."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from megaclass.checkpoint.manifest import read_manifest
from megaclass.errors import CheckpointError

ACCURACY, LOSS = "verification_accuracy", "loss"
# Exact, because what is taken for a checkpoint may be removed as one: a user's copy step-000001000-keep is none.
_NAME = r"step-(\d{9,})"


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:09d}"


def published(checkpoints: Path) -> list[Path]:
    """Folders of checkpoints, oldest first, whole or not.

    One that stepped aside for another of the same step (checkpoint/save.py) counts where that one never came.
    """
    found = [path for path in _entries(checkpoints) if re.fullmatch(_NAME, path.name)]
    found += [aside for aside in asides(checkpoints) if not final_of(aside).exists()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Of a published checkpoint, by its name."""
    match = re.fullmatch(rf"\.?{_NAME}(?:\.replaced)?", folder.name)
    assert match is not None, folder
    return int(match[1])


def asides(checkpoints: Path) -> list[Path]:
    return [path for path in _entries(checkpoints) if re.fullmatch(rf"\.{_NAME}\.replaced", path.name)]


def unfinished_saves(checkpoints: Path) -> list[Path]:
    """With or without the name of the job that wrote there."""
    return [path for path in _entries(checkpoints) if re.fullmatch(rf"\.{_NAME}(\.[0-9a-f]+)?\.partial", path.name)]


def written_by_runs(checkpoints: Path) -> list[Path]:
    """Checkpoints, published, unfinished or set aside: everything but what users put beside them."""
    return [path for path in _entries(checkpoints) if re.fullmatch(rf"\.?{_NAME}(\..*)?", path.name)]


def set_aside_after(checkpoints: Path, step: int) -> list[Path]:
    """Renames the checkpoints of later steps, so that nobody goes on from them; returns where they are now."""
    return [folder.rename(_free_name(folder)) for folder in published(checkpoints) if step_of(folder) > step]


def aside_of(final: Path) -> Path:
    """Where a checkpoint lies while one of the same step takes its place."""
    return final.with_name(f".{final.name}.replaced")


def final_of(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".").removesuffix(".replaced"))


def superfluous(checkpoints: Path, newest: Path, keep: int) -> list[Path]:
    """What may go once `newest` is published: all before it but the last `keep`, it included, and the best."""
    # Later ones are of a run that was resumed from before them, or damaged; they must not push out this one.
    before = [folder for folder in published(checkpoints) if step_of(folder) < step_of(newest)]
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


def _entries(checkpoints: Path) -> list[Path]:
    return list(checkpoints.iterdir()) if checkpoints.is_dir() else []


def _free_name(folder: Path) -> Path:
    base, number = checkpoint_folder(folder.parent, step_of(folder)).name, 1
    while (name := folder.with_name(f"{base}.abandoned-{number}")).exists():
        number += 1
    return name
