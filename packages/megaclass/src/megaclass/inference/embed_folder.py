"""Embeds a folder of images into embeddings.npy, on any number of ranks; resumes after an interruption.

Images that cannot be read are left out and listed in a separate file: one bad file among millions costs one row.

Images are taken in the order of their names, in chunks. Rank r of W embeds chunks r, r + W, … and writes each to a file
in a folder next to the result; existing chunks are skipped, whichever rank wrote them. At the end rank 0 joins all chunks.
"""

import hashlib
import json
import logging
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megaclass.data.decode import Fit
from megaclass.distributed.agreement import on_every_rank_for_long, on_main_rank_for_long, paths_of_main_rank
from megaclass.errors import DataError
from megaclass.evaluation.embed import embed_part, log_bad_images, log_resized
from megaclass.evaluation.images import GivenImages, find_images
from megaclass.inference import LoadedModel
from megaclass.progress import OnProgress, no_progress
from megaclass_launch.files import published_file
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size

_logger = logging.getLogger("megaclass.embed")
# Images per file of partial results: what an interruption costs at most, per rank.
_CHUNK = 1024
_PLAN = "plan.json"


@dataclass(frozen=True)
class EmbeddedFolder:
    """Counts of `embed_folder`."""

    num_embedded: int
    num_bad: int
    """Number of image files that cannot be read and have no row."""


def embed_folder(
    model: LoadedModel,
    folder: Path,
    out: Path,
    *,
    fit: Fit | None = None,
    mirror: bool = True,
    batch_size: int = 64,
    num_threads: int = 1,
    group: dist.ProcessGroup | None = None,
    on_progress: OnProgress = no_progress,
) -> EmbeddedFolder:
    """Collective. Writes `out`, float32 (N, D), normalised, and next to it a .txt file with the N paths.

    Images that cannot be read are logged and listed in a .bad.txt file; it is an error if none can be read.
    fit: how images of another size are fitted; None raises an error for them.
    The folder and `out` must be visible to all ranks; rank 0 lists the folder, and a file of its list that another rank does
    not see is an error. on_progress receives the number of images done, and of all images. It is called in another thread.
    No rank waits in a collective while another one works: all of it may take hours.
    """
    device, rank, num_ranks = model.device, group_rank(group), group_size(group)
    if out.suffix != ".npy":
        raise DataError(f"Embeddings are written as .npy, not to {out}.")
    paths = paths_of_main_rank(lambda: find_images(folder), device, group)
    parts = out.with_name(f".{out.name}.parts")
    on_main_rank_for_long(lambda: _prepare(parts, _plan(model, folder, paths, fit, mirror)), device, group)
    images = GivenImages(images=paths, image_size=model.image_size, fit=fit)
    starts = range(0, len(paths), _CHUNK)
    # The file .bad.txt lists all of them.
    on_bad = log_bad_images()

    def embed_own() -> None:
        for done, chunk in enumerate(range(rank, len(starts), num_ranks), start=1):
            path = _chunk_path(parts, chunk)
            # A chunk with bad images is embedded again, because they may have been repaired since.
            if not path.is_file() or _is_bad_chunk(path).any():
                part = range(starts[chunk], min(starts[chunk] + _CHUNK, len(paths)))
                _require_listed(paths[part.start : part.stop], rank)
                rows = embed_part(
                    model.network,
                    images,
                    part,
                    device=device,
                    batch_size=batch_size,
                    num_threads=num_threads,
                    mirror=mirror,
                    on_bad=on_bad,
                )
                with published_file(path) as unfinished:
                    np.save(unfinished, torch.nn.functional.normalize(rows[:, :-1]).cpu().numpy())
            # Assumes that the other ranks are about as far.
            on_progress(min(len(paths), done * num_ranks * _CHUNK), len(paths))

    on_every_rank_for_long(embed_own, device, group)
    num_resized = int(gather_blocks(torch.tensor([len(images.resized)], device=device), group).sum())
    if rank == 0:
        log_resized(num_resized, len(paths), model.image_size, f"below {folder}, embedded since this start")
    num_bad = on_every_rank_for_long(lambda: int(_is_bad(parts, len(paths)).sum()), device, group)
    on_main_rank_for_long(lambda: _join(parts, folder, paths, out, model.embedding_dim), device, group)
    return EmbeddedFolder(len(paths) - num_bad, num_bad)


