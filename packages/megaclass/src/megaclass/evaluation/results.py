"""Writes and reads the results of an evaluation.

evaluation.json holds the numbers of all sets, or the reason why a set was not evaluated. evaluation/<set>.npz holds what the
report draws: ROC, histogram and the images of hard pairs and classes, so a report needs neither the model nor the data.
"""

import io
import json
import logging
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.evaluation.examples import DAMAGED, Examples, packed, unpacked
from megaclass.evaluation.protocol import NOT_MEASURABLE, Curves, HardPair, SetResult
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass_launch.files import make_private_folder, published_file, write_text

_log = logging.getLogger("megaclass.evaluation")
NUMBERS_FILE = "evaluation.json"
CURVES_FOLDER = "evaluation"
_FORMAT = 1
# Limit for one .npz; two dozen pairs of images are a few MiB.
_MAX_UNPACKED = 2**28


def headline(result: SetResult) -> str:
    """Returns the number that people quote for the set, as text."""
    return "not evaluated" if result.error is not None else PROTOCOLS[result.kind].headline(result.numbers)


def result_lines(result: SetResult) -> list[str]:
    """Returns the details that the command line prints below the headline, or the reason why there are none."""
    if result.error is not None:
        return [result.error]
    rows = [(title, cells[0].text) for title, cells in PROTOCOLS[result.kind].rows([result.numbers])]
    lines = [f"{title}: {text}" for title, text in rows if text != NOT_MEASURABLE]
    if unmeasured := [title for title, text in rows if text == NOT_MEASURABLE]:
        lines.append(f"{', '.join(unmeasured)}: not measurable, too few to compare with")
    return [*lines, *remarks_on(result)]


def remarks_on(result: SetResult) -> list[str]:
    """Returns the sentences that belong next to the numbers wherever they are shown: terminal, report and model card."""
    mirrored = "" if result.numbers.get("mirror") is not False else "Without the embeddings of mirrored images."
    return [said for said in (mirrored, PROTOCOLS[result.kind].remark(result.numbers)) if said]


def write_results(folder: Path, model: Mapping[str, Any], results: Sequence[SetResult]) -> Path:
    """Writes evaluation.json and evaluation/*.npz; results of other sets by the same model are kept.

    model: identifies the model, by its name and weights. An earlier file that cannot be read is replaced with a warning.
    """
    make_private_folder(folder)
    path = folder / NUMBERS_FILE
    try:
        earlier = _read_json(path) if path.is_file() else {}
    except DataError as error:
        _log.warning("%s It is replaced.", error)
        earlier = {}
    # Results of other weights would be shown as those of this model: they are dropped.
    kept = earlier.get("sets") if earlier.get("model") == dict(model) else None
    sets = {name: said for name, said in kept.items() if isinstance(said, dict)} if isinstance(kept, dict) else {}
    make_private_folder(folder / CURVES_FOLDER)
    for result in results:
        # A set that fails today keeps the numbers of an earlier evaluation of the same weights.
        if result.error is not None and "error" not in sets.get(result.name, {"error": ""}):
            continue  # the earlier numbers are still those of this model
        sets[result.name] = result.to_json()
        if result.error is None:
            _write_curves(folder / CURVES_FOLDER / f"{result.name}.npz", result)
    text = json.dumps({"format": _FORMAT, "model": dict(model), "sets": sets}, indent=1) + "\n"
    write_text(path, text, is_private=True)
    return path


def read_results(folder: Path) -> list[SetResult]:
    """Returns the results in the folder; none if nothing was ever written there."""
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
        result = SetResult(name=name, kind=kind, path=where, numbers=said, error=error)
        if error is None and curves_path.is_file():
            curves, hard, examples = _read_curves(curves_path)
            result = replace(result, curves=curves, hard_pairs=hard, examples=examples)
        results.append(result)
    return results


