"""A folder of images -> embeddings.npy, on any number of ranks; what was done before an interruption is not done again.

Images are taken in the order of their names, in chunks. Rank r of W embeds chunks r, r + W, …, and leaves each as a file
in a folder beside the result; a chunk that is there is skipped, whoever made it. At the end rank 0 joins them.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.distributed.collectives import group_rank, group_size
from megaclass.errors import DataError
from megaclass.evaluate.embed import OnProgress, embed_part
from megaclass.evaluate.images import FileImages, find_images
from megaclass.evaluate.models import LoadedModel

_CHUNK = 1024
_PLAN = "plan.json"


def embed_folder(
    model: LoadedModel,
    folder: Path,
    out: Path,
    *,
    resize: bool = False,
    batch_size: int = 64,
    num_threads: int = 1,
    group: dist.ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> int:
    """Collective. Writes `out`, float32 (N, D), normalised, and beside it a .txt with the N paths; returns N.

    The folder and `out` must be visible to all ranks. on_progress gets the number of images that are done, and of all.
    """
    device, rank, num_ranks = model.device, group_rank(group), group_size(group)
    if out.suffix != ".npy":
        raise DataError(f"Embeddings are written as .npy, not to {out}.")
    paths = on_every_rank(lambda: find_images(folder), device, group)
    parts = out.with_name(f".{out.name}.parts")
    on_main_rank(lambda: _prepare(parts, _plan(model, folder, paths, resize)), device, group)
    images = FileImages(paths=paths, image_size=model.image_size, resize=resize)
    starts = range(0, len(paths), _CHUNK)

    def embed_own() -> None:
        for done, chunk in enumerate(range(rank, len(starts), num_ranks), start=1):
            path = parts / f"chunk-{chunk:08d}.npy"
            if not path.is_file():
                part = range(starts[chunk], min(starts[chunk] + _CHUNK, len(paths)))
                rows = embed_part(
                    model.network, images, part, device=device, batch_size=batch_size, num_threads=num_threads
                )
                _write_chunk(path, torch.nn.functional.normalize(rows[:, :-1]).cpu().numpy())
            if on_progress is not None:
                # The other ranks are about as far.
                on_progress(min(len(paths), done * num_ranks * _CHUNK), len(paths))

    on_every_rank(embed_own, device, group)
    on_main_rank(lambda: _join(parts, folder, paths, out, model.embedding_dim), device, group)
    return len(paths)


def _plan(model: LoadedModel, folder: Path, paths: list[Path], resize: bool) -> dict[str, object]:
    """What must be the same for the chunks of an earlier start to be of use."""
    listing = "\n".join(f"{path.relative_to(folder)} {path.stat().st_size}" for path in paths)
    return {
        "model": model.fingerprint(),
        "images": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
        "num_images": len(paths),
        "chunk": _CHUNK,
        "resize": resize,
    }


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


def _join(parts: Path, folder: Path, paths: list[Path], out: Path, embedding_dim: int) -> None:
    """One file that appears whole; a chunk is in memory at a time."""
    unfinished = parts / "joined.npy"
    joined = np.lib.format.open_memmap(  # type: ignore[no-untyped-call, unused-ignore]
        unfinished, mode="w+", dtype=np.float32, shape=(len(paths), embedding_dim)
    )
    for chunk, start in enumerate(range(0, len(paths), _CHUNK)):
        joined[start : start + _CHUNK] = np.load(parts / f"chunk-{chunk:08d}.npy", allow_pickle=False)
    joined.flush()
    del joined
    listing = "".join(f"{path.relative_to(folder)}\n" for path in paths)
    out.with_suffix(".txt").write_text(listing, encoding="utf-8", errors="surrogateescape")
    unfinished.replace(out)
    shutil.rmtree(parts)
