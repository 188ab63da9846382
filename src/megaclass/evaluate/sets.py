"""What `--on` names -> evaluation sets -> results. A set that cannot be evaluated is noted, and the others still run."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from megaclass.data.decode import Fit
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.files import read_image_file
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.collectives import gather_blocks
from megaclass.errors import DataError, UserError
from megaclass.evaluate.embed import OnProgress, embed_images, embed_part, say_resized
from megaclass.evaluate.images import FileImages, PairImages, find_images
from megaclass.evaluate.pairs_list import read_pairs_list
from megaclass.evaluate.protocols.identification import (
    identify,
    labels_of,
    rank_among_distractors,
    read_megaface_features,
)
from megaclass.evaluate.protocols.templates import evaluate_ijb, find_ijb, read_ijb
from megaclass.evaluate.protocols.verification import ScoredPairs, score_embeddings
from megaclass.evaluate.results import SetResult, curves_of, result_of_pairs
from megaclass.evaluate.search import GalleryShard, rows_of_rank
from megaclass.image_size import ImageSize


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """A network and the way it is run; every method is collective and gives the same on every rank."""

    network: nn.Module
    image_size: ImageSize
    device: torch.device
    embedding_dim: int | None = None
    """Where embeddings from files must have the model's width; None: nothing to compare."""
    batch_size: int = 64
    num_threads: int = 1
    fit: Fit | None = None
    """How images of another size are fitted to the model's; None: they are refused."""
    mirror: bool = True
    """Whether the embedding of the mirrored image is added."""
    with_faiss: bool = False
    group: dist.ProcessGroup | None = None
    on_progress: OnProgress | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """What there is to evaluate at a path."""

    name: str
    kind: str
    """bin, list, templates, identification or distractors."""
    path: Path
    probes: Path | None = None
    """For identification: `path` is the gallery. For distractors: `path` holds the distractors."""


def find_sets(paths: Sequence[Path]) -> list[EvaluationSet]:
    """A .bin, a pairs list (.txt), an IJB folder, or a folder of any of them."""
    found: list[EvaluationSet] = []
    for path in paths:
        if path.suffix == ".bin":
            found.append(EvaluationSet(name=path.stem, kind="bin", path=path))
        elif path.suffix == ".txt":
            found.append(EvaluationSet(name=path.stem, kind="list", path=path))
        elif path.is_dir() and (ijb := find_ijb(path)):
            found.append(EvaluationSet(name=ijb, kind="templates", path=path))
        elif path.is_dir():
            below = [EvaluationSet(name=one.stem, kind="bin", path=one) for one in sorted(path.glob("*.bin"))]
            if (path / "pairs.txt").is_file():
                below.append(EvaluationSet(name=path.name, kind="list", path=path / "pairs.txt"))
            if not below:
                raise DataError(
                    f"{path} holds nothing to evaluate on: looked for *.bin, pairs.txt and meta/ijb?_face_tid_mid.txt."
                )
            found += below
        else:
            raise DataError(
                f"Cannot evaluate on {path}: expected a .bin file, a pairs list (.txt), an IJB folder or a folder of .bin "
                f"files{'' if path.exists() else ', but nothing is there'}."
            )
    return _with_distinct_names(found)


def evaluate_sets(evaluator: Evaluator, sets: Sequence[EvaluationSet]) -> list[SetResult]:
    """Collective. One result a set; what a user can mend is noted in the result and ends nothing but the set."""
    results = []
    for one in sets:
        try:
            result = _EVALUATE[one.kind](evaluator, one)
            if not evaluator.mirror:
                # Another protocol than the published one: its numbers say so wherever they are shown.
                result = replace(result, numbers={**result.numbers, "mirror": False})
        except (UserError, OSError) as error:  # what ranks agree on; see on_every_rank
            result = SetResult(name=one.name, kind=_KINDS[one.kind], path=str(one.path), error=str(error))
        results.append(result)
    return results


