"""The thresholds of a model: from which cosine on two images are called the same, and how often that is wrong.

They come from the evaluation of a run (evaluation.json), or from config.json next to an exported model. A threshold belongs to
the weights it was measured with: an evaluation of other weights is not used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclass.errors import DataError
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.protocols.verification import far_name
from megaclass.metrics_file import is_number

CONFIG_FILE = "config.json"
_KIND = "pairs"


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A cosine above which two images are called the same, and its measured errors."""

    similarity: float
    far: float | None
    """False accept rate: share of the different pairs that are called the same; None if it was not measured."""
    evaluated_on: str
    """Name of the evaluation set; empty for a threshold of the caller."""
    num_different: int = 0
    """Number of different pairs behind `far`: a rate below 1 / num_different cannot be measured."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The answer of `LoadedModel.verify`; true if the images are called the same."""

    is_same: bool
    similarity: float
    """Cosine of the two embeddings."""
    threshold: Threshold

    def __bool__(self) -> bool:
        return self.is_same

    def __str__(self) -> str:
        words = f"{'same' if self.is_same else 'different'}: cosine {self.similarity:.3f}, threshold "
        words += f"{self.threshold.similarity:.3f}"
        if self.threshold.far is None:
            return f"{words} (false accept rate not known)"
        far = f"{self.threshold.far:.2g}" if self.threshold.far else f"below {1 / self.threshold.num_different:.2g}"
        return f"{words} (false accept rate {far} on {self.threshold.evaluated_on})"


def points_of_results(results: Sequence[SetResult]) -> dict[str, dict[str, Any]]:
    """Returns what config.json states about thresholds: by set, squared distances and rates of its verification."""
    points = {}
    for result in results:
        if result.kind == _KIND and result.error is None:
            kept = ("threshold", "threshold_far", "threshold_at_far", "num_pairs", "num_same")
            points[result.name] = {key: result.numbers[key] for key in kept if key in result.numbers}
    return points


def read_config(folder: Path) -> dict[str, Any]:
    """Returns config.json of an exported model; empty if there is none, or if it is damaged or something else's."""
    try:
        said = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) and said.get("format") == "megaclass" else {}


def choose_threshold(
    points: Mapping[str, Any], *, far: float | None, evaluation_set: str | None, model: str
) -> Threshold:
    """Returns the threshold of one set; without a name, of the set with the most different pairs.

    far: the highest allowed false accept rate; None chooses the threshold with the highest accuracy.
    """
    usable = {name: one for name, one in points.items() if isinstance(one, Mapping) and is_number(one.get("threshold"))}
    if not usable:
        raise DataError(
            f"No threshold is known for {model}: it was not evaluated on pairs, or by an evaluation of other weights. Run "
            f"`megaclass evaluate RUN --on SET` (megaclass data pairs makes a set from a folder), or give your own: "
            f"verify(a, b, threshold=0.3)."
        )
    if evaluation_set is not None and evaluation_set not in usable:
        raise DataError(f"{model} has no threshold from {evaluation_set!r}: it was evaluated on {', '.join(usable)}.")
    name = evaluation_set or max(usable, key=lambda one: _num_different(usable[one]))
    point = usable[name]
    num_different = _num_different(point)
    if far is None:
        measured = point.get("threshold_far")
        return Threshold(
            similarity=1 - float(point["threshold"]) / 2,
            far=float(measured) if measured is not None and is_number(measured) else None,
            evaluated_on=name,
            num_different=num_different,
        )
    at_far = point.get("threshold_at_far")
    known = {at: value for at, value in at_far.items() if is_number(value)} if isinstance(at_far, Mapping) else {}
    if far_name(far) not in known:
        if known:
            instead = f"measured are {', '.join(known)}"
        elif isinstance(at_far, Mapping):
            instead = "they are too few for any; evaluate on more pairs, for example of megaclass data pairs"
        else:
            instead = "none was measured; evaluate again with this version"
        raise DataError(
            f"{model} has no threshold for a false accept rate of {far:g} from {name} ({num_different:,} different pairs): "
            f"{instead}."
        )
    return Threshold(
        similarity=1 - float(known[far_name(far)]) / 2, far=far, evaluated_on=name, num_different=num_different
    )


def _num_different(point: Mapping[str, Any]) -> int:
    pairs, same = point.get("num_pairs"), point.get("num_same")
    return max(0, pairs - same) if isinstance(pairs, int) and isinstance(same, int) else 0
