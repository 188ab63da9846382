"""Finds out how a verification set relates to the training data: held-out identities, unknown ones, or training images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.source import ImageSource
from megaclass.data.tools.overlap import describe_overlap, find_overlaps
from megaclass.data.tools.split import is_unseen
from megaclass.evaluation.protocol import SetResult
from megaclass.progress import OnProgress, no_progress


def compared_with_training_data(
    results: Sequence[SetResult],
    source: ImageSource,
    data_path: str,
    drawn: Path | None = None,
    on_progress: OnProgress = no_progress,
) -> list[SetResult]:
    """Returns the results with `training_data` added to each .bin: how many of its images are training images, and whether
    `megaclass data split` held its identities out of the data at `data_path`.

    drawn: a .bin of synthetic identities, which are not in the training data by construction.
    """
    bins = {one.name: Path(one.path) for one in results if one.error is None and one.path.endswith(".bin")}
    images = {name: read_pairs(path).images for name, path in bins.items()}
    overlaps = find_overlaps(images, source, on_progress=on_progress) if bins else {}
    compared = []
    for one in results:
        if one.name in overlaps:
            is_held_out = bins[one.name] == drawn or is_unseen(bins[one.name], data_path)
            found = {**overlaps[one.name], "is_held_out": is_held_out}
            one = replace(one, numbers={**one.numbers, "training_data": found})
        compared.append(one)
    return compared


def training_data_line(numbers: Mapping[str, Any]) -> str:
    """Returns a sentence on how the set relates to the training data; empty if they were not compared."""
    said = numbers.get("training_data")
    if said is None:
        return ""
    sentence = describe_overlap(said)
    if said["found"]:
        return f"WARNING: {sentence}. Hold some out first: megaclass data split."
    if said["is_held_out"]:
        return f"Its identities were held out of training; {sentence}."
    return f"{sentence[0].upper()}{sentence[1:]}; other images of the same people may be in the training data."