def score_pair_images(
    evaluator: Evaluator, name: str, images: PairImages | FileImages, is_same_N: NDArray[np.bool_], num_folds: int = 10
) -> ScoredPairs:
    """The published protocol on 2N images, pairs consecutive."""
    embedded = embed_images(
        evaluator.network,
        images,
        device=evaluator.device,
        batch_size=evaluator.batch_size,
        num_threads=evaluator.num_threads,
        mirror=evaluator.mirror,
        group=evaluator.group,
        on_progress=evaluator.on_progress,
    )
    return score_embeddings(name, embedded.sums_ND, is_same_N, xnorm=embedded.xnorm, num_folds=num_folds)


def _evaluate_bin(evaluator: Evaluator, one: EvaluationSet) -> SetResult:
    pair_set = on_every_rank(lambda: read_pairs(one.path), evaluator.device, evaluator.group)
    images = PairImages(pair_set=pair_set, image_size=evaluator.image_size, set_name=str(one.path), fit=evaluator.fit)
    scored = score_pair_images(evaluator, one.name, images, pair_set.is_same)
    return result_of_pairs(one.name, str(one.path), scored, pair_set.images)


def _evaluate_list(evaluator: Evaluator, one: EvaluationSet) -> SetResult:
    pairs = on_every_rank(lambda: read_pairs_list(one.path), evaluator.device, evaluator.group)
    images = FileImages(paths=pairs.paths, image_size=evaluator.image_size, fit=evaluator.fit)
    scored = score_pair_images(evaluator, one.name, images, pairs.is_same_N, pairs.num_folds)
    # A list may name files anywhere.
    names = [os.path.relpath(path, one.path.parent) for path in pairs.paths]
    return result_of_pairs(one.name, str(one.path), scored, _Encoded(pairs.paths), names)


def _evaluate_templates(evaluator: Evaluator, one: EvaluationSet) -> SetResult:
    ijb = on_every_rank(lambda: read_ijb(one.path), evaluator.device, evaluator.group)
    result = evaluate_ijb(
        evaluator.network,
        ijb,
        image_size=evaluator.image_size,
        device=evaluator.device,
        batch_size=evaluator.batch_size,
        num_threads=evaluator.num_threads,
        mirror=evaluator.mirror,
        group=evaluator.group,
        on_progress=evaluator.on_progress,
    )
    # Where the errors of both kinds are closest stands in for a threshold: the protocol has none.
    same, different = result.distances_M[result.is_same_M], result.distances_M[~result.is_same_M]
    threshold = float(np.quantile(different, result.verification.eer)) if len(same) else 0.0
    return SetResult(
        name=one.name,
        kind="templates",
        path=str(one.path),
        numbers=result.to_json(),
        curves=curves_of(result.distances_M, result.is_same_M, threshold=threshold),
    )


def _evaluate_identification(evaluator: Evaluator, one: EvaluationSet) -> SetResult:
    assert one.probes is not None
    probes = one.probes
    probes_PD, probe_names = _embeddings_at(evaluator, probes)
    shard, gallery_names = _shard_at(evaluator, one.path, probes_PD.shape[1])
    known = {name: number for number, name in enumerate(dict.fromkeys(gallery_names))}
    labels_N = labels_of(gallery_names, known)[shard.first : shard.first + len(shard)]
    # An image that looks for itself finds itself, whatever the model: it is compared with the other entries.
    keys_P = on_every_rank(lambda: _image_keys(probes, 0, len(probe_names)), evaluator.device, evaluator.group)
    stop = shard.first + len(shard)
    keys_N = on_every_rank(lambda: _image_keys(one.path, shard.first, stop), evaluator.device, evaluator.group)
    is_inside_P = torch.from_numpy(np.isin(keys_P, keys_N)).to(evaluator.device)
    num_in_gallery = int(gather_blocks(is_inside_P.to(torch.int64), evaluator.group).amax(dim=0).sum())
    numbers = identify(
        probes_PD,
        labels_of(probe_names, known),
        replace(shard, labels_N=labels_N, keys_N=keys_N),
        num_gallery=len(gallery_names),
        probe_keys_P=keys_P,
        num_in_gallery=num_in_gallery,
        device=evaluator.device,
        group=evaluator.group,
        with_faiss=evaluator.with_faiss,
    )
    return SetResult(name=one.name, kind="identification", path=str(one.path), numbers=numbers.to_json())


