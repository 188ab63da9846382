"""What an evaluation leaves: numbers for people and programs, curves and pictures for the report. Written and read back.

evaluation.json holds the numbers of all sets and why a set was not evaluated. evaluation/<set>.npz holds what the report
draws: ROC, histogram and the pictures of the worst mistakes, so that a report needs neither the model nor the data.
"""

import json
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.evaluate.verification import Roc, ScoredPairs, roc_curve
from megaclass.private_files import make_private_folder, open_private, write_private

Floats = NDArray[np.float64]

NUMBERS_FILE = "evaluation.json"
CURVES_FOLDER = "evaluation"
_FORMAT = 1
_NUM_BINS = 60
_MAX_ROC_POINTS = 600
_MISTAKES_KEPT = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """ROC and histogram of one model on one set of pairs, thinned to what a picture shows."""

    far: Floats
    tar: Floats
    edges: Floats
    """Of the histogram's bins, cosines."""
    same: Floats
    """Share of the same pairs in each bin."""
    different: Floats
    threshold: float
    """Cosine above which a pair is called same."""
    num_different: int


@dataclass(frozen=True, kw_only=True, eq=False)
class HardPair:
    """A pair the model finds hard, with its pictures as they were encoded."""

    pair: int
    similarity: float
    is_same: bool
    is_wrong: bool
    pictures: tuple[bytes, bytes]
    names: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True, eq=False)
class SetResult:
    """One model on one set: numbers, or the reason why there are none."""

    name: str
    kind: str
    """pairs, templates, identification or distractors."""
    path: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    curves: Curves | None = None
    hard_pairs: Sequence[HardPair] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"kind": self.kind, "path": self.path, "error": self.error}
        return {"kind": self.kind, "path": self.path, **self.numbers}


def curves_of(distances_N: Floats, is_same_N: NDArray[np.bool_], *, threshold: float) -> Curves:
    """`threshold`: squared distance below which a pair is called same."""
    similarities_N = 1 - distances_N / 2
    lowest = max(-1.0, np.floor(5 * float(similarities_N.min())) / 5)
    edges = np.linspace(min(lowest, 0.8), 1.0, _NUM_BINS + 1)
    roc = thinned_roc(roc_curve(distances_N, is_same_N))
    # Cosines of equal vectors may exceed 1 by a rounding.
    inside_N = similarities_N.clip(edges[0], edges[-1])
    return Curves(
        far=roc.far,
        tar=roc.tar,
        edges=edges,
        same=np.histogram(inside_N[is_same_N], edges)[0] / max(1, is_same_N.sum()),
        different=np.histogram(inside_N[~is_same_N], edges)[0] / max(1, (~is_same_N).sum()),
        threshold=1 - threshold / 2,
        num_different=int((~is_same_N).sum()),
    )


def thinned_roc(roc: Roc) -> Roc:
    """At most a few hundred points, spread evenly over the logarithm of the FAR; the ends and the corners stay."""
    if len(roc.far) <= _MAX_ROC_POINTS:
        return roc
    smallest = roc.far[roc.far > 0][0]
    wanted = np.geomspace(smallest, 1.0, _MAX_ROC_POINTS // 2)
    # The last point at or below each FAR: the highest TAR there.
    kept = np.searchsorted(roc.far, wanted, side="right") - 1
    last_without_accepts = int(np.searchsorted(roc.far, 0.0, side="right")) - 1
    indices = np.unique(np.concatenate([[0, last_without_accepts, len(roc.far) - 1], kept]))
    return Roc(far=roc.far[indices], tar=roc.tar[indices])


def hard_pairs_of(scored: ScoredPairs, pictures: Sequence[bytes], names: Sequence[str] | None = None) -> list[HardPair]:
    """The closest different pairs, then the farthest same pairs, worst first. pictures: 2N encoded images."""
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
                pictures=(pictures[2 * pair], pictures[2 * pair + 1]),
                names=(names[2 * pair], names[2 * pair + 1]) if names else ("", ""),
            )
        )
    return hard


