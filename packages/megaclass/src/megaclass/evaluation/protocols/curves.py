"""Reduces the distances of pairs to the curves that a report draws."""

import numpy as np
from numpy.typing import NDArray

from megaclass.evaluation.protocol import Curves, Floats
from megaclass.evaluation.protocols.verification import Roc, roc_curve

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
        thresholds=None if roc.thresholds is None else (1 - roc.thresholds / 2).clip(-1.0, 1.0),
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
    thresholds = None if roc.thresholds is None else roc.thresholds[indices]
    return Roc(far=roc.far[indices], tar=roc.tar[indices], thresholds=thresholds)
