"""Finds what is wrong with labels, from embeddings: identities that are there twice, mislabelled images, and outliers.

An image is compared with the mean of the *other* images of its class, so it does not speak for itself. Two classes are one
identity if their images are nearly as close to the other class's mean as to their own; these classes count as one when images
are judged. An image that is clearly closer to another class than to its own is mislabelled, and one that is close to no class
is an outlier. Neither counts in a mean any longer when all images are judged once more.

Letters: N images, C classes, D numbers per embedding, P pairs of classes, T images and I identities of a test, K images of a
class.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from megaclass.errors import DataError
from megaclass.evaluation.search import GalleryShard, full_precision, search

# Two classes are one identity if their images are at least this close to the other's mean, as a share of the cosine with their
# own: on Glyphs 0.99 or more, where the closest of 3,000 characters reach 0.95 in four cases. All shares here were chosen there
# with seed 0; benchmarks/clean.py measures with other seeds.
_SAME_SHARE = 0.95
# An identity of a test is in the training data if its images are this close to their nearest ones of a class there, as a share
# of the same number among the images of that class. Chosen on Glyphs with seed 0: of 3,000 other characters in each of four
# designs that training does not have, 0.9 % are accused. The mean of a class in place of its nearest images finds fewer: in a
# new design few of them are close (of the characters of TW-Kai 68 % instead of 93 %, if 1 % of others are accused).
_IN_TRAINING_SHARE = 0.94
_NUM_NEAREST, _MOST_IMAGES = 3, 1000
# An image is suspected if it is closer to another class by this share of the median cosine of an image with its class, or if
# its cosine with its class is below the second share of that median.
_CLEARLY_CLOSER, _FAR = 0.25, 0.15
# It is mislabelled if another class is at least this close, as a share of the median, and otherwise an outlier.
_CLOSE = 0.5
_NUM_ROUNDS = 2
_BLOCK_ROWS, _BLOCK_COLUMNS = 2**13, 2**16
_MOST_PAIRS_PER_CLASS = 50
# Products in float16 differ from exact ones by less than this.
_HALF_SLACK = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelFinding:
    """One suspicion, and what is to be done about it."""

    kind: str
    """mislabelled, outlier, doubled or in-test."""
    action: str
    """move (the image to the other class), remove (the image, or the class), merge (the class into the other), keep."""
    label: int
    image: int = -1
    """Number of the image; -1: the whole class is meant."""
    other: int = -1
    """The class that the image or the class belongs to; -1: none."""
    cosine: float = 1.0
    """Of the image with its class; of a class the mean over its images."""
    other_cosine: float = 1.0
    text: str = ""
    """Name of the identity of a test."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Suspects:
    """The findings, and the classes without the suspected images."""

    findings: list[LabelFinding]
    unit_CD: Tensor
    """Directions of the means."""


def find_suspects(
    rows_ND: NDArray[np.float32], labels_N: NDArray[np.int64], num_classes: int, device: torch.device
) -> Suspects:
    """Returns the findings, the clearest first within each kind. Rows with NaN (images that cannot be read) are left out."""
    known = np.flatnonzero(np.isfinite(rows_ND[:, 0]))
    rows, labels = torch.as_tensor(rows_ND[known], device=device), torch.as_tensor(labels_N[known], device=device)
    is_sound = torch.ones(len(rows), dtype=torch.bool, device=device)
    with full_precision():
        doubled = _find_doubled(rows, labels, num_classes)
        merged = torch.as_tensor(merged_classes(doubled, num_classes), device=device)[labels]
        for _ in range(_NUM_ROUNDS):
            sums_CD, _, own_N = _compare_with_own(rows, merged, num_classes, is_sound)
            gallery = GalleryShard(embeddings_ND=functional.normalize(sums_CD), labels_N=np.arange(num_classes))
            found = search(rows, gallery, k=1, device=device, probe_labels_P=merged.cpu().numpy(), is_alone=True)
            other_N, others_N = found.other_scores_Pk[:, 0], found.other_indices_Pk[:, 0]
            # A comparison with NaN is false: the only image of a class is not judged.
            usual = torch.nanmedian(own_N)
            is_sound = ~((other_N - own_N > _CLEARLY_CLOSER * usual) | (own_N < _FAR * usual))
        is_moved = ~is_sound & (other_N >= _CLOSE * usual)
        is_far = ~is_sound & ~is_moved
        sums_CD, _, _ = _compare_with_own(rows, labels, num_classes, is_sound)
    findings = doubled
    for kind, action, is_found in (("mislabelled", "move", is_moved), ("outlier", "remove", is_far)):
        places = is_found.nonzero()[:, 0]
        findings += [
            LabelFinding(
                kind=kind,
                action=action,
                label=int(labels[place]),
                image=int(known[place]),
                other=int(others_N[place]),
                cosine=float(own_N[place]),
                other_cosine=float(other_N[place]),
            )
            for place in places[(own_N - other_N)[places].argsort()].tolist()
        ]
    return Suspects(findings=findings, unit_CD=functional.normalize(sums_CD))