def _evaluate_distractors(evaluator: Evaluator, one: EvaluationSet) -> SetResult:
    assert one.probes is not None
    probes_PD, probe_names = _embeddings_at(evaluator, one.probes)
    shard, names = _shard_at(evaluator, one.path, probes_PD.shape[1])
    numbers = rank_among_distractors(
        probes_PD,
        labels_of(probe_names, {}),
        shard,
        num_distractors=len(names),
        device=evaluator.device,
        group=evaluator.group,
    )
    return SetResult(name=one.name, kind="distractors", path=str(one.path), numbers=numbers.to_json())


_EVALUATE: dict[str, Callable[[Evaluator, EvaluationSet], SetResult]] = {
    "bin": _evaluate_bin,
    "list": _evaluate_list,
    "templates": _evaluate_templates,
    "identification": _evaluate_identification,
    "distractors": _evaluate_distractors,
}
_KINDS = {
    "bin": "pairs",
    "list": "pairs",
    "templates": "templates",
    "identification": "identification",
    "distractors": "distractors",
}


def _embeddings_at(evaluator: Evaluator, path: Path) -> tuple[NDArray[np.float32], list[str]]:
    """Collective. (N, D) normalised, on every rank, and whose each is."""
    found = on_every_rank(lambda: _stored_at(evaluator, path), evaluator.device, evaluator.group)
    if found is not None:
        rows, names = found
        return on_every_rank(lambda: rows(0, len(names)), evaluator.device, evaluator.group), names
    files = on_every_rank(lambda: find_images(path), evaluator.device, evaluator.group)
    embedded = embed_images(
        evaluator.network,
        FileImages(paths=files, image_size=evaluator.image_size, fit=evaluator.fit),
        device=evaluator.device,
        batch_size=evaluator.batch_size,
        num_threads=evaluator.num_threads,
        mirror=evaluator.mirror,
        group=evaluator.group,
        on_progress=evaluator.on_progress,
    )
    return embedded.normalised_ND(), [one.parent.name for one in files]


def _shard_at(evaluator: Evaluator, path: Path, width: int) -> tuple[GalleryShard, list[str]]:
    """Collective. This rank's rows of a gallery, normalised, and whose each of all rows is.

    No rank reads or embeds more than its part: a gallery of millions need not fit into one of them.
    """

    def read() -> tuple[GalleryShard, list[str]]:
        found = _stored_at(evaluator, path)
        names = found[1] if found is not None else []
        files = find_images(path) if found is None else []
        names = names or [one.parent.name for one in files]
        rows_here = rows_of_rank(len(names), evaluator.group)
        start, stop = rows_here.start, rows_here.stop
        if found is not None:
            rows_ND = found[0](start, stop)
        else:
            # A rank without a row of its own embeds one all the same, to know the width.
            part = range(start, stop) or range(1)
            images = FileImages(paths=files, image_size=evaluator.image_size, fit=evaluator.fit)
            rows = embed_part(
                evaluator.network,
                images,
                part,
                device=evaluator.device,
                batch_size=evaluator.batch_size,
                num_threads=evaluator.num_threads,
                mirror=evaluator.mirror,
                on_progress=evaluator.on_progress,
            )
            say_resized(len(images.resized), len(part), evaluator.image_size, f"of {path}, on this rank")
            rows_ND = nn.functional.normalize(rows[: stop - start, :-1]).cpu().numpy()
        if rows_ND.shape[1] != width:
            raise DataError(
                f"Embeddings of the probes have {width} numbers, those of the gallery {path} {rows_ND.shape[1]}: they come "
                f"from different models."
            )
        return GalleryShard(embeddings_ND=rows_ND, first=start), names

    return on_every_rank(read, evaluator.device, evaluator.group)


