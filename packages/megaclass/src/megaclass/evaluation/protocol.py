"""The interface of an evaluation protocol: what it is given, what it returns, and how its numbers are checked and shown.

A protocol is one file in `protocols/` and one line in the table of `protocols/__init__.py`. Everything else (finding sets
on the command line, evaluation.json, the report, model cards) goes through the table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.decode import Fit
from megaclass.distributed.agreement import on_every_rank
from megaclass.evaluation.centres import ClassShard
from megaclass.evaluation.embed import Embedded, distinct_images, embed_part, log_resized, part_of_rank
from megaclass.evaluation.examples import DAMAGED, Examples
from megaclass.evaluation.images import Images
from megaclass.image_size import ImageSize
from megaclass.progress import OnProgress, no_progress
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size

Floats = NDArray[np.float64]
Numbers = Mapping[str, Any]
"""The numbers of one model on one set, as evaluation.json holds them."""
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
    on_progress: OnProgress = no_progress

    def embed(self, images: Images) -> Embedded:
        """Collective. Embeds all images; the result is the same on every rank. The network keeps its train or eval mode.

        Of images with equal content one is embedded: a set of 6,000 pairs names most of its images several times. Every rank
        embeds a contiguous part, decoding batch by batch: at most two batches of pixels are in memory. An image that cannot be
        decoded, has another size or an embedding that is not finite is an error that every rank raises. Rank 0 logs how many
        images had another size and were fitted to the model's.

        Traffic per rank: one all-gather of 4 KiB (did all ranks succeed?), one of ceil(N / W) x (D + 2) floats, where N counts
        distinct images.
        """
        group, num_ranks = self.group, group_size(self.group)
        firsts, places_N = distinct_images(images)
        part = [firsts[place] for place in part_of_rank(len(firsts), group_rank(group), num_ranks)]

        def report(done: int, _: int) -> None:
            # This rank speaks for all: the others are about as far.
            self.on_progress(min(len(firsts), done * num_ranks), len(firsts))

        rows = on_every_rank(lambda: replace(self, on_progress=report).embed_part(images, part), self.device, group)
        is_resized = rows.new_tensor([[float(index in images.resized)] for index in part])
        gathered = gather_blocks(torch.cat([rows, is_resized], dim=1), group).flatten(0, 1).cpu().numpy()[places_N]
        if group_rank(group) == 0:
            log_resized(int(gathered[:, -1].sum()), len(images), images.image_size, f"from {images.name(0)} on")
        return Embedded(sums_ND=np.ascontiguousarray(gathered[:, :-2]), norms_N=np.ascontiguousarray(gathered[:, -2]))

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
    quoted_at: ClassVar[tuple[str, ...]] = ()
    """Keys that lead to the quoted number."""
    headline_form: ClassVar[str] = ""
    """The texts, as format strings of the numbers, and of `quoted` (text) and `share` (number) for the quoted one."""
    lead_form: ClassVar[str] = ""
    meaning_form: ClassVar[str] = ""
    shares: ClassVar[Mapping[str, str]] = {}
    """The table of the report: the title of each share, with {} for the keys of a table of shares."""

    def find(self, path: Path) -> list[EvaluationSet]:
        """Returns the sets of this protocol at a path given with `--on`; none if it does not recognise the path."""
        return []

    @abstractmethod
    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        """Collective. Evaluates the set; the result is the same on every rank."""

    def result(self, one: EvaluationSet, numbers: Numbers, **others: Any) -> SetResult:
        return SetResult(name=one.name, kind=self.kind, path=str(one.path), numbers=numbers, **others)

    def quoted(self, numbers: Numbers) -> float | None:
        """Returns the one number that people quote for such a set; higher is better."""
        found: Any = numbers
        for key in self.quoted_at:
            found = found.get(key)
        return None if found is None else float(found)

    def headline(self, numbers: Numbers) -> str:
        """Returns the quoted number as text."""
        return self._said(self.headline_form, numbers)

    def lead(self, numbers: Numbers) -> str:
        """Returns the sentences above the table of the set in the report."""
        return self._said(self.lead_form, numbers)

    def meaning(self, numbers: Numbers) -> str:
        """Returns what the quoted number means, for readers who do not know the protocol; may be empty."""
        return "" if self.quoted(numbers) is None else self._said(self.meaning_form, numbers)

    def _said(self, form: str, numbers: Numbers) -> str:
        share = self.quoted(numbers)
        return form.format_map({**numbers, "share": share, "quoted": share_text(share)})

    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        """Returns the table rows of a set in the report, one cell for the numbers of each model."""
        return [row for key, title in self.shares.items() for row in share_rows(columns, key, title)]

    def remark(self, numbers: Numbers) -> str:
        """Returns a sentence that belongs next to the numbers wherever they are shown; may be empty."""
        return ""

    def drawn(self, numbers: Numbers) -> Iterable[float]:
        """Returns the numbers that are used elsewhere than in the texts and rows: in a chart, or to reject an image."""
        return ()

    def fault(self, numbers: Numbers) -> str:
        """Shows the numbers of an evaluation.json, which may be damaged; returns why they cannot be shown, or nothing."""
        try:
            for text in (self.headline, self.lead, self.meaning, self.remark):
                text(numbers)
            self.rows([numbers])
            best_cells([""], [self.quoted(numbers)])
            all(map(math.isfinite, self.drawn(numbers)))
        except DAMAGED as error:
            return f"a number is missing or of another kind ({type(error).__name__}: {str(error)[:60]})"
        return ""


# ---- numbers as text -----------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def share_text(share: float | None) -> str:
    return NOT_MEASURABLE if share is None else percent(share)


def best_cells(texts: Sequence[str], values: Sequence[float | None], *, is_lower_better: bool = False) -> list[Cell]:
    """Returns one cell per text, with the best value marked; none is marked if there is nothing to compare."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    best = None if len(known) < 2 else min(known) if is_lower_better else max(known)
    return [Cell(text, best is not None and value == best) for text, value in zip(texts, values, strict=True)]