def _compare_with_own(
    rows_ND: Tensor, labels_N: Tensor, num_classes: int, counts_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sums and numbers of the images that count, by class, and the cosine of each image with the others of its class.

    The cosine is NaN if there are no others.
    """
    counting = counts_N.nonzero()[:, 0]
    sums_CD = rows_ND.new_zeros((num_classes, rows_ND.shape[1]))
    counts_C = torch.bincount(labels_N[counting], minlength=num_classes)
    own_N = rows_ND.new_empty(len(rows_ND))
    for part in _parts(len(counting)):
        sums_CD.index_add_(0, labels_N[counting[part]], rows_ND[counting[part]])
    for part in _parts(len(rows_ND)):
        others_BD = sums_CD[labels_N[part]] - rows_ND[part] * counts_N[part, None]
        has_none_B = counts_C[labels_N[part]] == counts_N[part].long()
        own_N[part] = functional.cosine_similarity(others_BD, rows_ND[part]).masked_fill(has_none_B, float("nan"))
    return sums_CD, counts_C, own_N


def _mean_by_class(own_N: Tensor, labels_N: Tensor, counts_C: Tensor) -> Tensor:
    return own_N.new_zeros(len(counts_C)).index_add_(0, labels_N, own_N.nan_to_num()) / counts_C.clamp(min=1)


def _find_doubled(rows_ND: Tensor, labels_N: Tensor, num_classes: int) -> list[LabelFinding]:
    sums_CD, counts_C, own_N = _compare_with_own(rows_ND, labels_N, num_classes, torch.ones_like(labels_N).bool())
    own_C, unit_CD = _mean_by_class(own_N, labels_N, counts_C), functional.normalize(sums_CD)
    judged = (counts_C >= 2).nonzero()[:, 0]
    if len(judged) < 2:
        return []
    # Means are closer to each other than their images are, so hardly any doubled pair lies below this cosine.
    least = _SAME_SHARE * float(own_C[judged].kthvalue(max(1, len(judged) // 100)).values)
    first_P, second_P = (judged[places] for places in close_pairs(unit_CD[judged], max(0.0, least)))
    across_P = (
        _dot(sums_CD, unit_CD, first_P, second_P) / counts_C[first_P]
        + _dot(sums_CD, unit_CD, second_P, first_P) / counts_C[second_P]
    ) / 2
    own_P = (own_C[first_P] + own_C[second_P]) / 2
    share_P = across_P / own_P
    return [
        LabelFinding(
            kind="doubled",
            action="merge",
            label=int(second_P[place]),
            other=int(first_P[place]),
            cosine=float(own_P[place]),
            other_cosine=float(across_P[place]),
        )
        for place in share_P.argsort(descending=True).tolist()
        if share_P[place] > _SAME_SHARE
    ]


def find_in_training(
    tests_ND: NDArray[np.float32],
    test_labels_N: NDArray[np.int64],
    rows_ND: NDArray[np.float32],
    labels_N: NDArray[np.int64],
    suspects: Suspects,
) -> list[tuple[int, int, float, float]]:
    """Returns (identity of the test, class, cosine, cosine within the class) of identities that are in the training data.

    Each identity is compared with the class whose mean is the closest to its images: by the mean cosine of its images with
    their nearest ones of the class. Rows with NaN and suspected images do not count.
    """
    device = suspects.unit_CD.device
    tests = np.flatnonzero(np.isfinite(tests_ND[:, 0]))
    identities, test_of_T = np.unique(test_labels_N[tests], return_inverse=True)
    tests_TD = torch.as_tensor(tests_ND[tests], device=device)
    sums_ID = tests_TD.new_zeros((len(identities), tests_TD.shape[1]))
    sums_ID.index_add_(0, torch.as_tensor(test_of_T, device=device), tests_TD)
    gallery = GalleryShard(embeddings_ND=suspects.unit_CD)
    classes_I = search(sums_ID, gallery, k=1, device=device, is_alone=True).other_indices_Pk[:, 0].tolist()
    is_sound_N = np.isfinite(rows_ND[:, 0])
    is_sound_N[[one.image for one in suspects.findings if one.image >= 0]] = False
    of_class, of_test = _by_label(labels_N, is_sound_N), _by_label(test_of_T, np.ones(len(test_of_T), dtype=bool))
    found = []
    with full_precision():
        for identity, label in enumerate(classes_I):
            images_KD = torch.as_tensor(rows_ND[of_class(label)[:_MOST_IMAGES]], device=device)
            if len(images_KD) < 2:
                continue
            within_KK = (images_KD @ images_KD.T).fill_diagonal_(-1.0)
            within = float(within_KK.topk(min(_NUM_NEAREST, len(images_KD) - 1), dim=1).values.mean())
            scores_TK = tests_TD[torch.as_tensor(of_test(identity), device=device)] @ images_KD.T
            cosine = float(scores_TK.topk(min(_NUM_NEAREST, len(images_KD)), dim=1).values.mean())
            if within > 0 and cosine > _IN_TRAINING_SHARE * within:
                found.append((int(identities[identity]), label, cosine, within))
    return found


def _by_label(labels_N: NDArray[np.int64], counts_N: NDArray[np.bool_]) -> Callable[[int], NDArray[np.int64]]:
    """Returns a function that gives the rows with a label, of those that count."""
    rows = np.flatnonzero(counts_N)
    rows = rows[np.argsort(labels_N[rows], kind="stable")]
    ordered = labels_N[rows]
    return lambda label: rows[slice(*np.searchsorted(ordered, [label, label + 1]))]


@torch.no_grad()
def close_pairs(unit_CD: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns the pairs of rows (i, j), i < j, whose cosine is above the threshold, by products of blocks.

    On a GPU the products are in float16: 2 million rows of 512 numbers take 2e15 operations.
    """
    is_half = unit_CD.device.type == "cuda"
    rows_CD = unit_CD.half() if is_half else unit_CD
    least = threshold - _HALF_SLACK if is_half else threshold
    firsts, seconds, num_pairs = [], [], 0
    for start in range(0, len(rows_CD), _BLOCK_ROWS):
        for first in range(start, len(rows_CD), _BLOCK_COLUMNS):
            is_close = rows_CD[start : start + _BLOCK_ROWS] @ rows_CD[first : first + _BLOCK_COLUMNS].T > least
            if first == start:
                is_close = is_close.triu(1)
            num_pairs += int(is_close.sum())
            if num_pairs > _MOST_PAIRS_PER_CLASS * max(1000, len(rows_CD)):
                raise DataError(
                    f"More than {num_pairs:,} pairs of the {len(rows_CD):,} classes are alike (cosine above {threshold:.2f}): "
                    f"this model does not tell the classes apart well enough to find doubled ones. Train it longer."
                )
            places = is_close.nonzero()
            firsts.append(places[:, 0] + start)
            seconds.append(places[:, 1] + first)
    first_P, second_P = torch.cat(firsts), torch.cat(seconds)
    is_above = _dot(unit_CD, unit_CD, first_P, second_P) > threshold
    return first_P[is_above], second_P[is_above]


def _dot(left_CD: Tensor, right_CD: Tensor, left_P: Tensor, right_P: Tensor) -> Tensor:
    """Returns the products of chosen rows, a part at a time."""
    found = left_CD.new_empty(len(left_P))
    for part in _parts(len(left_P)):
        found[part] = (left_CD[left_P[part]] * right_CD[right_P[part]]).sum(1)
    return found


def merged_classes(findings: Sequence[LabelFinding], num_classes: int) -> NDArray[np.int64]:
    """Returns the class that each class becomes by the findings that say merge; chains end at their smallest number."""
    parents = np.arange(num_classes)

    def root(label: int) -> int:
        while parents[label] != label:
            label = int(parents[label])
        return label

    for one in findings:
        if one.action == "merge":
            low, high = sorted((root(one.label), root(one.other)))
            parents[high] = low
    # A parent has a smaller number than its child, so it is final when the child looks at it.
    for label in np.flatnonzero(parents != np.arange(num_classes)).tolist():
        parents[label] = parents[parents[label]]
    return parents


def _parts(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_COLUMNS) for start in range(0, num_rows, _BLOCK_COLUMNS))
