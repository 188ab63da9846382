"""The interface of an evaluation protocol: what it is given, what it returns, and how its numbers are checked and shown.

A protocol is one file in `protocols/` and one line in the table of `protocols/__init__.py`. Everything else (finding sets
on the command line, evaluation.json, the report, model cards) goes through the table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.decode import Fit
from megaclass.evaluation.centres import ClassShard
from megaclass.evaluation.embed import Embedded, OnProgress, embed_images, embed_part
from megaclass.evaluation.examples import Examples
from megaclass.evaluation.images import Images
from megaclass.image_size import ImageSize

Floats = NDArray[np.float64]
Numbers = Mapping[str, Any]
"""The numbers of one model on one set, as evaluation.json holds them."""
Checks = Mapping[str, Callable[[object], bool]]
"""A check for each number of a protocol by its key in evaluation.json."""
NOT_MEASURABLE = "not measurable"


# ---- what a protocol is given --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """A network and the options it is run with. Every rank of `group` holds an equal one."""

    network: nn.Module
    image_size: ImageSize
    device: torch.device
    embedding_dim: int | None = None
    """Required width of embeddings that are read from files; None accepts any."""
    batch_size: int = 64
    num_threads: int = 1
    """Number of decoding threads per process."""
    fit: Fit | None = None
    """How images of another size are fitted to the model's; None refuses them."""
    mirror: bool = True
    """Add the embedding of the mirrored image."""
    published_tpir: bool = False
    """IJB: TPIR with the threshold of InsightFace's ijb_evals.py."""
    centres: Callable[[], ClassShard] | None = None
    """Returns the class centres that this rank holds, without a collective; None if the model has none."""
    group: dist.ProcessGroup | None = None
    on_progress: OnProgress | None = None

    def embed(self, images: Images) -> Embedded:
        """Collective. Embeds all images, each rank a part; the result is the same on every rank."""
        return embed_images(
            self.network,
            images,
            device=self.device,
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            mirror=self.mirror,
            group=self.group,
            on_progress=self.on_progress,
        )

    def embed_part(self, images: Images, part: Sequence[int]) -> Tensor:
        """Embeds some of the images on this rank alone; see `embed.embed_part` for the columns of the result."""
        return embed_part(
            self.network,
            images,
            part,
            device=self.device,
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            mirror=self.mirror,
            on_progress=self.on_progress,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """One data set and the protocol that evaluates it."""

    name: str
    kind: str
    """Key of the protocol in PROTOCOLS."""
    path: Path
    """For identification the gallery, for distractors the distractors."""
    probes: Path | None = None
    """For identification and distractors: the images that are searched for."""


# ---- what a protocol returns ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """ROC and similarity histogram of one model on one set of pairs, thinned to what a chart shows."""

    far: Floats
    tar: Floats
    edges: Floats
    """Edges of the histogram's bins, as cosines."""
    same: Floats
    """Share of the same-identity pairs in each bin."""
    different: Floats
    threshold: float
    """Cosine above which a pair is called "same"."""
    num_different: int
    thresholds: Floats | None = None
    """Smallest cosine of a pair called "same", at each point of the ROC; None in older files."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HardPair:
    """A pair that the model finds hard, with its two encoded images."""

    pair: int
    similarity: float
    is_same: bool
    is_wrong: bool
    pictures: tuple[bytes, bytes]
    names: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True, eq=False)
class SetResult:
    """The numbers of one model on one set, or the reason why there are none."""

    name: str
    kind: str
    path: str
    numbers: Numbers = field(default_factory=dict)
    curves: Curves | None = None
    hard_pairs: Sequence[HardPair] = ()
    examples: Examples | None = None
    """Of classification: the worst classes and the pairs of classes that are confused most."""
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"kind": self.kind, "path": self.path, "error": self.error}
        return {"kind": self.kind, "path": self.path, **self.numbers}


# ---- the protocol itself -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table in the report."""

    text: str
    is_best: bool = False


Row = tuple[str, Sequence[Cell]]
"""Title of a table row, and one cell per model."""


class EvaluationProtocol(ABC):
    """One way to evaluate a model."""

    kind: ClassVar[str]
    """Name in evaluation.json; must never change."""
    card_name: ClassVar[str]
    """Name in the table of a model card."""
    found_at: ClassVar[str] = ""
    """Paths that `find` recognises, for error messages."""
    expected: ClassVar[Checks]
    """Check of each number when evaluation.json is read: the file may be damaged or come from a stranger."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Keys of `expected` that older versions did not write."""

    def find(self, path: Path) -> list[EvaluationSet]:
        """Returns the sets of this protocol at a path given with `--on`; none if it does not recognise the path."""
        return []

    @abstractmethod
    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        """Collective. Evaluates the set; the result is the same on every rank."""

    @abstractmethod
    def quoted(self, numbers: Numbers) -> float | None:
        """Returns the one number that people quote for such a set; higher is better."""

    @abstractmethod
    def headline(self, numbers: Numbers) -> str:
        """Returns the quoted number as text."""

    @abstractmethod
    def lead(self, numbers: Numbers) -> str:
        """Returns the sentences above the table of the set in the report."""

    @abstractmethod
    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        """Returns the table rows of a set in the report, one cell for the numbers of each model."""

    def meaning(self, numbers: Numbers) -> str:
        """Returns what the quoted number means, for readers who do not know the protocol; may be empty."""
        return ""

    def remark(self, numbers: Numbers) -> str:
        """Returns a sentence that belongs next to the numbers wherever they are shown; may be empty."""
        return ""

    def fault(self, numbers: Numbers) -> str:
        """Describes the first number that cannot be shown; empty if all can."""
        for key, is_right in self.expected.items():
            if not is_right(numbers[key]) if key in numbers else key not in self.optional:
                return f"{key} is {str(numbers.get(key, 'missing'))[:60]!r}"
        return ""


# ---- numbers as text -----------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def share_text(share: float | None) -> str:
    return NOT_MEASURABLE if share is None else percent(share)


def share_with_interval(share: float | None, ends: Sequence[float] | None) -> str:
    """Returns the share, with its 95 % confidence interval in brackets if there is one."""
    if share is None or ends is None:
        return share_text(share)
    return f"{percent(share)} [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def best_cells(texts: Sequence[str], values: Sequence[float | None], *, is_lower_better: bool = False) -> list[Cell]:
    """Returns one cell per text, with the best value marked; none is marked if there is nothing to compare."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    best = None if len(known) < 2 else min(known) if is_lower_better else max(known)
    return [Cell(text, best is not None and value == best) for text, value in zip(texts, values, strict=True)]


def share_cells(
    shares: Sequence[float | None], intervals: Sequence[Sequence[float] | None] | None = None
) -> list[Cell]:
    """Returns one cell per model, the highest share marked."""
    ends = intervals or [None] * len(shares)
    return best_cells([share_with_interval(*one) for one in zip(shares, ends, strict=True)], shares)


def rate_rows(columns: Sequence[Numbers]) -> list[Row]:
    """Returns the rows of everything that is read from a ROC."""
    aucs, eers = [n["auc"] for n in columns], [n["eer"] for n in columns]
    rows: list[Row] = [
        ("Area under the ROC", best_cells([f"{auc:.4f}" for auc in aucs], aucs)),
        ("Equal error rate", best_cells([percent(eer) for eer in eers], eers, is_lower_better=True)),
    ]
    for far in columns[0]["tar_at_far"]:
        tars = [n["tar_at_far"].get(far) for n in columns]
        rows.append((f"TAR at FAR {far}", share_cells(tars, [n.get("tar_at_far_95", {}).get(far) for n in columns])))
    return rows


# ---- checks of numbers that were read from evaluation.json ---------------------------------------------------------


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (value != value or abs(value) < 1e15)


def is_number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def is_count(value: object) -> bool:
    return is_number(value) and isinstance(value, int)


def are_shares(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_number_or_none, value.values()))


def are_intervals(value: object) -> bool:
    return isinstance(value, dict) and all(
        one is None or (isinstance(one, list) and len(one) == 2 and all(map(is_number, one))) for one in value.values()
    )


def are_ranks(value: object) -> bool:
    return isinstance(value, dict) and are_shares(value) and "1" in value


RATE_CHECKS: Checks = {
    "num_pairs": is_count,
    "num_same": is_count,
    "auc": is_number,
    "eer": is_number,
    "tar_at_far": are_shares,
    "tar_at_far_95": are_intervals,
}
