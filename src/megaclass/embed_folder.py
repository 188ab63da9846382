"""A folder of images -> embeddings.npy, on any number of ranks; what was done before an interruption is not done again.

An image that cannot be read is left out, and its name goes to a list of its own: one bad file among millions costs one row.

Images are taken in the order of their names, in chunks. Rank r of W embeds chunks r, r + W, …, and leaves each as a file
in a folder beside the result; a chunk that is there is skipped, whoever made it. At the end rank 0 joins them.
"""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megaclass.data.decode import Fit
from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.distributed.collectives import gather_blocks, group_rank, group_size
from megaclass.errors import DataError
from megaclass.evaluate.embed import OnProgress, embed_part, log_resized
from megaclass.evaluate.images import FileImages, find_images
from megaclass.model import LoadedModel

_CHUNK = 1024
_PLAN = "plan.json"
_NUM_NAMED = 20


@dataclass(frozen=True)
class EmbeddedFolder:
    num_embedded: int
    num_bad: int
    """Image files that cannot be read: they have no row."""


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
    on_progress: OnProgress | None = None,
) -> EmbeddedFolder:
    """Collective. Writes `out`, float32 (N, D), normalised, and beside it a .txt with the N paths.

    Images that cannot be read are said on standard error and listed in a .bad.txt; where none can, that is an error.
    fit: how images of another size are fitted; None: they are refused, which ends the work.
    The folder and `out` must be visible to all ranks. on_progress gets the number of images that are done, and of all.
    """
    device, rank, num_ranks = model.device, group_rank(group), group_size(group)
    if out.suffix != ".npy":
        raise DataError(f"Embeddings are written as .npy, not to {out}.")
    paths = on_every_rank(lambda: find_images(folder), device, group)
    parts = out.with_name(f".{out.name}.parts")
    on_main_rank(lambda: _prepare(parts, _plan(model, folder, paths, fit, mirror)), device, group)
    images = FileImages(paths=paths, image_size=model.image_size, fit=fit)
    starts = range(0, len(paths), _CHUNK)
    num_bad = 0

    def say_bad(index: int, error: DataError) -> None:
        nonlocal num_bad
        num_bad += 1
        if num_bad <= _NUM_NAMED:
            print(f"megaclass: left out a bad image: {error}", file=sys.stderr, flush=True)

    def embed_own() -> None:
        for done, chunk in enumerate(range(rank, len(starts), num_ranks), start=1):
            path = _chunk_path(parts, chunk)
            # A chunk with bad images is embedded again: they may have been mended since.
            if not path.is_file() or _is_bad_chunk(path).any():
                part = range(starts[chunk], min(starts[chunk] + _CHUNK, len(paths)))
                rows = embed_part(
                    model.network,
                    images,
                    part,
                    device=device,
                    batch_size=batch_size,
                    num_threads=num_threads,
                    mirror=mirror,
                    on_bad=say_bad,
                )
                _write_chunk(path, torch.nn.functional.normalize(rows[:, :-1]).cpu().numpy())
            if on_progress is not None:
                # The other ranks are about as far.
                on_progress(min(len(paths), done * num_ranks * _CHUNK), len(paths))

    on_every_rank(embed_own, device, group)
    num_resized = int(gather_blocks(torch.tensor([len(images.resized)], device=device), group).sum())
    if rank == 0:
        log_resized(num_resized, len(paths), model.image_size, f"below {folder}, embedded since this start")
    num_bad = on_every_rank(lambda: int(_is_bad(parts, len(paths)).sum()), device, group)
    on_main_rank(lambda: _join(parts, folder, paths, out, model.embedding_dim), device, group)
    return EmbeddedFolder(len(paths) - num_bad, num_bad)


def _plan(model: LoadedModel, folder: Path, paths: list[Path], fit: Fit | None, mirror: bool) -> dict[str, object]:
    """What must be the same for the chunks of an earlier start to be of use."""
    listing = "\n".join(f"{path.relative_to(folder)} {_num_bytes(path)}" for path in paths)
    return {
        "model": model.fingerprint(),
        "images": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
        "num_images": len(paths),
        "chunk": _CHUNK,
        "fit": fit,
        "mirror": mirror,
    }


def _num_bytes(path: Path) -> int:
    """-1 for a link to nothing, which is then a bad image."""
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
        print(f"megaclass: going on with {num_done} chunk(s) of {_CHUNK} images from {parts}", file=sys.stderr)
        return
    shutil.rmtree(parts, ignore_errors=True)
    try:
        parts.mkdir(parents=True)
        path.write_text(json.dumps(plan), encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write {parts}: {error.strerror}.") from error


def _write_chunk(path: Path, rows_ND: NDArray[np.float32]) -> None:
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.tmp.npy")
    np.save(unfinished, rows_ND)
    unfinished.replace(path)


def _is_bad(parts: Path, num_images: int) -> NDArray[np.bool_]:
    """Which images could not be read: their rows are NaN."""
    chunks = range(-(-num_images // _CHUNK))
    is_bad_N = np.concatenate([_is_bad_chunk(_chunk_path(parts, chunk)) for chunk in chunks])
    if is_bad_N.all():
        raise DataError(f"None of the {num_images:,} images can be read; the messages above say why.")
    return is_bad_N


def _is_bad_chunk(path: Path) -> NDArray[np.bool_]:
    is_bad: NDArray[np.bool_] = np.isnan(np.load(path, allow_pickle=False)[:, 0])
    return is_bad


def _join(parts: Path, folder: Path, paths: list[Path], out: Path, embedding_dim: int) -> None:
    """One file that appears whole; a chunk is in memory at a time."""
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
    path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8", errors="surrogateescape")


def _chunk_path(parts: Path, chunk: int) -> Path:
    return parts / f"chunk-{chunk:08d}.npy"
