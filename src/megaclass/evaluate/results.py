"""What an evaluation leaves: numbers for people and programs, curves and pictures for the report. Written and read back.

evaluation.json holds the numbers of all sets and why a set was not evaluated. evaluation/<set>.npz holds what the report
draws: ROC, histogram and the pictures of the worst mistakes, so that a report needs neither the model nor the data.
"""

import io
import json
import math
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.evaluate.protocols.verification import Roc, ScoredPairs, roc_curve
from megaclass.files import make_private_folder, published_file, write_text

Floats = NDArray[np.float64]

NUMBERS_FILE = "evaluation.json"
CURVES_FOLDER = "evaluation"
_FORMAT = 1
_NUM_BINS = 60
_MAX_ROC_POINTS = 600
_MISTAKES_KEPT = 12
# Of an .npz: two dozen pairs of pictures are a few MiB.
_MAX_UNPACKED = 2**28


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
    kept = earlier.get("sets") if earlier.get("model") == dict(model) else None
    sets = {name: said for name, said in kept.items() if isinstance(said, dict)} if isinstance(kept, dict) else {}
    make_private_folder(folder / CURVES_FOLDER)
    for result in results:
        if result.error is not None and "error" not in sets.get(result.name, {"error": ""}):
            continue  # the numbers of before are still the model's
        sets[result.name] = result.to_json()
        if result.error is None:
            _write_curves(folder / CURVES_FOLDER / f"{result.name}.npz", result)
    text = json.dumps({"format": _FORMAT, "model": dict(model), "sets": sets}, indent=1) + "\n"
    write_text(path, text, is_private=True)
    return path


def read_results(folder: Path) -> list[SetResult]:
    """What `write_results` left in the folder; nothing where it never wrote."""
    path = folder / NUMBERS_FILE
    if not path.is_file():
        return []
    results = []
    sets = _read_json(path).get("sets", {})
    if not isinstance(sets, dict):
        raise DataError(f"{path} holds no results by set: {str(sets)[:60]!r}. Evaluate again.")
    for name, numbers in sets.items():
        said = dict(numbers) if isinstance(numbers, dict) else {}
        kind, where, error = said.pop("kind", "pairs"), str(said.pop("path", "")), said.pop("error", None)
        error = None if error is None else str(error)
        if fault := _fault_of_set(name, kind, said) if error is None else "":
            raise DataError(f"{path} is damaged: {fault}. Evaluate again.")
        curves_path = folder / CURVES_FOLDER / f"{name}.npz"
        curves, hard = _read_curves(curves_path) if error is None and curves_path.is_file() else (None, [])
        results.append(
            SetResult(name=name, kind=kind, path=where, numbers=said, curves=curves, hard_pairs=hard, error=error)
        )
    return results


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read {path}: {error}. Evaluate again.") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise DataError(f"{path} is no evaluation of this version of megaclass. Evaluate again.")
    return values


def _fault_of_set(name: str, kind: object, numbers: Mapping[str, Any]) -> str:
    """Empty for numbers that a report can show."""
    if Path(name).name != name:
        # Its curves are looked for under this name.
        return f"{name[:60]!r} is not the name of a set"
    if not isinstance(kind, str) or kind not in _EXPECTED:
        return f"the set {name!r} is of kind {str(kind)[:60]!r}, expected one of {', '.join(_EXPECTED)}"
    for key, is_right in _EXPECTED[kind].items():
        if not is_right(numbers[key]) if key in numbers else key not in _OPTIONAL:
            return f"{key} of the set {name!r} is {str(numbers.get(key, 'missing'))[:60]!r}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (value != value or abs(value) < 1e15)


def _is_count(value: object) -> bool:
    return _is_number(value) and isinstance(value, int)


def _are_shares(value: object) -> bool:
    return isinstance(value, dict) and all(one is None or _is_number(one) for one in value.values())


def _are_intervals(value: object) -> bool:
    return isinstance(value, dict) and all(
        one is None or (isinstance(one, list) and len(one) == 2 and all(map(_is_number, one))) for one in value.values()
    )


def _are_ranks(value: object) -> bool:
    return isinstance(value, dict) and _are_shares(value) and "1" in value


def _are_ranks_by_size(value: object) -> bool:
    is_named = isinstance(value, dict) and bool(value) and all(re.fullmatch("[0-9]{1,18}", size) for size in value)
    return isinstance(value, dict) and is_named and all(map(_are_ranks, value.values()))


def _are_galleries(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, dict) and _are_ranks(one.get("rank_k")) and _are_shares(one.get("tpir_at_fpir"))
        for one in value.values()
    )


def _is_training_data(value: object) -> bool:
    keys = ("images", "found", "looked_at", "training_images")
    return isinstance(value, dict) and all(_is_count(value.get(key)) for key in keys) and "is_held_out" in value


