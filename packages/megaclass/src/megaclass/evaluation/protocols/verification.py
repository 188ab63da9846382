"""Computes the published numbers from distances of pairs: 10-fold accuracy, ROC, TAR at FAR, EER, AUC.

A pair is called "same" if its distance is strictly below a threshold. Letters: N pairs, 2N images (the images of a pair
are consecutive), T thresholds, F folds. All arithmetic is float64.

Accuracy follows the published protocol exactly (thresholds 0, 0.01 .. 3.99, folds without shuffling). The ROC and the
numbers read from it (TAR at FAR, EER, AUC) are exact: every distance that occurs is a threshold, so there is no grid and
no interpolation. Published scripts interpolate TAR on a grid of 0.001; both agree within that grid.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.evaluation.protocols.intervals import Interval, tar_interval

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

FAR_TARGETS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
_ROUNDING = 1e-5
_JSON_NAMES = {"tar_intervals": "tar_at_far_95", "published_tar": "published_tar_at_far_1e-3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Roc:
    """Shares of pairs called "same", from (0, 0) to (1, 1): one point per distance that occurs."""

    far: Floats
    """False accept rate: share of the different pairs called "same", never decreasing."""
    tar: Floats
    """True accept rate: share of the same pairs called "same", never decreasing."""
    thresholds: Floats
    """Squared distance up to which a pair is called "same" at each point; the first accepts nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRates:
    """The error rates of one model on one set of pairs, read from the ROC."""

    num_pairs: int
    num_same: int
    auc: float
    eer: float
    """Error rate at which false accepts and false rejects are equally frequent."""
    tar_at_far: dict[float, float | None]
    """Largest TAR whose FAR does not exceed the target; None with fewer than 1 / target different pairs."""
    tar_intervals: dict[float, Interval | None]
    """95 % confidence interval of each TAR."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for json.dump; TAR at FAR has keys such as "1e-3"."""
        return {_JSON_NAMES.get(name, name): _plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification(PairRates):
    """All numbers of the published protocol: the rates, and accuracies over folds."""

    accuracy: float
    """Mean over the folds of the accuracy at the threshold that the other folds chose."""
    accuracy_std: float
    """Population standard deviation of the folds' accuracies."""
    threshold: float
    """Squared distance that separates all pairs best (the first of several): the one to deploy."""
    threshold_far: float
    """Share of the different pairs whose distance lies below `threshold`."""
    threshold_at_far: dict[float, float | None]
    """Largest threshold whose FAR does not exceed the target, as a squared distance; None as in `tar_at_far`."""
    fold_accuracies: tuple[float, ...]
    fold_thresholds: tuple[float, ...]
    published_tar: float
    """TAR at FAR 1e-3 as InsightFace prints it: see `published_tar_at_far`."""
    xnorm: float | None = None
    """Mean norm of the embeddings before normalisation, over both flips; None for distances without embeddings."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredPairs:
    """The distances of one model on a set of pairs, and the numbers computed from them."""

    distances_N: Floats
    is_same_N: Booleans
    verification: Verification

    @property
    def similarities_N(self) -> Floats:
        """Cosines: |a - b|² = 2 - 2 cos(a, b) for normalised embeddings."""
        return 1 - self.distances_N / 2


def published_thresholds() -> Floats:
    """Returns the published grid, made by the published call because its rounding decides ties."""
    return np.arange(0, 4, 0.01, dtype=np.float64)


def score_embeddings(
    embeddings_2ND: NDArray[Any], is_same_N: NDArray[Any], *, xnorm: float | None = None, num_folds: int = 10
) -> ScoredPairs:
    """Runs the published protocol on embeddings of 2N images."""
    distances_N = squared_distances(embeddings_2ND)
    verification = verify_distances(distances_N, is_same_N, num_folds=num_folds, xnorm=xnorm)
    return ScoredPairs(distances_N=distances_N, is_same_N=np.asarray(is_same_N, dtype=bool), verification=verification)


def squared_distances(embeddings_2ND: NDArray[Any]) -> Floats:
    """Returns the squared distance of consecutive rows after L2 normalisation: 0 (same direction) to 4 (opposite)."""
    embeddings_2ND = np.asarray(embeddings_2ND, dtype=np.float64)
    norms_2N = np.linalg.norm(embeddings_2ND, axis=1)
    normalised_2ND = embeddings_2ND / norms_2N[:, None]
    return np.asarray(np.square(normalised_2ND[0::2] - normalised_2ND[1::2]).sum(axis=1), dtype=np.float64)


def verify_distances(
    distances_N: NDArray[Any],
    is_same_N: NDArray[Any],
    *,
    thresholds_T: NDArray[Any] | None = None,
    num_folds: int = 10,
    xnorm: float | None = None,
) -> Verification:
    """Computes all numbers from distances; smaller means more alike. The default thresholds are the published grid."""
    distances_N, is_same_N = _checked(distances_N, is_same_N, num_folds)
    thresholds_T = published_thresholds() if thresholds_T is None else np.asarray(thresholds_T, dtype=np.float64)
    correct_FT = _correct_by_fold(distances_N, is_same_N, thresholds_T, num_folds)
    correct_T = correct_FT.sum(axis=0)
    # Counts are integers, and all candidates refer to the same pairs: argmax finds the first maximum without rounding.
    chosen_F = np.argmax(correct_T - correct_FT, axis=1)
    fold_sizes_F = [len(fold) for fold in np.array_split(distances_N, num_folds)]
    accuracies_F = correct_FT[np.arange(num_folds), chosen_F] / fold_sizes_F
    threshold = float(thresholds_T[np.argmax(correct_T)])
    return Verification(
        **asdict(pair_rates(distances_N, is_same_N)),
        accuracy=float(accuracies_F.mean()),
        accuracy_std=float(accuracies_F.std()),
        threshold=threshold,
        threshold_far=float((distances_N[~is_same_N] < threshold).mean()),
        threshold_at_far=threshold_at_far(distances_N[~is_same_N], FAR_TARGETS),
        fold_accuracies=tuple(accuracies_F.tolist()),
        fold_thresholds=tuple(thresholds_T[chosen_F].tolist()),
        published_tar=published_tar_at_far(distances_N, is_same_N, num_folds=num_folds),
        xnorm=xnorm,
    )


def pair_rates(distances_N: Floats, is_same_N: Booleans) -> PairRates:
    """Computes the error rates from distances; smaller means more alike."""
    roc = roc_curve(distances_N, is_same_N)
    num_same = int(is_same_N.sum())
    return PairRates(
        num_pairs=len(distances_N),
        num_same=num_same,
        auc=area_under(roc),
        eer=equal_error_rate(roc),
        tar_at_far=tar_at_far(roc, FAR_TARGETS, num_different=len(distances_N) - num_same),
        tar_intervals=tar_intervals(distances_N, is_same_N, FAR_TARGETS),
    )


def roc_curve(distances_N: NDArray[Any], is_same_N: NDArray[Any]) -> Roc:
    """Returns the exact ROC: one point per distinct distance; ties move both rates at once."""
    distances_N, is_same_N = np.asarray(distances_N, dtype=np.float64), np.asarray(is_same_N, dtype=bool)
    distinct = np.unique(distances_N)
    tar = np.searchsorted(np.sort(distances_N[is_same_N]), distinct, side="right") / is_same_N.sum()
    far = np.searchsorted(np.sort(distances_N[~is_same_N]), distinct, side="right") / (~is_same_N).sum()
    return Roc(
        far=np.concatenate([[0.0], far]),
        tar=np.concatenate([[0.0], tar]),
        thresholds=np.concatenate([[0.0], distinct]),
    )


def area_under(roc: Roc) -> float:
    """Returns the probability that a same pair is closer than a different pair, ties counting half."""
    return float(np.sum(np.diff(roc.far) * (roc.tar[1:] + roc.tar[:-1])) / 2)


def equal_error_rate(roc: Roc) -> float:
    """Returns the FAR at which the ROC, its points joined by straight lines, meets FAR = 1 - TAR."""
    # False accepts minus false rejects rises from -1 to 1, so it crosses zero once.
    gap = roc.far - (1 - roc.tar)
    after = int(np.argmax(gap >= 0))
    before = after - 1
    share = -gap[before] / (gap[after] - gap[before])
    return float(roc.far[before] + share * (roc.far[after] - roc.far[before]))


def tar_at_far(roc: Roc, targets: Sequence[float], *, num_different: int) -> dict[float, float | None]:
    """Returns the largest TAR among the thresholds whose FAR does not exceed each target."""
    # One false accept among num_different pairs is the smallest FAR that can be observed. Compared as rates: 29 / 100 is
    # the same float as 0.29, whereas 0.29 * 100 is less than 29.
    return {
        target: float(roc.tar[roc.far <= target].max()) if 1 / num_different <= target else None for target in targets
    }


def threshold_at_far(different_M: Floats, targets: Sequence[float]) -> dict[float, float | None]:
    """Returns the largest threshold below which at most the target's share of the M different pairs lies."""
    different_M = np.sort(different_M)
    rates_M = np.arange(1, len(different_M) + 1) / len(different_M)
    allowed = {target: int(np.searchsorted(rates_M, target, side="right")) for target in targets}
    # Below the distance of the first pair that would be one too many, by more than float32 embeddings are rounded.
    return {
        target: max(0.0, float(different_M[num]) - _ROUNDING) if num and num < len(different_M) else None
        for target, num in allowed.items()
    }


def published_tar_at_far(distances_N: Floats, is_same_N: Booleans, *, far: float = 1e-3, num_folds: int = 10) -> float:
    """Returns the TAR of the published script: the mean over folds, each at the threshold that gives the FAR on the others.

    The threshold is interpolated linearly on a grid of 0.001. If the grid never reaches the FAR, the threshold is 0, and
    so is the TAR.
    """
    thresholds_T = np.arange(0, 4, 0.001)
    tars = []
    for inside in np.array_split(np.arange(len(distances_N)), num_folds):
        is_outside_N = np.ones(len(distances_N), dtype=bool)
        is_outside_N[inside] = False
        different = np.sort(distances_N[is_outside_N & ~is_same_N])
        far_T = np.searchsorted(different, thresholds_T, side="left") / max(1, len(different))
        after = int(np.searchsorted(far_T, far, side="left"))
        threshold = 0.0
        if 0 < after < len(thresholds_T):
            share = (far - far_T[after - 1]) / (far_T[after] - far_T[after - 1])
            threshold = thresholds_T[after - 1] + share * (thresholds_T[after] - thresholds_T[after - 1])
        same = distances_N[inside][is_same_N[inside]]
        # A fold without same pairs has no TAR.
        if len(same):
            tars.append(float((same < threshold).mean()))
    return float(np.mean(tars))


def tar_intervals(
    distances_N: NDArray[Any], is_same_N: NDArray[Any], targets: Sequence[float]
) -> dict[float, Interval | None]:
    """Returns the 95 % intervals of `tar_at_far`; None if the FAR is not measurable."""
    same, different = np.sort(distances_N[is_same_N]), np.sort(distances_N[~is_same_N])
    return {
        target: tar_interval(same, different, target) if 1 / len(different) <= target else None for target in targets
    }


def far_name(far: float) -> str:
    """Returns 1e-3 instead of Python's 0.001 or 1e-03."""
    mantissa, exponent = f"{far:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {far_name(far): _plain(one) for far, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _checked(distances_N: NDArray[Any], is_same_N: NDArray[Any], num_folds: int) -> tuple[Floats, Booleans]:
    distances_N, is_same_N = np.asarray(distances_N, dtype=np.float64), np.asarray(is_same_N, dtype=bool)
    assert distances_N.shape == is_same_N.shape == (len(distances_N),), "a set of N pairs holds 2N images and N labels"
    if len(distances_N) < num_folds:
        raise DataError(
            f"{len(distances_N)} pairs cannot be split into {num_folds} folds: each fold needs at least one pair."
        )
    assert np.isfinite(distances_N).all(), "embeddings that cannot be normalised are refused before"
    if is_same_N.all() or not is_same_N.any():
        raise DataError(
            f"All {len(is_same_N)} pairs are labelled {'same' if is_same_N.all() else 'different'}: "
            f"verification needs pairs of both kinds."
        )
    return distances_N, is_same_N


def _correct_by_fold(
    distances_N: Floats, is_same_N: Booleans, thresholds_T: Floats, num_folds: int
) -> NDArray[np.int64]:
    """Counts the correctly judged pairs of each fold at each threshold, by sorting instead of N x T comparisons."""
    correct_FT = np.empty((num_folds, len(thresholds_T)), dtype=np.int64)
    # array_split splits like scikit-learn's unshuffled KFold: the first N mod F folds are one pair longer.
    for fold, indices in enumerate(np.array_split(np.arange(len(distances_N)), num_folds)):
        same = np.sort(distances_N[indices[is_same_N[indices]]])
        different = np.sort(distances_N[indices[~is_same_N[indices]]])
        same_below_T = np.searchsorted(same, thresholds_T, side="left")
        different_below_T = np.searchsorted(different, thresholds_T, side="left")
        correct_FT[fold] = same_below_T + len(different) - different_below_T
    return correct_FT
