"""The protocol of InsightFace's .bin files and of pair lists: is it the same identity on both images?

The arithmetic is in `verification.py`. Here: reading both kinds of set, and what the report shows
of them. A pair list is LFW's pairs.txt, or lines of `first second 0|1`. In LFW's form a line of
counts comes first; then `name n m` names two images of one person and `name n name m` images of two
persons, in files such as name/name_0001.jpg. Paths are relative to the folder of the list.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import IMAGE_SUFFIXES, Fit, decode_batch
from megaclass.data.pair_file import PairSet, read_pairs
from megaclass.data.sources.files import read_image_file
from megaclass.distributed.agreement import on_every_rank
from megaclass.errors import DataError
from megaclass.evaluation.images import GivenImages, PairImages
from megaclass.evaluation.protocol import (
    Cell,
    Curves,
    EvaluationProtocol,
    EvaluationSet,
    Evaluator,
    Floats,
    HardPair,
    Numbers,
    Row,
    SetResult,
    best_cells,
    percent,
    rate_rows,
    share_cells,
)
from megaclass.evaluation.protocols.verification import Roc, ScoredPairs, roc_curve, score_embeddings, verify_distances
from megaclass.evaluation.training_overlap import training_data_line
from megaclass.image_size import ImageSize, height_and_width


@dataclass(frozen=True, kw_only=True, eq=False)
class PairsList:
    """The pairs of a list: pair i consists of the paths 2i and 2i + 1."""

    paths: list[Path]
    is_same_N: NDArray[np.bool_]
    num_folds: int
    """Number of folds from the first line of the list, or ten."""


def read_pairs_list(path: Path) -> PairsList:
    folder = path.parent
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the pairs {path}: {error}") from error
    numbered = [(number, line.split()) for number, line in enumerate(lines, start=1) if line.strip()]
    num_folds = 10
    if numbered and len(numbered[0][1]) <= 2 and all(map(_is_number, numbered[0][1])):
        counts = numbered.pop(0)[1]
        num_folds = int(counts[0]) if len(counts) == 2 else 10
    if not numbered:
        raise DataError(f"{path} holds no pairs.")
    paths: list[Path] = []
    is_same: list[bool] = []
    for number, words in numbered:
        first, second, same = _pair(words, folder, f"Line {number} of {path}")
        paths += [first, second]
        is_same.append(same)
    return PairsList(paths=paths, is_same_N=np.array(is_same), num_folds=num_folds)


def _is_number(word: str) -> bool:
    """Tells whether int() reads the word: str.isdigit() is also true of "²", and int() refuses thousands of digits."""
    return word.isascii() and word.isdigit() and len(word) < 10


def _pair(words: list[str], folder: Path, where: str) -> tuple[Path, Path, bool]:
    match words:
        case [name, first, second] if _is_number(first) and _is_number(second):
            return _numbered(folder, name, first, where), _numbered(folder, name, second, where), True
        case [name, first, other, second] if _is_number(first) and _is_number(second):
            return _numbered(folder, name, first, where), _numbered(folder, other, second, where), False
        case [left, right, ("0" | "1") as same]:
            return _existing(folder / left, where), _existing(folder / right, where), same == "1"
    raise DataError(f"{where} is {' '.join(words)[:80]!r}: expected `name n m`, `name n name m` or `first second 0|1`.")


def _numbered(folder: Path, name: str, number: str, where: str) -> Path:
    stem = folder / name / f"{name}_{int(number):04d}"
    for suffix in IMAGE_SUFFIXES:
        if _is_file(path := stem.with_name(stem.name + suffix)):
            return path
    raise DataError(
        f"{where} names image {number} of {name}, but there is no {stem}.jpg (nor {', '.join(IMAGE_SUFFIXES[1:])})."
    )


def _existing(path: Path, where: str) -> Path:
    if not _is_file(path):
        raise DataError(f"{where} names {path}, which does not exist.")
    return path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a name that is too long, or a folder that may not be entered


_ABSENT = "–"
_MISTAKES_KEPT = 12


class PairProtocol(EvaluationProtocol):
    """Verification of pairs in ten folds."""

    kind = "pairs"
    card_name = "10 folds, both flips"
    quoted_at = ("accuracy",)
    found_at = "a .bin file, a pairs list (.txt), or a folder with *.bin or pairs.txt"

    def find(self, path: Path) -> list[EvaluationSet]:
        if path.suffix in (".bin", ".txt"):
            return [EvaluationSet(name=path.stem, kind=self.kind, path=path)]
        if not path.is_dir():
            return []
        found = [EvaluationSet(name=one.stem, kind=self.kind, path=one) for one in sorted(path.glob("*.bin"))]
        if (path / "pairs.txt").is_file():
            found.append(EvaluationSet(name=path.absolute().name, kind=self.kind, path=path / "pairs.txt"))
        return found

    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        return _evaluate_list(evaluator, one) if one.path.suffix == ".txt" else _evaluate_bin(evaluator, one)

    def headline(self, numbers: Numbers) -> str:
        return f"{percent(numbers['accuracy'])} ± {100 * numbers['accuracy_std']:.2f}"

    def lead(self, numbers: Numbers) -> str:
        num_folds = len(numbers["fold_accuracies"])
        return (
            f"{numbers['num_pairs']:,} pairs, {numbers['num_same']:,} of the same identity. Accuracy: the threshold is "
            f"chosen on {num_folds - 1} folds and judged on the one left out. In brackets: 95 % confidence."
        )

    def meaning(self, numbers: Numbers) -> str:
        share = numbers["num_same"] / max(1, numbers["num_pairs"])
        return (
            f"Shown the two images of a pair, the model says correctly in {numbers['accuracy']:.1%} of cases whether both "
            f"are of the same identity; guessing is right in {max(share, 1 - share):.0%}."
        )

    def remark(self, numbers: Numbers) -> str:
        return training_data_line(numbers)

    def drawn(self, numbers: Numbers) -> Iterable[float]:
        return [one for one in numbers.get("threshold_at_far", {}).values() if one is not None]

    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        accuracies = [n["accuracy"] for n in columns]
        rows: list[Row] = [
            ("Accuracy", best_cells([percent(accuracy) for accuracy in accuracies], accuracies)),
            ("Deviation over folds", [Cell(percent(n["accuracy_std"])) for n in columns]),
            *rate_rows(columns),
        ]
        # InsightFace's own number, for comparison. With too few different pairs it is a matter of luck and left out.
        if any(n["tar_at_far"].get("1e-3") is not None for n in columns):
            published = [n.get("published_tar_at_far_1e-3") for n in columns]
            rows.append(("TAR at FAR 1e-3, published grid", share_cells(published)))
        rows.append(("Best threshold (cosine)", [Cell(f"{1 - n['threshold'] / 2:.3f}") for n in columns]))
        xnorms = [n.get("xnorm") for n in columns]
        if any(xnorm is not None for xnorm in xnorms):
            rows.append(("XNorm", [Cell(_ABSENT if xnorm is None else f"{xnorm:.2f}") for xnorm in xnorms]))
        return rows


def _evaluate_bin(evaluator: Evaluator, one: EvaluationSet) -> SetResult:
    pair_set = on_every_rank(lambda: read_pairs(one.path), evaluator.device, evaluator.group)
    images = PairImages(pair_set=pair_set, image_size=evaluator.image_size, set_name=str(one.path), fit=evaluator.fit)
    scored = _score(evaluator, images, pair_set.is_same)
    return result_of_pairs(one.name, str(one.path), scored, pair_set.images.__getitem__)


def _evaluate_list(evaluator: Evaluator, one: EvaluationSet) -> SetResult:
    pairs = on_every_rank(lambda: read_pairs_list(one.path), evaluator.device, evaluator.group)
    images = GivenImages(images=pairs.paths, image_size=evaluator.image_size, fit=evaluator.fit)
    scored = _score(evaluator, images, pairs.is_same_N, pairs.num_folds)
    # A list may name files outside its own folder.
    names = [os.path.relpath(path, one.path.parent) for path in pairs.paths]
    return result_of_pairs(one.name, str(one.path), scored, lambda index: read_image_file(pairs.paths[index]), names)


def _score(
    evaluator: Evaluator, images: PairImages | GivenImages, is_same_N: NDArray[np.bool_], num_folds: int = 10
) -> ScoredPairs:
    embedded = evaluator.embed(images)
    return score_embeddings(embedded.sums_ND, is_same_N, xnorm=embedded.xnorm, num_folds=num_folds)


def result_of_pairs(
    name: str,
    path: str,
    scored: ScoredPairs,
    encoded: Callable[[int], bytes] | None,
    names: Sequence[str] | None = None,
) -> SetResult:
    """Returns numbers and curves. encoded: reads one of the 2N images, to keep those of the hardest pairs; None keeps none."""
    verification = scored.verification
    return SetResult(
        name=name,
        kind=PairProtocol.kind,
        path=path,
        numbers=verification.to_json(),
        curves=curves_of(scored.distances_N, scored.is_same_N, threshold=verification.threshold),
        hard_pairs=[] if encoded is None else hard_pairs_of(scored, encoded, names),
    )


def hard_pairs_of(
    scored: ScoredPairs, encoded: Callable[[int], bytes], names: Sequence[str] | None = None
) -> list[HardPair]:
    """Returns the closest different pairs, then the farthest same pairs, worst first."""
    different, same = np.flatnonzero(~scored.is_same_N), np.flatnonzero(scored.is_same_N)
    closest = different[np.argsort(scored.distances_N[different], kind="stable")][:_MISTAKES_KEPT]
    farthest = same[np.argsort(-scored.distances_N[same], kind="stable")][:_MISTAKES_KEPT]
    hard = []
    for pair in [*closest.tolist(), *farthest.tolist()]:
        is_called_same = scored.distances_N[pair] < scored.verification.threshold
        hard.append(
            HardPair(
                pair=pair,
                similarity=float(scored.similarities_N[pair]),
                is_same=bool(scored.is_same_N[pair]),
                is_wrong=bool(is_called_same != scored.is_same_N[pair]),
                pictures=(encoded(2 * pair), encoded(2 * pair + 1)),
                names=(names[2 * pair], names[2 * pair + 1]) if names else ("", ""),
            )
        )
    return hard


# ---- what the report draws of the distances -----------------------------------------------------------------------------

_NUM_BINS = 60
_MAX_ROC_POINTS = 600


def curves_of(distances_N: Floats, is_same_N: NDArray[np.bool_], *, threshold: float) -> Curves:
    """Returns ROC and histogram. threshold: squared distance below which a pair is called "same"."""
    similarities_N = 1 - distances_N / 2
    lowest = max(-1.0, np.floor(5 * float(similarities_N.min())) / 5)
    edges = np.linspace(min(lowest, 0.8), 1.0, _NUM_BINS + 1)
    roc = thinned_roc(roc_curve(distances_N, is_same_N))
    # Rounding can push the cosine of equal vectors above 1, and so out of the last bin.
    inside_N = similarities_N.clip(edges[0], edges[-1])
    return Curves(
        far=roc.far,
        tar=roc.tar,
        thresholds=(1 - roc.thresholds / 2).clip(-1.0, 1.0),
        edges=edges,
        same=np.histogram(inside_N[is_same_N], edges)[0] / max(1, is_same_N.sum()),
        different=np.histogram(inside_N[~is_same_N], edges)[0] / max(1, (~is_same_N).sum()),
        threshold=1 - threshold / 2,
        num_different=int((~is_same_N).sum()),
    )


def thinned_roc(roc: Roc) -> Roc:
    """Returns at most a few hundred points, spread evenly over the logarithm of the FAR; ends and corners stay."""
    if len(roc.far) <= _MAX_ROC_POINTS:
        return roc
    smallest = roc.far[roc.far > 0][0]
    wanted = np.geomspace(smallest, 1.0, _MAX_ROC_POINTS // 2)
    # The last point at or below each FAR has the highest TAR there.
    kept = np.searchsorted(roc.far, wanted, side="right") - 1
    last_without_accepts = int(np.searchsorted(roc.far, 0.0, side="right")) - 1
    indices = np.unique(np.concatenate([[0, last_without_accepts, len(roc.far) - 1], kept]))
    return Roc(far=roc.far[indices], tar=roc.tar[indices], thresholds=roc.thresholds[indices])


# ---- the baseline: verification without any training ------------------------------------------------------------------


def score_pixels(
    pair_set: PairSet, *, image_size: ImageSize, fit: Fit = "squash", name: str = "the pairs"
) -> ScoredPairs:
    """Verifies pairs by the cosine of their raw pixel values (0 to 255, all positions and channels).

    Images are decoded pair by pair: two are in memory at a time. name: of the set, in errors.
    """
    similarities_N = np.empty(len(pair_set.is_same))
    for pair in range(len(similarities_N)):
        indices = [2 * pair, 2 * pair + 1]
        names = [f"image {index} of {name} (pair {pair})" for index in indices]
        both = decode_batch([pair_set.images[index] for index in indices], height_and_width(image_size), names, fit)
        similarities_N[pair] = pixel_cosine(both[0], both[1])
    # A cosine s is a squared distance 2 - 2 s. These distances fill a small part of [0, 4], for which the published
    # grid is too coarse: every distance that occurs may be the threshold, and one above all of them.
    distances_N = 2 - 2 * similarities_N
    distinct = np.unique(distances_N)
    thresholds_T = np.append(distinct, np.nextafter(distinct[-1:], np.inf))
    verification = verify_distances(distances_N, pair_set.is_same, thresholds_T=thresholds_T)
    return ScoredPairs(distances_N=distances_N, is_same_N=pair_set.is_same, verification=verification)


def pixel_cosine(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    first_flat, second_flat = first.ravel().astype(np.float64), second.ravel().astype(np.float64)
    norms = np.linalg.norm(first_flat) * np.linalg.norm(second_flat)
    # Only an entirely black image has norm 0; it is similar to none.
    return float(first_flat @ second_flat / norms) if norms else 0.0