_RATES: dict[str, Callable[[object], bool]] = {
    "num_pairs": _is_count,
    "num_same": _is_count,
    "auc": _is_number,
    "eer": _is_number,
    "tar_at_far": _are_shares,
    "tar_at_far_95": _are_intervals,
}
_EXPECTED: dict[str, dict[str, Callable[[object], bool]]] = {
    "pairs": _RATES
    | {
        "accuracy": _is_number,
        "accuracy_std": _is_number,
        "threshold": _is_number,
        "fold_accuracies": lambda value: isinstance(value, list),
        "training_data": _is_training_data,
        "published_tar_at_far_1e-3": lambda value: value is None or _is_number(value),
        "xnorm": lambda value: value is None or _is_number(value),
    },
    "templates": _RATES | {"identification": _are_galleries, "published_tpir_at_fpir": _are_shares},
    "identification": {
        "num_gallery": _is_count,
        "num_mated": _is_count,
        "num_unmated": _is_count,
        "num_probes_in_gallery": _is_count,
        "rank_k": _are_ranks,
        "rank_k_95": _are_intervals,
        "tpir_at_fpir": _are_shares,
    },
    "distractors": {"num_pairs": _is_count, "num_probes": _is_count, "rank_k": _are_ranks_by_size},
}
_OPTIONAL = (
    "training_data",
    "num_probes_in_gallery",
    "tar_at_far_95",
    "rank_k_95",
    "xnorm",
    "published_tar_at_far_1e-3",
    "identification",
    "published_tpir_at_fpir",
)


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
    with published_file(path, is_private=True) as unfinished:
        np.savez_compressed(unfinished, **arrays)


def _read_curves(path: Path) -> tuple[Curves | None, list[HardPair]]:
    arrays = read_arrays(path)
    try:
        curves = _curves_in(arrays) if "far" in arrays else None
        hard = []
        said = json.loads(arrays["hard_pairs"].tobytes()) if "hard_pairs" in arrays else []
        for place, one in enumerate(said):
            pictures = (arrays[f"picture_{place}_0"].tobytes(), arrays[f"picture_{place}_1"].tobytes())
            first, second = map(str, one["names"])
            hard.append(
                HardPair(
                    pair=int(one["pair"]),
                    similarity=float(one["similarity"]),
                    is_same=bool(one["is_same"]),
                    is_wrong=bool(one["is_wrong"]),
                    pictures=pictures,
                    names=(first, second),
                )
            )
        if hard and curves is None:
            raise ValueError("hard pairs without curves")
        return curves, hard
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"Cannot read {path}: {error}. Evaluate again.") from error


def _curves_in(arrays: Mapping[str, NDArray[Any]]) -> Curves:
    threshold, num_different = arrays["marks"].astype(np.float64).tolist()
    parts = {name: arrays[name].astype(np.float64) for name in ("far", "tar", "edges", "same", "different")}
    if not all(part.ndim == 1 and len(part) and np.isfinite(part).all() for part in parts.values()):
        raise ValueError("curves are finite numbers in a row")
    curves = Curves(**parts, threshold=float(threshold), num_different=int(num_different))
    if len(curves.far) != len(curves.tar) or not (curves.far == 0).any():
        raise ValueError("an ROC begins where nothing is accepted")
    if (
        not len(curves.edges) == len(curves.same) + 1 == len(curves.different) + 1
        or not (np.diff(curves.edges) > 0).all()
    ):
        raise ValueError("a histogram has one edge more than bins, in rising order")
    if any(part.min() < -1 or part.max() > 1.001 for part in parts.values()) or not 0 <= curves.num_different < 2**53:
        raise ValueError("shares lie between 0 and 1, cosines between -1 and 1")
    return curves


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz by name. Sizes are compared with what the file holds before anything is allocated."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            unpacked = sum(entry.file_size for entry in entries)
            if unpacked > _MAX_UNPACKED:
                raise DataError(f"{path} would unpack to {unpacked:,} bytes: at most {_MAX_UNPACKED:,} are accepted.")
            if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
                raise DataError(f"{path} is packed in a way that NumPy does not use.")
            return {entry.filename.removesuffix(".npy"): _array_in(archive.read(entry)) for entry in entries}
    except DataError:
        raise
    # zipfile, zlib and NumPy's header parser raise what they come across in damaged bytes: a dozen types.
    except Exception as error:
        raise DataError(f"Cannot read {path}: {error or type(error).__name__}. Evaluate again.") from error


def _array_in(content: bytes) -> NDArray[Any]:
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.kind not in "biuf" or len(shape) > 1:
        raise ValueError(f"an array of {dtype} and shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"an array of shape {shape} in {len(content)} bytes")
    return np.frombuffer(content, dtype=dtype, offset=file.tell()).reshape(shape)
