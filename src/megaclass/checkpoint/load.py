"""Disk -> state, on any number of ranks: each takes the slices of the saved shards that lie in its classes."""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.checkpoint.manifest import (
    RANK_PREFIX,
    SHARED,
    Manifest,
    SavedFile,
    check_digests,
    check_files,
    check_sizes,
    read_manifest,
)
from megaclass.checkpoint.retention import published
from megaclass.checkpoint.tensor_file import read_tensors
from megaclass.distributed.agreement import on_every_rank, on_every_rank_for_long, text_of_main_rank
from megaclass.distributed.collectives import group_rank, group_size
from megaclass.errors import CheckpointError, UserError


def newest_whole(
    checkpoints: Path, fits: Callable[[Path, Manifest], None] = lambda folder, manifest: None
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that fits and whose every byte is right, and why newer ones were passed over.

    fits: raises a CheckpointError that says what is against a checkpoint, before its files are read.
    """
    return first_whole(reversed(published(checkpoints)), fits)


def first_whole(
    folders: Iterable[Path], fits: Callable[[Path, Manifest], None] = lambda folder, manifest: None
) -> tuple[Path | None, list[str]]:
    """The same, of these folders in this order."""
    reasons: list[str] = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            fits(folder, manifest)
            check_files(folder, manifest)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return folder, reasons
    return None, reasons


def first_whole_on_all_ranks(
    folders: Callable[[], Iterable[Path]],
    device: torch.device,
    fits: Callable[[Path, Manifest], None] = lambda folder, manifest: None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Path | None, list[str]]:
    """Collective. first_whole, every file hashed by one rank; the folder is the same on all ranks, the reasons are rank 0's.

    folders, fits: only rank 0 looks which there are and which fits. A rank that then sees another checkpoint in that
    place, or none, ends all with the reason.
    """
    left: Iterator[Path] | None = None
    reasons: list[str] = []

    def next_in_line() -> str:
        nonlocal left
        left = iter(folders()) if left is None else left
        for folder in left:
            try:
                manifest = read_manifest(folder)
                fits(folder, manifest)
                check_sizes(folder, manifest)
                return f"{manifest.digest()} {folder}"
            except CheckpointError as error:
                reasons.append(str(error))
        return ""

    rank, world_size = group_rank(group), group_size(group)
    while told := text_of_main_rank(next_in_line, device, group):
        digest, _, name = told.partition(" ")
        folder = Path(name)
        manifest = on_every_rank(partial(_manifest_as_told, folder, digest, rank), device, group)
        own = [name for name, saved in manifest.files.items() if _hashing_rank(saved, manifest, world_size) == rank]
        try:
            on_every_rank_for_long(partial(check_digests, folder, manifest, own), device, group)
        except (UserError, OSError) as error:
            reasons.append(str(error))
        else:
            return folder, reasons
    return None, reasons


def _hashing_rank(saved: SavedFile, manifest: Manifest, world_size: int) -> int:
    """The rank that reads these centres next, so that its host need not fetch them twice: an even share of the bytes.

    What holds no centres goes to the last rank.
    """
    if saved.class_start == saved.class_stop:
        return world_size - 1
    return saved.class_start * world_size // manifest.num_classes


def _manifest_as_told(folder: Path, digest: str, rank: int) -> Manifest:
    try:
        manifest = read_manifest(folder)
        if manifest.digest() != digest:
            raise CheckpointError(f"its manifest is another one, of step {manifest.step}.")
        check_sizes(folder, manifest)
    except CheckpointError as error:
        raise CheckpointError(
            f"Rank {rank} on {socket.gethostname()} does not see the checkpoint {folder} that rank 0 sees: {error} "
            f"It must lie on a file system that all hosts share."
        ) from error
    return manifest


def load_shared(folder: Path) -> dict[str, Tensor]:
    """Backbone, its optimizer and the head's small state, on the CPU."""
    return read_tensors(folder / SHARED)


def saved_rows(
    folder: Path, manifest: Manifest, class_start: int, class_stop: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(first class, rows) of every shard that overlaps classes [class_start, class_stop), one shard in memory at a time."""
    for name, saved in manifest.files.items():
        if saved.class_start < class_stop and class_start < saved.class_stop:
            tensors = read_tensors(folder / name)
            rows_of = {key: rows for key, rows in tensors.items() if not key.startswith(RANK_PREFIX)}
            num_classes = saved.class_stop - saved.class_start
            for key, rows in rows_of.items():
                if rows.ndim == 0 or len(rows) == 0 or len(rows) % num_classes:
                    raise CheckpointError(
                        f"{folder / name}: {key!r} has shape {tuple(rows.shape)}, the manifest says {num_classes} classes."
                    )
            yield saved.class_start, rows_of


def load_rank_state(folder: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """What this rank saved of its own; only of use in a world of the same size."""
    from safetensors import safe_open

    shards = sorted((s.class_start, name) for name, s in manifest.files.items() if s.class_start < s.class_stop)
    if rank >= len(shards):
        raise CheckpointError(
            f"{folder} holds {len(shards)} shards of centres, but says that {manifest.world_size} ranks saved it."
        )
    with safe_open(folder / shards[rank][1], framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(RANK_PREFIX)]  # noqa: SIM118 (not a dict)
        return {name.removeprefix(RANK_PREFIX): file.get_tensor(name) for name in names}


def copy_matched_rows(
    shards: Iterable[tuple[int, Mapping[str, Tensor]]],
    target: Mapping[str, Tensor],
    saved_K: NDArray[np.int64],
    num_subcentres: int,
    where: str,
) -> None:
    """Copies rows of any classes, in any order: target's class k is class saved_K[k] of the shards, none where it is -1.

    target: tensors of K * num_subcentres rows; every shard must hold them all, in the same widths.
    """
    for first_class, rows in shards:
        for name, own in target.items():
            if name not in rows:
                raise CheckpointError(f"{where} holds {sorted(rows)} for a row, but no {name!r}, which this run keeps.")
            if rows[name].shape[1:] != own.shape[1:] or len(rows[name]) % num_subcentres:
                raise CheckpointError(
                    f"{where}: rows of {name!r} have shape {tuple(rows[name].shape)}, this run's {tuple(own.shape)} with "
                    f"{num_subcentres} centre(s) a class."
                )
            saved = rows[name].unflatten(0, (-1, num_subcentres))
            here = np.flatnonzero((saved_K >= first_class) & (saved_K < first_class + len(saved)))
            there = torch.from_numpy(saved_K[here] - first_class)
            own.unflatten(0, (-1, num_subcentres))[torch.from_numpy(here).to(own.device)] = saved[there].to(
                own.device, own.dtype
            )
