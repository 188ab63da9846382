"""The classification protocol: which class is an image of? -> top-1, top-5, calibration, rejection.

Every image is compared with the centres of all classes; the class of the closest centre is the answer. The ranks hold
a part of the centres each and score all images against it. A tie between the own class and another counts against the
model.

Classes of the set and of the model are matched by name if both have names, else by number. Images of classes that the model
does not know are counted, and show how well unknown classes are rejected; no other number includes them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.checkpoint.class_names import ClassList, class_list, match_classes
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource, require_one_label
from megaclass.distributed.agreement import on_every_rank_for_long
from megaclass.errors import DataError
from megaclass.evaluation.examples import Judged, examples_of
from megaclass.evaluation.images import images_of_source
from megaclass.evaluation.protocol import (
    Cell,
    EvaluationProtocol,
    EvaluationSet,
    Evaluator,
    Numbers,
    Row,
    SetResult,
    best_cells,
    percent,
    share_rows,
    share_text,
)
from megaclass.evaluation.protocols.intervals import wilson_interval
from megaclass.evaluation.search import GalleryShard, Neighbours, search
from megaclass.image_size import has_rows

Floats = NDArray[np.float64]
TOP = (1, 5)
COVERAGES = (1.0, 0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
REJECT_RATES = (0.1, 0.01, 0.001)
_NUM_BINS = 15
# Cosines are multiplied by a scale before the softmax; the temperature is its inverse. Inner products may be large.
_SCALES = (1.0, 256.0)
_LOWEST_INNER_SCALE = 1e-3
_GOLDEN = (math.sqrt(5) - 1) / 2
# Images on which the temperature is fitted, at most half of all; a GPU compares more of them with a million classes.
_MAX_FITTED = {"cpu": 1024, "cuda": 4096}
_FEWEST_FITTED = 10


class ClassificationProtocol(EvaluationProtocol):
    """Labelled images against the class centres of the model."""

    kind = "classification"
    card_name = "classification, both flips"
    quoted_at = ("top_k", "1")
    headline_form = "top-1 {quoted} of {num_model_classes:,} classes"
    lead_form = (
        "{num_images:,} images of {num_classes:,} classes, each compared with the centres of all {num_model_classes:,} classes "
        "of the model. In brackets: 95 % confidence."
    )
    meaning_form = (
        "Shown an image, the model names the right one of its {num_model_classes:,} classes in {share:.1%} of cases."
    )

    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        if evaluator.centres is None:
            raise DataError(no_centres("the model"))
        device, group = evaluator.device, evaluator.group
        centres = on_every_rank_for_long(evaluator.centres, device, group)
        source, labels_N, matched = on_every_rank_for_long(
            lambda: labelled_images(one.path, centres.classes), device, group
        )
        images = images_of_source(source, evaluator.image_size, evaluator.fit)
        # The sum of two embeddings has the direction of their mean, but not its length.
        is_mirrored = evaluator.mirror and centres.is_cosine
        evaluator = replace(evaluator, mirror=is_mirrored)
        rows_ND = torch.as_tensor(centres.probes(evaluator.embed(images).sums_ND), device=device)
        scale, fitted = fitted_scale(rows_ND, labels_N, centres.shard, device=device, group=group)
        found = search(
            rows_ND, centres.shard, k=max(TOP), device=device, probe_labels_P=labels_N, group=group, scale=scale or 1.0
        )
        numbers = numbers_of(found, labels_N, scale=scale, fitted=fitted, num_images_C=centres.num_images_C)
        known = np.flatnonzero(labels_N >= 0)
        judged = Judged(
            indices_N=known,
            labels_N=labels_N[known],
            own_N=found.mate_scores_P.double().cpu().numpy()[known],
            other_N=found.other_scores_Pk[:, 0].double().cpu().numpy()[known],
            others_N=found.other_indices_Pk[:, 0].cpu().numpy()[known],
        )
        examples = examples_of(judged, source, labels_N, centres.classes.names_of, by_pair=True)
        unknown = np.asarray(source.labels)[labels_N < 0]
        numbers |= {
            "num_model_classes": centres.classes.num_classes,
            "num_unknown_classes": len(np.unique(unknown)),
            "matched_by": matched,
            **({} if is_mirrored or has_rows(evaluator.image_size) else {"mirror": False}),
        }
        return self.result(one, numbers, examples=examples)

    def remark(self, numbers: Numbers) -> str:
        told = f"Classes are matched by {numbers['matched_by']}."
        if numbers["num_unknown_images"]:
            told += (
                f" {numbers['num_unknown_images']:,} images of {numbers['num_unknown_classes']:,} classes that the model does "
                f"not know are left out of all numbers but the rejection."
            )
        return told

    def drawn(self, numbers: Numbers) -> Iterable[float]:
        yield from (point[key] for point in numbers["coverage"] for key in ("coverage", "accuracy"))
        yield from (one["threshold"] for one in numbers["reject"].values())

    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        rows = share_rows(columns, "top_k", "Top-{}")
        rows += share_rows(columns, "mean_per_class", "Top-1, mean over classes")
        rows += share_rows(columns, "by_training_images", "Top-1, classes with {} training images", "top_1")
        kept = [{"reject": {percent(float(rate)): one for rate, one in n["reject"].items()}} for n in columns]
        rows += share_rows(kept, "reject", "Right and accepted, {} of unknown images accepted", "kept")
        errors = [n["calibration_error"] for n in columns]
        rows.append(
            ("Calibration error (ECE)", best_cells([share_text(one) for one in errors], errors, is_lower_better=True))
        )
        scales = [n["temperature"] for n in columns]
        rows.append(("Temperature", [Cell("–" if one is None else f"{one:.4f}") for one in scales]))
        return rows


def no_centres(model: str) -> str:
    """Says why a model cannot classify, and what has the centres."""
    return (
        f"{model} has no class centres, so it cannot classify: give the run folder with its checkpoints, or an export of "
        f"it (megaclass export RUN --to safetensors), which holds centres.safetensors. For a backbone from elsewhere, "
        f"`megaclass add-classes MODEL FOLDER --out NEW` makes centres of the images of each class."
    )


def labelled_images(path: Path, model: ClassList) -> tuple[ImageSource, NDArray[np.int64], str]:
    """Opens a set; returns it, the class of every image as the model numbers it or -1, and "name" or "number"."""
    source = open_source(path)
    require_one_label(source, "Classification")
    classes = class_list(str(path), source)
    matched = "name" if classes.text and model.text else "number"
    if matched == "name":
        numbers_K = match_classes(model, classes, 0, classes.num_classes).saved_K
    else:
        numbers_K = np.arange(classes.num_classes)
        numbers_K = np.where(numbers_K < model.num_classes, numbers_K, -1)
    labels_N = numbers_K[np.asarray(source.labels)].astype(np.int64)
    if not (labels_N >= 0).any():
        theirs, ours = (", ".join(one.names_of(range(min(3, one.num_classes))).values()) for one in (classes, model))
        raise DataError(
            f"None of the {len(labels_N):,} images of {path} is of a class that the model knows. Its classes are {theirs}, …; "
            f"the model's are {ours}, … A file classes.txt next to the data (line i for class i) gives them other names."
        )
    return source, labels_N, matched


def fitted_scale(
    rows_ND: Tensor,
    labels_N: NDArray[np.int64],
    centres: GalleryShard,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> tuple[float | None, NDArray[np.int64]]:
    """Collective. Returns the scale of the cosines that makes the known images most likely, and the images it was fitted on.

    The other images show how well the probabilities are calibrated. None: there are too few images. The likelihood has one
    maximum, which a golden-section search finds to 1 %: every trial is one pass over the centres.
    """
    known = np.flatnonzero(labels_N >= 0)
    num_fitted = min(len(known) // 2, _MAX_FITTED[device.type])
    if num_fitted < _FEWEST_FITTED:
        return None, known[:0]
    fitted = known[np.linspace(0, len(known) - 1, num_fitted).astype(np.int64)]
    rows, labels = rows_ND[torch.from_numpy(fitted).to(device)], labels_N[fitted]

    def loss(log_scale: float) -> float:
        scale = math.exp(log_scale)
        found = search(rows, centres, k=1, device=device, probe_labels_P=labels, group=group, scale=scale)
        assert found.log_sums_P is not None
        return float((found.log_sums_P.double() - scale * found.mate_scores_P.double()).mean())

    low, high = map(math.log, _SCALES)
    if centres.is_normalised:
        low = math.log(_LOWEST_INNER_SCALE)
    places = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    losses = [loss(place) for place in places]
    while high - low > 0.01:
        if losses[0] <= losses[1]:
            high = places[1]
            places = [high - _GOLDEN * (high - low), places[0]]
            losses = [loss(places[0]), losses[0]]
        else:
            low = places[0]
            places = [places[1], low + _GOLDEN * (high - low)]
            losses = [losses[1], loss(places[1])]
    return math.exp((low + high) / 2), fitted


def numbers_of(
    found: Neighbours,
    labels_N: NDArray[np.int64],
    *,
    scale: float | None,
    fitted: NDArray[np.int64],
    num_images_C: NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Computes the numbers. found: own and best other classes of every image; labels_N: -1 for unknown classes."""
    is_known_N = labels_N >= 0
    own_N, others_Nk = found.mate_scores_P.double().cpu().numpy(), found.other_scores_Pk.double().cpu().numpy()
    labels, own, others = labels_N[is_known_N], own_N[is_known_N], others_Nk[is_known_N]
    # >= and not >: a tie counts against the model.
    num_above = (others >= own[:, None]).sum(axis=1)
    is_right = num_above == 0
    hits = {k: int((num_above < k).sum()) for k in TOP}
    classes, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    recall = np.bincount(places, weights=is_right) / counts
    best = np.maximum(own, others[:, 0])
    confidence, error = best, None
    if scale is not None:
        assert found.log_sums_P is not None
        confidence = np.exp(scale * best - found.log_sums_P.double().cpu().numpy()[is_known_N])
        is_fitted = np.isin(np.flatnonzero(is_known_N), fitted)
        error = calibration_error(confidence[~is_fitted], is_right[~is_fitted])
    unknown = others_Nk[~is_known_N, 0]
    # Without unknown images, each image stands in for one of an unknown class: the best class but its own.
    reject_by = "own class left out" if len(unknown) < 1 / max(REJECT_RATES) else "unknown images"
    impostors = others[:, 0] if reject_by == "own class left out" else unknown
    return {
        "num_images": len(labels),
        "num_classes": len(classes),
        "num_unknown_images": int((~is_known_N).sum()),
        "top_k": {str(k): num / len(labels) for k, num in hits.items()},
        "top_k_95": {str(k): list(wilson_interval(num, len(labels))) for k, num in hits.items()},
        "mean_per_class": float(recall.mean()),
        "by_training_images": {} if num_images_C is None else _by_count(num_images_C[labels], labels, is_right),
        "coverage": coverage_points(confidence, is_right),
        "reject": _rejections(best, is_right, impostors),
        "reject_by": reject_by,
        "temperature": None if scale is None else 1 / scale,
        "num_fitted": len(fitted),
        "calibration_error": error,
    }