def share_cells(
    shares: Sequence[float | None], intervals: Sequence[Sequence[float] | None] | None = None
) -> list[Cell]:
    """Returns one cell per model, the highest share marked; with 95 % confidence intervals in brackets if there are any."""
    texts = []
    for share, ends in zip(shares, intervals or [None] * len(shares), strict=True):
        interval = f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]" if ends and share is not None else ""
        texts.append(f"{share_text(share)}{interval}")
    return best_cells(texts, shares)


def rate_rows(columns: Sequence[Numbers]) -> list[Row]:
    """Returns the rows of everything that is read from a ROC."""
    aucs, eers = [n["auc"] for n in columns], [n["eer"] for n in columns]
    return [
        ("Area under the ROC", best_cells([f"{auc:.4f}" for auc in aucs], aucs)),
        ("Equal error rate", best_cells([percent(eer) for eer in eers], eers, is_lower_better=True)),
        *share_rows(columns, "tar_at_far", "TAR at FAR {}"),
    ]


def share_rows(columns: Sequence[Numbers], key: str, title: str, part: str = "") -> list[Row]:
    """Returns the row of a share; if the title has a place for it, a row per entry of a table of shares, such as one per FAR.

    95 % confidence intervals are shown if they are there, under the same key with `_95`.
    part: the entries of the table are tables themselves, in which the share has this key.
    """
    if "{" not in title:
        return [(title, share_cells([n.get(key) for n in columns]))]
    tables, ends = [n.get(key, {}) for n in columns], [n.get(f"{key}_95", {}) for n in columns]
    if part:
        tables = [{at: one[part] for at, one in table.items()} for table in tables]
    # One model may have been evaluated with more than another.
    entries = dict.fromkeys(at for table in tables for at in table)
    return [
        (title.format(at), share_cells([one.get(at) for one in tables], [one.get(at) for one in ends]))
        for at in entries
    ]
