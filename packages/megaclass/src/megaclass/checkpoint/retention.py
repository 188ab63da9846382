"""Decides which checkpoints are kept: the last few, and the best."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from megaclass.checkpoint.manifest import read_manifest
from megaclass.errors import CheckpointError

ACCURACY, TOP_1, LOSS = "verification_accuracy", "classification_top_1", "loss"
# Exact, because checkpoints may be removed: a user's copy such as step-000001000-keep must not count as one.
_NAME = r"step-(\d{9,})"


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:09d}"


def published(checkpoints: Path) -> list[Path]:
    """Returns the folders of checkpoints, oldest first, damaged or not.

    A checkpoint that was moved aside for another of the same step (checkpoint/save.py) counts if that one never appeared.
    """
    found = [path for path in _entries(checkpoints) if re.fullmatch(_NAME, path.name)]
    found += [aside for aside in set_aside_folders(checkpoints) if not final_of(aside).exists()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Returns the step of a published checkpoint from its name."""
    match = re.fullmatch(rf"\.?{_NAME}(?:\.replaced)?", folder.name)
    assert match is not None, folder
    return int(match[1])


def set_aside_folders(checkpoints: Path) -> list[Path]:
    """Returns the checkpoints that were moved aside while another one of the same step took their place."""
    return [path for path in _entries(checkpoints) if re.fullmatch(rf"\.{_NAME}\.replaced", path.name)]


def unfinished_saves(checkpoints: Path) -> list[Path]:
    """Returns the folders of unfinished saves, with or without the name of the job in their names."""
    return [path for path in _entries(checkpoints) if re.fullmatch(rf"\.{_NAME}(\.[0-9a-f]+)?\.partial", path.name)]


def written_by_runs(checkpoints: Path) -> list[Path]:
    """Returns all published, unfinished and set-aside checkpoints, but nothing that users put next to them."""
    return [path for path in _entries(checkpoints) if re.fullmatch(rf"\.?{_NAME}(\..*)?", path.name)]


def set_aside_after(checkpoints: Path, step: int) -> list[Path]:
    """Renames the checkpoints of later steps, so no run resumes from them; returns their new paths."""
    return [folder.rename(_free_name(folder)) for folder in published(checkpoints) if step_of(folder) > step]


def set_aside_name(final: Path) -> Path:
    """Returns the path of a checkpoint while another one of the same step takes its place."""
    return final.with_name(f".{final.name}.replaced")


def final_of(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".").removesuffix(".replaced"))


def folders_to_delete(checkpoints: Path, newest: Path, keep: int) -> list[Path]:
    """Returns the checkpoints to remove once `newest` is published: all but the last `keep` (with `newest`) and the best."""
    # Later ones are damaged, or come from a run that was resumed at an earlier step: they must not displace `newest`.
    before = [folder for folder in published(checkpoints) if step_of(folder) < step_of(newest)]
    best = best_folder([*before, newest])
    return [folder for folder in before[: max(0, len(before) - keep + 1)] if folder != best]


def best_folder(folders: Iterable[Path]) -> Path | None:
    """Returns the checkpoint of the highest accuracy in verification, else in classification, else of the lowest loss.

    Of equal ones the last is the best. A checkpoint without a readable manifest or a finite number is never the best.
    """
    rankings: dict[str, list[tuple[float, int, Path]]] = {ACCURACY: [], TOP_1: [], LOSS: []}
    for place, folder in enumerate(folders):
        try:
            metrics = read_manifest(folder).metrics
        except CheckpointError:
            continue
        for name, ranking in rankings.items():
            if math.isfinite(metrics.get(name, math.nan)):
                # The place decides between equal numbers, before the paths would be compared.
                ranking.append((-metrics[name] if name == LOSS else metrics[name], place, folder))
    # Never mixed: a checkpoint that was not evaluated cannot be compared with one that was.
    chosen = next(filter(None, rankings.values()), [])
    return max(chosen)[2] if chosen else None


def _entries(checkpoints: Path) -> list[Path]:
    return list(checkpoints.iterdir()) if checkpoints.is_dir() else []


def _free_name(folder: Path) -> Path:
    base, number = checkpoint_folder(folder.parent, step_of(folder)).name, 1
    # A run may be resumed at an early step several times, and each time its later checkpoints are kept.
    while (name := folder.with_name(f"{base}.abandoned-{number}")).exists():
        number += 1
    return name