def weights_in(folder: Path) -> str:
    """Returns the digest of the weights that evaluation.json belongs to; empty if it does not say so."""
    model = _read_json(folder / NUMBERS_FILE).get("model")
    return str(model.get("weights", "")) if isinstance(model, dict) else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read {path}: {error}. Evaluate again.") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise DataError(f"{path} was not written by this version of megaclass. Evaluate again.")
    return values


def _fault_of_set(name: str, kind: object, numbers: Mapping[str, Any]) -> str:
    """Describes why a report cannot show the numbers; empty if it can."""
    if Path(name).name != name:
        # The name is part of a file name: it must not lead out of the folder.
        return f"{name[:60]!r} is not the name of a set"
    if not isinstance(kind, str) or kind not in PROTOCOLS:
        return f"the set {name!r} is of kind {str(kind)[:60]!r}, expected one of {', '.join(PROTOCOLS)}"
    fault = PROTOCOLS[kind].fault(numbers)
    return f"of the set {name!r}, {fault}" if fault else ""


def _write_curves(path: Path, result: SetResult) -> None:
    arrays: dict[str, Any] = {}
    if result.curves is not None:
        drawn = {name: one for name, one in vars(result.curves).items() if isinstance(one, np.ndarray)}
        arrays |= {**drawn, "marks": np.array([result.curves.threshold, result.curves.num_different])}
    if result.hard_pairs:
        described = [
            {name: one for name, one in vars(hard).items() if name != "pictures"} for hard in result.hard_pairs
        ]
        arrays["hard_pairs"] = np.frombuffer(json.dumps(described).encode(), dtype=np.uint8)
        for place, hard in enumerate(result.hard_pairs):
            for side, picture in enumerate(hard.pictures):
                arrays[f"picture_{place}_{side}"] = np.frombuffer(picture, dtype=np.uint8)
    if result.examples is not None:
        arrays |= packed(result.examples)
    with published_file(path, is_private=True) as unfinished:
        np.savez_compressed(unfinished, **arrays)


def _read_curves(path: Path) -> tuple[Curves | None, list[HardPair], Examples | None]:
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
        return curves, hard, unpacked(arrays)
    except DAMAGED as error:
        raise DataError(f"Cannot read {path}: {error}. Evaluate again.") from error


def _curves_in(arrays: Mapping[str, NDArray[Any]]) -> Curves:
    threshold, num_different = arrays["marks"].astype(np.float64).tolist()
    names = ("far", "tar", "edges", "same", "different", *(["thresholds"] if "thresholds" in arrays else []))
    parts = {name: arrays[name].astype(np.float64) for name in names}
    if not all(part.ndim == 1 and len(part) and np.isfinite(part).all() for part in parts.values()):
        raise ValueError("curves must be one-dimensional and finite")
    curves = Curves(**parts, threshold=float(threshold), num_different=int(num_different))
    if curves.thresholds is not None and len(curves.thresholds) != len(curves.far):
        raise ValueError("an ROC needs one threshold per point")
    if len(curves.far) != len(curves.tar) or not (curves.far == 0).any():
        raise ValueError("an ROC must start at the point that accepts nothing")
    if (
        not len(curves.edges) == len(curves.same) + 1 == len(curves.different) + 1
        or not (np.diff(curves.edges) > 0).all()
    ):
        raise ValueError("a histogram needs one edge more than bins, in rising order")
    if any(part.min() < -1 or part.max() > 1.001 for part in parts.values()) or not 0 <= curves.num_different < 2**53:
        raise ValueError("shares must lie between 0 and 1, cosines between -1 and 1")
    return curves


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an .npz by name; stated sizes are checked before anything is allocated."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            unpacked = sum(entry.file_size for entry in entries)
            if unpacked > _MAX_UNPACKED:
                raise DataError(f"{path} would unpack to {unpacked:,} bytes: at most {_MAX_UNPACKED:,} are accepted.")
            if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
                raise DataError(f"{path} uses a compression that NumPy does not write.")
            return {entry.filename.removesuffix(".npy"): _array_in(archive.read(entry)) for entry in entries}
    except DataError:
        raise
    # zipfile, zlib and NumPy's header parser raise a dozen types of exceptions on damaged bytes.
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
