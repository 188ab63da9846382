"""Disk -> state, on any number of ranks: each takes the slices of the saved shards that lie in its classes."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megaclass.checkpoint.manifest import Manifest, check_files, read_manifest
from megaclass.errors import CheckpointError


def newest_whole(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every byte is right, and why newer ones were passed over."""
    reasons: list[str] = []
    for folder in sorted(checkpoints.glob("step-*"), reverse=True):
        try:
            check_files(folder, read_manifest(folder))
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return folder, reasons
    return None, reasons


def load_shared(folder: Path) -> dict[str, Tensor]:
    """Backbone, its optimizer and the head's small state, on the CPU."""
    from safetensors.torch import load_file

    return dict(load_file(folder / "shared.safetensors"))


def saved_rows(
    folder: Path, manifest: Manifest, class_start: int, class_stop: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(first class, rows) of every shard that overlaps classes [class_start, class_stop), one shard in memory at a time."""
    from safetensors.torch import load_file

    for name, saved in manifest.files.items():
        if saved.class_start < class_stop and class_start < saved.class_stop:
            yield saved.class_start, dict(load_file(folder / name))
