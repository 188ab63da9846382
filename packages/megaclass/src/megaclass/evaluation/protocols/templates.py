"""The protocol of IJB-B and IJB-C: photos and video frames of a person become one template -> 1:1 and 1:N numbers.

A feature is f(x) + f(mirrored x) of the aligned photo, times the score of the face detector. A template is the sum over its
media of the mean over each medium's frames, normalised. docs/evaluation.md describes the files and landmarks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megaclass.distributed.agreement import on_every_rank
from megaclass.errors import DataError
from megaclass.evaluation.images import AlignedImages
from megaclass.evaluation.protocol import (
    EvaluationProtocol,
    EvaluationSet,
    Evaluator,
    Numbers,
    Row,
    SetResult,
    rate_rows,
    share_rows,
)
from megaclass.evaluation.protocols.identification import numbers_of, published_ijb_tpir
from megaclass.evaluation.protocols.pairs import curves_of
from megaclass.evaluation.protocols.verification import pair_rates
from megaclass.evaluation.search import search, shard_of_rank

Integers = NDArray[np.int64]
_PAIRS_AT_ONCE = 2**16
_PUBLISHED_FPIR = (0.01, 0.1)
_NUM_POINTS = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class IjbSet:
    """Content of the `meta` folder. Row i of photos, points and scores is one photo or frame."""

    path: Path
    name: str
    """ijbb or ijbc."""
    photos: list[Path]
    points_N52: NDArray[np.float64]
    scores_N: NDArray[np.float64]
    """Scores of the face detector."""
    templates_N: Integers
    media_N: Integers
    pairs_M3: Integers
    """Two templates, and 1 if they show the same person."""
    galleries: dict[str, Integers]
    """(T, 2) template and subject, keyed by the name of the gallery; empty without the 1:N files."""
    probes_T2: Integers


def find_ijb(path: Path) -> str | None:
    """Returns ijbb or ijbc if the folder holds such a set."""
    for name in ("ijbb", "ijbc"):
        if (path / "meta" / f"{name}_face_tid_mid.txt").is_file():
            return name
    return None


class TemplateProtocol(EvaluationProtocol):
    """IJB-B and IJB-C."""

    kind = "templates"
    card_name = "1:1"
    quoted_at = ("tar_at_far", "1e-4")
    headline_form = "TAR {quoted} at FAR 1e-4"
    lead_form = "{num_pairs:,} pairs of templates, {num_same:,} of the same person."
    found_at = "an IJB folder (with meta/ijb?_face_tid_mid.txt)"

    def find(self, path: Path) -> list[EvaluationSet]:
        name = find_ijb(path)
        return [] if name is None else [EvaluationSet(name=name, kind=self.kind, path=path)]

    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        ijb = on_every_rank(lambda: read_ijb(one.path), evaluator.device, evaluator.group)
        numbers, distances_M, is_same_M = evaluate_ijb(evaluator, ijb)
        if evaluator.published_tpir:
            numbers["is_tpir_published"] = True
        # The protocol has no threshold: the point where both kinds of error are closest stands in for one.
        threshold = float(np.quantile(distances_M[~is_same_M], numbers["eer"]))
        return self.result(one, numbers, curves=curves_of(distances_M, is_same_M, threshold=threshold))

    def remark(self, numbers: Numbers) -> str:
        is_published = numbers.get("is_tpir_published") is True and "identification" in numbers
        return "TPIR has the threshold of InsightFace's ijb_evals.py (--published-tpir)." if is_published else ""

    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        rows = rate_rows(columns)
        for gallery in columns[0].get("identification", {}):
            found = [n.get("identification", {}).get(gallery, {}) for n in columns]
            rows += share_rows(found, "rank_k", f"1:N {gallery}, rank-{{}}")
            rows += share_rows(found, "tpir_at_fpir", f"1:N {gallery}, TPIR at FPIR {{}}")
        published = "1:N joined, TPIR at FPIR {}, published threshold"
        return rows + share_rows(columns, "published_tpir_at_fpir", published)


def read_ijb(path: Path) -> IjbSet:
    name = find_ijb(path)
    if name is None:
        raise DataError(
            f"{path} holds no IJB set: looked for meta/ijbb_face_tid_mid.txt and meta/ijbc_face_tid_mid.txt."
        )
    meta = path / "meta"
    members = _rows(meta / f"{name}_face_tid_mid.txt", 3)
    landmarks = _rows(meta / f"{name}_name_5pts_score.txt", 2 + 2 * _NUM_POINTS)
    if len(members) != len(landmarks):
        raise DataError(
            f"{meta / f'{name}_face_tid_mid.txt'} has {len(members)} lines, {meta / f'{name}_name_5pts_score.txt'} "
            f"{len(landmarks)}: expected one of each per image."
        )
    numbers = _numbers((row[1:] for row in landmarks), meta / f"{name}_name_5pts_score.txt")
    pairs_path = meta / f"{name}_template_pair_label.txt"
    pairs_M3 = _numbers(_rows(pairs_path, 3), pairs_path).astype(np.int64)
    ids = _numbers((row[1:] for row in members), meta / f"{name}_face_tid_mid.txt").astype(np.int64)
    _require_templates(set(pairs_M3[:, :2].ravel().tolist()), set(ids[:, 0].tolist()), pairs_path)
    galleries, probes = _read_galleries(meta, name, set(ids[:, 0].tolist()))
    return IjbSet(
        path=path,
        name=name,
        photos=[path / "loose_crop" / row[0] for row in landmarks],
        points_N52=numbers[:, : 2 * _NUM_POINTS].reshape(-1, _NUM_POINTS, 2),
        scores_N=numbers[:, -1],
        templates_N=ids[:, 0],
        media_N=ids[:, 1],
        pairs_M3=pairs_M3,
        galleries=galleries,
        probes_T2=probes,
    )


def evaluate_ijb(evaluator: Evaluator, ijb: IjbSet) -> tuple[dict[str, Any], NDArray[np.float64], NDArray[np.bool_]]:
    """Collective. Returns the numbers, and the distance and kind of every pair; the same on every rank.

    All ranks embed photos and search galleries. The 1:N numbers are keyed by gallery: each as an open-set test of its own, and
    `joined`, all galleries as one as in InsightFace's script, whose threshold gives the published TPIR.
    """
    embedded = evaluator.embed(
        AlignedImages(paths=ijb.photos, points_N52=ijb.points_N52, image_size=evaluator.image_size)
    )
    features_ND = embedded.sums_ND * ijb.scores_N[:, None].astype(np.float32)
    templates_TD, ids_T = template_features(features_ND, ijb.templates_N, ijb.media_N)
    return score_templates(
        templates_TD,
        ids_T,
        ijb,
        device=evaluator.device,
        group=evaluator.group,
        published_tpir=evaluator.published_tpir,
    )


def template_features(
    features_ND: NDArray[Any], templates_N: Integers, media_N: Integers
) -> tuple[NDArray[np.float64], Integers]:
    """Returns (T, D) normalised sums over media of the mean over frames, and the numbers of the templates in rising order."""
    # Sorted by template and then by medium, both means and sums are segments of consecutive rows.
    order = np.lexsort((media_N, templates_N))
    starts = np.flatnonzero(np.diff(templates_N[order], prepend=-1) | np.diff(media_N[order], prepend=-1))
    counts = np.diff(np.append(starts, len(order)))
    means_MD = np.add.reduceat(np.asarray(features_ND, dtype=np.float64)[order], starts) / counts[:, None]
    owners_M = templates_N[order][starts]
    first_of_template = np.flatnonzero(np.diff(owners_M, prepend=-1))
    sums_TD = np.add.reduceat(means_MD, first_of_template)
    norms_T1 = np.linalg.norm(sums_TD, axis=1, keepdims=True)
    ids_T = owners_M[first_of_template]
    if not (norms_T1 > 0).all():
        raise DataError(f"Template {ids_T[int(np.argmin(norms_T1))]} adds up to zero and cannot be normalised.")
    return sums_TD / norms_T1, ids_T


def score_templates(
    templates_TD: NDArray[np.float64],
    ids_T: Integers,
    ijb: IjbSet,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    published_tpir: bool = False,
) -> tuple[dict[str, Any], NDArray[np.float64], NDArray[np.bool_]]:
    rows_M2 = np.searchsorted(ids_T, ijb.pairs_M3[:, :2])
    is_same_M = ijb.pairs_M3[:, 2] == 1
    if is_same_M.all() or not is_same_M.any():
        raise DataError(
            f"All {len(is_same_M)} template pairs of {ijb.path} have the same label: both kinds are needed."
        )
    # IJB-C has 15.7 million pairs: their rows are gathered in blocks, never all at once.
    distances_M = np.empty(len(rows_M2))
    for start in range(0, len(rows_M2), _PAIRS_AT_ONCE):
        here = slice(start, start + _PAIRS_AT_ONCE)
        first, second = templates_TD[rows_M2[here, 0]], templates_TD[rows_M2[here, 1]]
        distances_M[here] = 2 - 2 * np.einsum("md,md->m", first, second)
    identification, published = _identify(templates_TD.astype(np.float32), ids_T, ijb, device, group, published_tpir)
    searched = {"identification": identification, "published_tpir_at_fpir": published} if identification else {}
    return {**pair_rates(distances_M, is_same_M).to_json(), **searched}, distances_M, is_same_M


def _identify(
    templates_TD: NDArray[np.float32],
    ids_T: Integers,
    ijb: IjbSet,
    device: torch.device,
    group: dist.ProcessGroup | None,
    published_tpir: bool,
) -> tuple[dict[str, dict[str, Any]], dict[str, float | None]]:
    if not ijb.galleries:
        return {}, {}
    probes_PD = templates_TD[np.searchsorted(ids_T, ijb.probes_T2[:, 0])]
    results: dict[str, dict[str, Any]] = {}
    published: dict[str, float | None] = {}
    joined = np.concatenate(list(ijb.galleries.values()))
    for name, members_G2 in {**ijb.galleries, "joined": joined}.items():
        gallery = shard_of_rank(templates_TD[np.searchsorted(ids_T, members_G2[:, 0])], members_G2[:, 1], group)
        # The published threshold is the k-th best score of all probes together: no probe contributes more than k of them.
        k = min(len(members_G2), max(10, int(np.ceil(max(_PUBLISHED_FPIR) * len(probes_PD)))))
        found = search(probes_PD, gallery, k=k, device=device, probe_labels_P=ijb.probes_T2[:, 1], group=group)
        results[name] = numbers_of(found, num_gallery=len(members_G2), published_tpir=published_tpir)
        if name == "joined":
            mates_P, others_Pk = (one.double().cpu().numpy() for one in (found.mate_scores_P, found.other_scores_Pk))
            impostors = -np.sort(-others_Pk[np.isfinite(others_Pk)])
            published = {f"{fpir:g}": published_ijb_tpir(mates_P, impostors, fpir) for fpir in _PUBLISHED_FPIR}
    return results, published


def _read_galleries(meta: Path, name: str, known: set[int]) -> tuple[dict[str, Integers], Integers]:
    letter = "G" if name == "ijbc" else "S"
    paths = {f"{letter}{number}": meta / f"{name}_1N_gallery_{letter}{number}.csv" for number in (1, 2)}
    probe_path = meta / f"{name}_1N_probe_mixed.csv"
    if not any(path.is_file() for path in [*paths.values(), probe_path]):
        return {}, np.empty((0, 2), dtype=np.int64)
    lists = {key: _template_list(path, known) for key, path in paths.items()}
    return lists, _template_list(probe_path, known)


def _template_list(path: Path, known: set[int]) -> Integers:
    """Reads (T, 2) template and subject. Some files list a template once per frame; it counts once."""
    rows = [row.split(",")[:2] for row in _text(path).splitlines()[1:] if row.strip()]
    if not rows:
        raise DataError(f"{path} lists no templates: expected lines `template,subject` after a line of titles.")
    for number, row in enumerate(rows, start=2):
        if len(row) != 2:
            raise DataError(f"Line {number} of {path} has one column: expected `template,subject`.")
    listed = _numbers(rows, path, first_line=2).astype(np.int64)
    _require_templates(set(listed[:, 0].tolist()), known, path)
    _, first = np.unique(listed[:, 0], return_index=True)
    return listed[np.sort(first)]


def _require_templates(wanted: set[int], known: set[int], path: Path) -> None:
    missing = sorted(wanted - known)
    if missing:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        raise DataError(
            f"Template {missing[0]}{more} in {path} has no images: every template must be in the _face_tid_mid.txt next to it."
        )


def _rows(path: Path, num_columns: int) -> list[list[str]]:
    rows = [line.split() for line in _text(path).splitlines() if line.strip()]
    for number, row in enumerate(rows, start=1):
        if len(row) != num_columns:
            raise DataError(f"Line {number} of {path} has {len(row)} columns: expected {num_columns}.")
    if not rows:
        raise DataError(f"{path} is empty.")
    return rows


def _numbers(rows: Iterable[list[str]], path: Path, first_line: int = 1) -> NDArray[np.float64]:
    numbers = []
    for number, row in enumerate(rows, start=first_line):
        try:
            numbers.append([float(text) for text in row])
        except ValueError as error:
            raise DataError(f"Line {number} of {path}: {error}.") from error
        if not all(map(math.isfinite, numbers[-1])):
            raise DataError(f"Line {number} of {path}: {' '.join(row)[:80]!r} holds a number that is not finite.")
    return np.array(numbers)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}: {error}") from error