def _image_keys(path: Path, start: int, stop: int) -> NDArray[np.int64]:
    """A number for the content of each of these images, feature files or rows: equal ones are the same image."""
    if path.suffix == ".npy":
        rows_ND = read_embeddings(path)[0][start:stop]
        contents = (row.tobytes() for row in rows_ND)
    else:
        features = sorted(path.rglob("*.bin")) if path.is_dir() else []
        contents = (read_image_file(file) for file in (features or find_images(path))[start:stop])
    keys = [int.from_bytes(hashlib.blake2b(one, digest_size=8).digest(), "little", signed=True) for one in contents]
    return np.array(keys, dtype=np.int64)


_Rows = Callable[[int, int], NDArray[np.float32]]
"""(start, stop) -> those rows, normalised."""


def _stored_at(evaluator: Evaluator, path: Path) -> tuple[_Rows, list[str]] | None:
    """Embeddings that lie on disk: an embeddings.npy or a folder of MegaFace features; None where images must be embedded."""
    if path.suffix == ".npy":
        mapped_ND, names = read_embeddings(path)
        return lambda start, stop: _normalised(evaluator, mapped_ND[start:stop], path, start), names
    features = sorted(path.rglob("*.bin")) if path.is_dir() else []
    if not features:
        return None

    def read(start: int, stop: int) -> NDArray[np.float32]:
        rows_ND = read_megaface_features(features[start:stop] or features[:1])[: stop - start]
        return _normalised(evaluator, rows_ND, path, start)

    return read, [one.parent.name for one in features]


def read_embeddings(path: Path) -> tuple[NDArray[np.float32], list[str]]:
    """`embeddings.npy` and the names of the identities from `embeddings.txt` beside it, as `megaclass embed` writes them."""
    listing = path.with_suffix(".txt")
    try:
        rows_ND = np.load(path, mmap_mode="r", allow_pickle=False)
        lines = listing.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read the embeddings {path} and their list {listing}: {error}") from error
    if rows_ND.ndim != 2 or rows_ND.dtype != np.float32 or len(rows_ND) != len(lines):
        raise DataError(
            f"{path} holds {rows_ND.dtype} of shape {rows_ND.shape}, {listing} {len(lines)} lines: expected float32 (N, D) "
            f"and N lines."
        )
    return rows_ND, [Path(line).parent.name for line in lines]


def _normalised(evaluator: Evaluator, rows_ND: NDArray[np.float32], path: Path, first: int) -> NDArray[np.float32]:
    if evaluator.embedding_dim is not None and rows_ND.shape[1] != evaluator.embedding_dim:
        raise DataError(
            f"Embeddings in {path} have {rows_ND.shape[1]} numbers, the model gives {evaluator.embedding_dim}: they come "
            f"from another model."
        )
    norms_N = np.linalg.norm(rows_ND, axis=1)
    is_usable_N = np.isfinite(norms_N) & (norms_N > 0)
    if not is_usable_N.all():
        row = first + int(np.flatnonzero(~is_usable_N)[0])
        raise DataError(f"Row {row} of {path} is not finite or all zeros: it is the embedding of nothing.")
    return np.asarray(rows_ND / norms_N[:, None], dtype=np.float32)


class _Encoded(Sequence[bytes]):
    """Image files as their bytes, read when asked for: the report keeps two dozen of thousands."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        return read_image_file(self._paths[index])


def _with_distinct_names(sets: list[EvaluationSet]) -> list[EvaluationSet]:
    """Results are kept by name: two lfw.bin of different folders become parent-lfw, or with as many parents as it takes,
    lfw.bin and lfw.txt of one folder lfw.bin and lfw.txt. What is given twice counts once."""
    sets = list({(one.kind, one.path.absolute()): one for one in sets}.values())
    places = [(one.path.absolute().parent, one.name) for one in sets]
    names = [one.path.name if places.count(place) > 1 else one.name for one, place in zip(sets, places, strict=True)]
    shared = {name for name in names if names.count(name) > 1}
    num_parents = 0
    distinct = names
    while len(set(distinct)) < len(distinct):
        num_parents += 1
        distinct = [
            "-".join([*one.path.absolute().parts[-1 - num_parents : -1], name]) if name in shared else name
            for one, name in zip(sets, names, strict=True)
        ]
    return [replace(one, name=name) for one, name in zip(sets, distinct, strict=True)]
