"""Classification with a trained model: the closest classes of an image, and classes that are added without training."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from megaclass.checkpoint.class_names import class_list
from megaclass.data.decode import Fit
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import require_one_label
from megaclass.errors import DataError
from megaclass.evaluation.centres import ModelCentres, centres_in_memory
from megaclass.evaluation.images import images_of_source
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.protocols.classification import ClassificationProtocol
from megaclass.evaluation.search import precision_lock, search
from megaclass.metrics_file import is_number
from megaclass_launch.errors import ConfigError

if TYPE_CHECKING:
    from megaclass.inference.loaded_model import LoadedModel

_logger = logging.getLogger("megaclass.inference")


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One class that an image may be of."""

    name: str
    cosine: float
    """Of the image's embedding and the centre of the class; the inner product, bias included, of a model that has these."""
    probability: float | None
    """None if no temperature is known: the model was not evaluated on labelled images."""


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The answer of `LoadedModel.classify` for one image."""

    guesses: list[Guess]
    """The closest classes, closest first."""
    is_known: bool = True
    """False if no class is close enough at the chosen rate of accepted unknown images."""

    def __str__(self) -> str:
        first = self.guesses[0]
        chance = "" if first.probability is None else f", probability {first.probability:.1%}"
        return f"{first.name if self.is_known else 'unknown'} (cosine {first.cosine:.3f}{chance})"


def facts_of_results(results: Sequence[SetResult]) -> dict[str, Any]:
    """Returns what an evaluation says about classification: temperature and rejection, from the set with the most images."""
    done = [one for one in results if one.kind == ClassificationProtocol.kind and one.error is None]
    if not done:
        return {}
    largest = max(done, key=lambda one: one.numbers["num_images"])
    kept = ("temperature", "reject", "reject_by", "num_images", "calibration_error")
    return {"evaluated_on": largest.name, **{key: largest.numbers[key] for key in kept}}


def classify(
    model: "LoadedModel", rows_ND: NDArray[np.float32], *, top: int, reject: float | None
) -> list[Classification]:
    """Returns the closest classes of each row. reject: the share of unknown images that may be accepted."""
    if top < 1:
        raise DataError(f"Cannot name {top} classes per image: top must be at least 1.")
    shard, names, facts = model.all_classes, model.class_names, model.facts.get("classification", {})
    threshold = None if reject is None else _threshold(facts, reject, model.name)
    stated = facts.get("temperature")
    temperature = float(stated) if stated is not None and is_number(stated) else 0.0
    scale = 1 / temperature if temperature > 0 else None
    rows = torch.as_tensor(rows_ND if shard.is_cosine else shard.probes(rows_ND), device=model.device)
    with precision_lock:
        found = search(rows, shard.shard, k=min(top, len(names)), device=model.device, scale=scale, is_alone=True)
    cosines_Nk, classes_Nk = found.other_scores_Pk.double().cpu(), found.other_indices_Pk.cpu()
    chances_Nk: list[list[float | None]] = [[None] * cosines_Nk.shape[1]] * len(rows)
    if scale is not None and found.log_sums_P is not None:
        chances_Nk = (scale * cosines_Nk - found.log_sums_P.double().cpu()[:, None]).exp().clamp(max=1.0).tolist()
    return [
        Classification(
            guesses=[
                Guess(name=names[number], cosine=cosine, probability=chance)
                for number, cosine, chance in zip(classes, cosines, chances, strict=True)
            ],
            is_known=threshold is None or cosines[0] > threshold,
        )
        for classes, cosines, chances in zip(classes_Nk.tolist(), cosines_Nk.tolist(), chances_Nk, strict=True)
    ]


def _threshold(facts: Mapping[str, Any], rate: float, model: str) -> float:
    measured = facts.get("reject")
    known = {
        at: one["threshold"]
        for at, one in (measured.items() if isinstance(measured, Mapping) else ())
        if isinstance(one, Mapping) and is_number(one.get("threshold"))
    }
    if f"{rate:g}" not in known:
        instead = f"measured are {', '.join(known)}" if known else "none was measured"
        raise DataError(
            f"{model} has no threshold that accepts {rate:g} of the images of unknown classes: {instead}. `megaclass evaluate "
            f"RUN --classify DATA` measures 0.1, 0.01 and 0.001, as far as the number of images allows."
        )
    return float(known[f"{rate:g}"])


def with_added_classes(model: "LoadedModel", folder: Path, *, fit: Fit | None, mirror: bool) -> ModelCentres:
    """Returns the model's centres and one for each class of labelled images: the mean of their unit embeddings.

    A model without centres gets those of the folder alone.
    """
    source = open_source(folder)
    require_one_label(source, "Adding classes")
    added = [name.decode(errors="replace") for name in class_list(str(folder), source).names()]
    if not model.has_centres:
        _logger.info("%s has no class centres: the new model knows the classes of %s only", model.name, folder)
        old_rows, old_names, rows_per_class = torch.empty(0, model.embedding_dim), [], 1
    elif model.centres.is_cosine:
        old_rows, old_names = model.centres.all_rows(), model.class_names
        rows_per_class = model.centres.rows_per_class
    else:
        raise ConfigError(
            f"{model.name} compares images with classes by inner products, for which the mean of a class's embeddings is "
            f"no centre: train it with the new classes (megaclass train … train.init_centres={model.name})."
        )
    if same := sorted(set(added) & set(old_names)):
        raise DataError(
            f"{model.name} already knows {len(same)} of the {len(added)} classes of {folder}, such as {same[0]!r}: rename or "
            f"leave out their folders."
        )
    rows_ND = model.embed_source(images_of_source(source, model.image_size, fit), mirror=mirror).astype(np.float64)
    sums = np.zeros((source.num_classes, rows_ND.shape[1]))
    np.add.at(sums, np.asarray(source.labels), rows_ND)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    if not (norms > 0).all():
        name = added[int(np.argmin(norms))]
        raise DataError(f"Class {name!r} of {folder} has no images, or embeddings that cancel: it cannot be added.")
    new_rows = torch.from_numpy((sums / norms).astype(np.float32)).repeat_interleave(rows_per_class, dim=0)
    return centres_in_memory(torch.cat([old_rows, new_rows]), [*old_names, *added])