def _plan(model: LoadedModel, folder: Path, paths: list[Path], fit: Fit | None, mirror: bool) -> dict[str, object]:
    """Returns everything that must be equal for the chunks of an earlier start to be reused."""
    listing = "\n".join(f"{path.relative_to(folder)} {_num_bytes(path)}" for path in paths)
    return {
        "model": model.fingerprint(),
        "images": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
        "num_images": len(paths),
        "chunk": _CHUNK,
        "fit": fit,
        "mirror": mirror,
    }


def _require_listed(paths: list[Path], rank: int) -> None:
    """Refuses a file that is in the list of rank 0 but not here. Unlike a bad image it would be embedded by another rank."""
    missing = next((path for path in paths if not os.path.lexists(path)), None)
    if missing is not None:
        raise DataError(
            f"Cannot read {missing} on {socket.gethostname()} (rank {rank}): rank 0 has listed it, but it is not there. "
            f"The folder must be the same on all hosts, and must not change meanwhile."
        )


def _num_bytes(path: Path) -> int:
    """Returns the size of a file; -1 for a broken link, which then counts as a bad image."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _prepare(parts: Path, plan: dict[str, object]) -> None:
    path = parts / _PLAN
    try:
        is_same = json.loads(path.read_text(encoding="utf-8")) == plan
    except (OSError, ValueError):
        is_same = False
    if is_same:
        num_done = len(list(parts.glob("chunk-*.npy")))
        _logger.info(f"resuming with {num_done} chunk(s) of {_CHUNK} images from {parts}")
        return
    shutil.rmtree(parts, ignore_errors=True)
    try:
        parts.mkdir(parents=True)
        path.write_text(json.dumps(plan), encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write {parts}: {error.strerror}.") from error


def _is_bad(parts: Path, num_images: int) -> NDArray[np.bool_]:
    """Returns (N,) which images could not be read: their rows are NaN."""
    chunks = range(-(-num_images // _CHUNK))
    is_bad_N = np.concatenate([_is_bad_chunk(_chunk_path(parts, chunk)) for chunk in chunks])
    if is_bad_N.all():
        raise DataError(f"None of the {num_images:,} images can be read; the messages above say why.")
    return is_bad_N


def _is_bad_chunk(path: Path) -> NDArray[np.bool_]:
    is_bad: NDArray[np.bool_] = np.isnan(np.load(path, allow_pickle=False)[:, 0])
    return is_bad


def _join(parts: Path, folder: Path, paths: list[Path], out: Path, embedding_dim: int) -> None:
    """Joins the chunks into one file that appears whole, with one chunk in memory at a time."""
    is_bad_N = _is_bad(parts, len(paths))
    unfinished = parts / "joined.npy"
    joined = np.lib.format.open_memmap(  # type: ignore[no-untyped-call, unused-ignore]
        unfinished, mode="w+", dtype=np.float32, shape=(int((~is_bad_N).sum()), embedding_dim)
    )
    done = 0
    for chunk, start in enumerate(range(0, len(paths), _CHUNK)):
        rows_ND = np.load(_chunk_path(parts, chunk), allow_pickle=False)[~is_bad_N[start : start + _CHUNK]]
        joined[done : done + len(rows_ND)] = rows_ND
        done += len(rows_ND)
    joined.flush()
    del joined
    names = [str(path.relative_to(folder)) for path in paths]
    _write_names(out.with_suffix(".txt"), [name for name, is_bad in zip(names, is_bad_N, strict=True) if not is_bad])
    bad_names = [name for name, is_bad in zip(names, is_bad_N, strict=True) if is_bad]
    if bad_names:
        _write_names(out.with_suffix(".bad.txt"), bad_names)
    else:
        out.with_suffix(".bad.txt").unlink(missing_ok=True)
    unfinished.replace(out)
    shutil.rmtree(parts)


def _write_names(path: Path, names: list[str]) -> None:
    with published_file(path) as unfinished:
        unfinished.write_text("".join(f"{name}\n" for name in names), encoding="utf-8", errors="surrogateescape")


def _chunk_path(parts: Path, chunk: int) -> Path:
    return parts / f"chunk-{chunk:08d}.npy"
