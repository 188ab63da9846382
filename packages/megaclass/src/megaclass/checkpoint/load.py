"""Loads a checkpoint on any number of ranks: each rank reads the parts of the saved shards that hold its classes."""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.checkpoint.class_ranges import overlapping
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
from megaclass.errors import CheckpointError
from megaclass_launch.errors import UserError
from megaclass_launch.ranks.collectives import group_rank, group_size


def newest_whole(
    checkpoints: Path, fits: Callable[[Path, Manifest], None] = lambda folder, manifest: None
) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint that fits and is undamaged, and the reasons why newer ones were skipped.

    fits: raises a CheckpointError if a checkpoint is not suitable; called before its files are read.
    """
    return first_whole(reversed(published(checkpoints)), fits)


def first_whole(
    folders: Iterable[Path], fits: Callable[[Path, Manifest], None] = lambda folder, manifest: None
) -> tuple[Path | None, list[str]]:
    """Returns the first of these folders that fits and is undamaged, and the reasons why earlier ones were skipped."""
    reasons: list[str] = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            fits(folder, manifest)
            # Last, because it reads every byte of the checkpoint.
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
    """Collective. Like `first_whole`, but each file is hashed by one rank. The folder is the same on all ranks.

    folders, fits: called on rank 0 only, which also has the reasons. If another rank sees a different checkpoint at that
    path, or none, all ranks raise an error.
    """
    # Candidates that rank 0 has not tried yet; the other ranks never ask for them.
    left: Iterator[Path] | None = None
    reasons: list[str] = []

    def next_candidate() -> str:
        nonlocal left
        left = iter(folders()) if left is None else left
        for folder in left:
            try:
                # Cheap checks here, on rank 0 alone; the digests follow on all ranks.
                manifest = read_manifest(folder)
                fits(folder, manifest)
                check_sizes(folder, manifest)
                return f"{manifest.digest()} {folder}"
            except CheckpointError as error:
                reasons.append(str(error))
        return ""

    rank, world_size = group_rank(group), group_size(group)
    while answer := text_of_main_rank(next_candidate, device, group):
        # The path is the rest of the line, because it may contain spaces.
        digest, _, name = answer.partition(" ")
        folder = Path(name)
        manifest = on_every_rank(partial(_same_manifest, folder, digest, rank), device, group)
        # Every byte is hashed once in the whole job, not once per rank.
        own = [name for name, saved in manifest.files.items() if _hashing_rank(saved, manifest, world_size) == rank]
        try:
            on_every_rank_for_long(partial(check_digests, folder, manifest, own), device, group)
        # Raised on all ranks, so that all of them ask for the next candidate.
        except (UserError, OSError) as error:
            reasons.append(str(error))
        else:
            return folder, reasons
    return None, reasons


def _hashing_rank(saved: SavedFile, manifest: Manifest, world_size: int) -> int:
    """Returns the rank that hashes a file: the one that loads its centres next, so that its host reads them once.

    Ranks get about equal numbers of bytes. Files without centres go to the last rank.
    """
    if saved.class_start == saved.class_stop:
        return world_size - 1
    # Not the exact range of a rank, whose rounding does not matter here: every file has one rank, and all ranks agree which.
    return saved.class_start * world_size // manifest.num_classes


def _same_manifest(folder: Path, digest: str, rank: int) -> Manifest:
    try:
        manifest = read_manifest(folder)
        if manifest.digest() != digest:
            # A host with a file system of its own may have a checkpoint of the same name: from another run, or an older copy.
            raise CheckpointError(f"its manifest is a different one, of step {manifest.step}.")
        check_sizes(folder, manifest)
    except CheckpointError as error:
        raise CheckpointError(
            f"Rank {rank} on {socket.gethostname()} does not see the checkpoint {folder} that rank 0 sees: {error} "
            f"It must be on a file system that all hosts share."
        ) from error
    return manifest


def load_shared(folder: Path) -> dict[str, Tensor]:
    """Returns the backbone, its optimizer and the small state of the head, on the CPU."""
    return read_tensors(folder / SHARED)


def saved_rows(
    folder: Path, manifest: Manifest, class_start: int, class_stop: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields (first class, rows) of every shard that overlaps classes [class_start, class_stop); one is in memory at a time."""
    shards = {name: (saved.class_start, saved.class_stop) for name, saved in manifest.files.items()}
    for name, _, _ in overlapping(shards, class_start, class_stop):
        saved = manifest.files[name]
        # One shard at a time: a rank that gets classes of many shards would otherwise hold all of them.
        tensors = read_tensors(folder / name)
        # A rank's own state travels in its shard, but belongs to no class.
        rows_of = {key: rows for key, rows in tensors.items() if not key.startswith(RANK_PREFIX)}
        num_classes = saved.class_stop - saved.class_start
        for key, rows in rows_of.items():
            # With sub-centres a class has several rows: their number must be a multiple of the classes.
            if rows.ndim == 0 or len(rows) == 0 or len(rows) % num_classes:
                raise CheckpointError(
                    f"{folder / name}: {key!r} has shape {tuple(rows.shape)}, but the manifest says {num_classes} classes."
                )
        yield saved.class_start, rows_of


def load_rank_state(folder: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """Returns the state that this rank saved for itself; useful only with the same number of ranks."""
    from safetensors import safe_open

    # Ranks hold ascending ranges of classes, so that the r-th shard is the one that rank r wrote.
    shards = sorted((s.class_start, name) for name, s in manifest.files.items() if s.class_start < s.class_stop)
    if rank >= len(shards):
        raise CheckpointError(
            f"{folder} holds {len(shards)} shards of centres, but its manifest says that {manifest.world_size} ranks saved it."
        )
    # Opened lazily: only these few small tensors are read, not the centres beside them.
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
    """Copies the rows of class saved_K[k] of the shards to class k of the target; -1 leaves the class unchanged.

    target: tensors of K * num_subcentres rows; every shard must hold all of them in the same widths.
    """
    for first_class, rows in shards:
        for name, own in target.items():
            if name not in rows:
                raise CheckpointError(f"{where} holds {sorted(rows)} per row, but not {name!r}, which this run needs.")
            if rows[name].shape[1:] != own.shape[1:] or len(rows[name]) % num_subcentres:
                raise CheckpointError(
                    f"{where}: rows of {name!r} have shape {tuple(rows[name].shape)}, but this run has {tuple(own.shape)} with "
                    f"{num_subcentres} centre(s) per class."
                )
            saved = rows[name].unflatten(0, (-1, num_subcentres))
            # Classes of this rank that the shard holds, and where they lie in it.
            here = np.flatnonzero((saved_K >= first_class) & (saved_K < first_class + len(saved)))
            there = torch.from_numpy(saved_K[here] - first_class)
            own.unflatten(0, (-1, num_subcentres))[torch.from_numpy(here).to(own.device)] = saved[there].to(
                own.device, own.dtype
            )