def result_of_pairs(
    name: str, path: str, scored: ScoredPairs, pictures: Sequence[bytes] | None, names: Sequence[str] | None = None
) -> SetResult:
    """pictures: 2N encoded images, of which the hardest are kept; None: none are."""
    verification = scored.verification
    return SetResult(
        name=name,
        kind="pairs",
        path=path,
        numbers=verification.to_json(),
        curves=curves_of(scored.distances_N, scored.is_same_N, threshold=verification.threshold),
        hard_pairs=[] if pictures is None else hard_pairs_of(scored, pictures, names),
    )


def write_results(folder: Path, model: Mapping[str, Any], results: Sequence[SetResult]) -> Path:
    """Writes evaluation.json and evaluation/*.npz; sets that an earlier evaluation of the same model did are kept.

    An earlier file that cannot be read is replaced, with a word on standard error.
    """
    make_private_folder(folder)
    path = folder / NUMBERS_FILE
    try:
        earlier = _read_json(path) if path.is_file() else {}
    except DataError as error:
        print(f"megaclass: replaced: {error}", file=sys.stderr, flush=True)
        earlier = {}
    sets = dict(earlier.get("sets", {})) if earlier.get("model") == dict(model) else {}
    make_private_folder(folder / CURVES_FOLDER)
    for result in results:
        if result.error is not None and "error" not in sets.get(result.name, {"error": ""}):
            continue  # the numbers of before are still the model's
        sets[result.name] = result.to_json()
        if result.error is None:
            _write_curves(folder / CURVES_FOLDER / f"{result.name}.npz", result)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_private(unfinished, json.dumps({"format": _FORMAT, "model": dict(model), "sets": sets}, indent=1) + "\n")
    unfinished.replace(path)
    return path


def read_results(folder: Path) -> list[SetResult]:
    """What `write_results` left in the folder; nothing where it never wrote."""
    path = folder / NUMBERS_FILE
    if not path.is_file():
        return []
    results = []
    for name, numbers in _read_json(path).get("sets", {}).items():
        said = dict(numbers)
        kind, where, error = said.pop("kind", "pairs"), said.pop("path", ""), said.pop("error", None)
        curves_path = folder / CURVES_FOLDER / f"{name}.npz"
        curves, hard = _read_curves(curves_path) if error is None and curves_path.is_file() else (None, [])
        results.append(
            SetResult(name=name, kind=kind, path=where, numbers=said, curves=curves, hard_pairs=hard, error=error)
        )
    return results


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path}: {error}. Evaluate again.") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise DataError(f"{path} is no evaluation of this version of megaclass. Evaluate again.")
    return values


def _write_curves(path: Path, result: SetResult) -> None:
    arrays: dict[str, Any] = {}
    if result.curves is not None:
        for name in ("far", "tar", "edges", "same", "different"):
            arrays[name] = getattr(result.curves, name)
        arrays["marks"] = np.array([result.curves.threshold, result.curves.num_different])
    if result.hard_pairs:
        said = [
            {"pair": h.pair, "similarity": h.similarity, "is_same": h.is_same, "is_wrong": h.is_wrong, "names": h.names}
            for h in result.hard_pairs
        ]
        arrays["hard_pairs"] = np.frombuffer(json.dumps(said).encode(), dtype=np.uint8)
        for place, hard in enumerate(result.hard_pairs):
            for side, picture in enumerate(hard.pictures):
                arrays[f"picture_{place}_{side}"] = np.frombuffer(picture, dtype=np.uint8)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.tmp.npz")
    with open_private(unfinished, "wb", follows_links=False) as file:
        np.savez_compressed(file, **arrays)
    unfinished.replace(path)


def _read_curves(path: Path) -> tuple[Curves | None, list[HardPair]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        curves = None
        if "far" in arrays:
            threshold, num_different = arrays["marks"].tolist()
            parts = {name: arrays[name] for name in ("far", "tar", "edges", "same", "different")}
            curves = Curves(**parts, threshold=threshold, num_different=int(num_different))
        hard = []
        said = json.loads(arrays["hard_pairs"].tobytes()) if "hard_pairs" in arrays else []
        for place, one in enumerate(said):
            pictures = (arrays[f"picture_{place}_0"].tobytes(), arrays[f"picture_{place}_1"].tobytes())
            hard.append(HardPair(**{**one, "names": tuple(one["names"])}, pictures=pictures))
        return curves, hard
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"Cannot read {path}: {error}. Evaluate again.") from error
