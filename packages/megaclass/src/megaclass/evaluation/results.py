"""Writes and reads the results of an evaluation.

evaluation.json holds the numbers of all sets, or the reason why a set was not evaluated. evaluation/<set>.npz holds what the
report draws: ROC, histogram and the images of the hardest pairs, so a report needs neither the model nor the data.
"""

import builtins
import io
import json
import logging
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.evaluation.protocol import Curves, HardPair, SetResult, share_with_interval
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
    lines = []
    for key, title in (("rank_k", "rank"), ("tar_at_far", "TAR at FAR"), ("tpir_at_fpir", "TPIR at FPIR")):
        values = result.numbers.get(key, {})
        if any(isinstance(value, dict) for value in values.values()):
            continue  # one table per number of distractors: only evaluation.json and the report show them
        intervals = result.numbers.get(f"{key}_95", {})
        lines += [
            f"{title} {at:5} {share_with_interval(share, intervals.get(at))}"
            for at, share in values.items()
            if share is not None
        ]
        if unmeasured := [at for at, share in values.items() if share is None]:
            lines.append(f"{title} {', '.join(unmeasured)}: not measurable, too few to compare with")
    if result.numbers.get("xnorm") is not None:
        lines.append(f"EER {result.numbers['eer']:.2%}, XNorm {result.numbers['xnorm']:.2f}")
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
        curves, hard = _read_curves(curves_path) if error is None and curves_path.is_file() else (None, [])
        results.append(
            SetResult(name=name, kind=kind, path=where, numbers=said, curves=curves, hard_pairs=hard, error=error)
        )
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
        known = {one.name: getattr(result.curves, one.name) for one in fields(result.curves)}
        arrays = {name: value for name, value in known.items() if isinstance(value, np.ndarray)}
        arrays["marks"] = np.array([result.curves.threshold, result.curves.num_different])
    write_findings(path, "hard_pairs", list(result.hard_pairs), arrays)


def _read_curves(path: Path) -> tuple[Curves | None, list[HardPair]]:
    arrays = read_arrays(path)
    try:
        curves = _curves_in(arrays) if "far" in arrays else None
        said = json.loads(arrays["hard_pairs"].tobytes()) if "hard_pairs" in arrays else []
        # Version 0.1 named the pictures by their place.
        said = [{"pictures": [f"picture_{n}_0", f"picture_{n}_1"], **one} for n, one in enumerate(said)]
        hard = built(list[HardPair], said, arrays)
        if hard and curves is None:
            raise ValueError("hard pairs without curves")
        return curves, hard
    except UNREADABLE as error:
        raise DataError(f"Cannot read {path}: {error}. Evaluate again.") from error


def _curves_in(arrays: Mapping[str, NDArray[Any]]) -> Curves:
    threshold, num_different = arrays["marks"].astype(np.float64).tolist()
    parts = {name: arrays[name].astype(np.float64) for name in ("far", "tar", "edges", "same", "different")}
    if "thresholds" in arrays:
        parts["thresholds"] = arrays["thresholds"].astype(np.float64)
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


UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a damaged tree may raise when it is built."""


def write_findings(path: Path, name: str, tree: Any, arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
    """Writes an .npz with a tree of dataclasses, lists and numbers as JSON, named `name`; its pictures are arrays of bytes."""
    kept: dict[str, Any] = dict(arrays or {})

    def plain(value: Any) -> Any:
        if not isinstance(value, bytes):
            return {one.name: getattr(value, one.name) for one in fields(value)}
        key = f"picture_{len(kept)}"
        kept[key] = np.frombuffer(value, dtype=np.uint8)
        return key

    text = json.dumps(tree, default=plain)
    with published_file(path, is_private=True) as unfinished:
        np.savez_compressed(unfinished, **kept, **{name: np.frombuffer(text.encode(), dtype=np.uint8)})


def built(kind: Any, said: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Returns a part of such a tree as the given type: a dataclass by its fields, `bytes` from the array of that name."""
    of = get_args(kind)
    if is_dataclass(kind):
        return kind(**{name: built(hint, said[name], arrays) for name, hint in get_type_hints(kind).items()})  # type: ignore[operator]
    match get_origin(kind):
        case builtins.list:
            return [built(of[0], one, arrays) for one in said]
        case builtins.tuple:
            return tuple(built(part, one, arrays) for part, one in zip(of, said, strict=True))
        case builtins.dict:
            return {of[0](key): built(of[1], one, arrays) for key, one in said.items()}
    return arrays[said].tobytes() if kind is bytes else kind(said)


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