def calibration_error(confidence: Floats, is_right: NDArray[np.bool_]) -> float:
    """Returns the expected calibration error: the mean over 15 bins of |accuracy - confidence|, weighted by their images."""
    bins = np.minimum((confidence * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    gaps = np.bincount(bins, weights=is_right - confidence, minlength=_NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def coverage_points(confidence: Floats, is_right: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Returns the accuracy on the most confident images. Of equally confident ones the wrong ones come first."""
    order = np.lexsort((is_right, -confidence))
    num_right = np.cumsum(is_right[order])
    points = []
    for coverage in COVERAGES:
        kept = max(1, math.ceil(coverage * len(order) - 1e-9))
        accuracy, threshold = num_right[kept - 1] / kept, confidence[order[kept - 1]]
        points.append({"coverage": coverage, "accuracy": float(accuracy), "threshold": float(threshold)})
    return points


def _rejections(best: Floats, is_right: NDArray[np.bool_], impostors: Floats) -> dict[str, dict[str, float]]:
    """Returns for each rate the cosine that at most this share of unknown images exceeds, and what is kept above it."""
    # A model of one class has no other class to take an image for.
    falling = -np.sort(-impostors[np.isfinite(impostors)])
    found = {}
    for rate in REJECT_RATES:
        if len(falling) * rate < 1 - 1e-9:
            break
        threshold = float(falling[min(math.floor(rate * len(falling) + 1e-9), len(falling) - 1)])
        found[f"{rate:g}"] = {"threshold": threshold, "kept": float((is_right & (best > threshold)).mean())}
    return found


def _by_count(
    num_images_N: NDArray[np.int64], labels_N: NDArray[np.int64], is_right: NDArray[np.bool_]
) -> dict[str, dict[str, float]]:
    """Groups images by the number of training images of their class: 0, 1, 2, 3-4, 5-8, … ."""
    groups = np.ceil(np.log2(np.maximum(num_images_N, 0.5))).astype(np.int64)
    found = {}
    for group in np.unique(groups).tolist():
        low, high = (0, 0) if group < 0 else (2 ** (group - 1) + 1 if group else 1, 2**group)
        here = groups == group
        name = str(high) if low >= high else f"{low}-{high}"
        found[name] = {
            "images": int(here.sum()),
            "classes": len(np.unique(labels_N[here])),
            "top_1": float(is_right[here].mean()),
        }
    return found
