"""The interface of an exporter, and the check that an exported file gives the embeddings of the model it came from."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megaclass.errors import CheckpointError, ExportError
from megaclass.evaluation.centres import ModelCentres
from megaclass.image_size import ImageSize, has_rows, height_and_width, input_shape, is_sequence
from megaclass.inference import LoadedModel, load


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """One model on its way into a folder."""

    model: LoadedModel
    run: Path | None
    """Run folder of the model; None for a model file without a run."""
    centres: ModelCentres | None
    """Class centres of the model; None if it has none."""
    folder: Path
    """Folder to write into. It becomes `out` when everything is written and checked."""
    out: Path
    """Folder as the user knows it, for error messages."""
    metadata: Mapping[str, str]
    detector: Path | None = None
    """Face detector to add to a pack of InsightFace."""


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """One form of a model. Each module of this form defines one as EXPORTER."""

    file: str
    """Name of the model file."""
    write: Callable[[ExportJob], None]
    """Writes the file, and checks that it gives the embeddings of the model."""
    usage: str
    """Code for the model card; {insightface_name} and {embedding_dim} are filled in."""
    extra_files: tuple[str, ...] = ()
    """Names of further files that `write` may add."""


MIN_COSINE = 0.99999
# The cosine does not notice a wrong scale, and exported embeddings are not normalised.
MAX_NORM_DIFFERENCE = 1e-3


def fixed_inputs(image_size: ImageSize) -> torch.Tensor:
    """Returns seven images of coarse random patches, the same on every machine; like photos they have large even areas.

    For features, seven rows of normal numbers.
    """
    generator = torch.Generator().manual_seed(0)
    if is_sequence(image_size):
        raise ExportError(
            "A model of sequences cannot be exported: its inputs differ in length, and nothing is known about their values. "
            "megaclass.load opens the run folder."
        )
    if has_rows(image_size):
        return torch.randn((7, *input_shape(image_size)), generator=generator)
    coarse = torch.randint(0, 256, (7, 3, 7, 7), generator=generator).float()
    pixels = torch.nn.functional.interpolate(coarse, size=height_and_width(image_size), mode="nearest")
    return (pixels - 127.5) / 127.5


def require_same_embeddings(
    path: Path,
    embed: Callable[[torch.Tensor], NDArray[np.float64]],
    backbone: nn.Module,
    inputs: torch.Tensor,
    what: str,
) -> None:
    """Requires a cosine of at least 0.99999 and norms within 0.1 %, for one image and for all of them.

    embed: runs the exported file. backbone: its origin, in eval mode, float32, on the CPU. what: names the file in errors.
    """
    for num_images in (1, len(inputs)):
        _compare(path, embed(inputs[:num_images]), backbone, inputs[:num_images], what)


def require_same_when_opened(job: ExportJob, name: str) -> None:
    """Opens a file of the unfinished export as a user would, and compares its embeddings with the model's."""
    model, shown = job.model, job.out / name
    try:
        network = load(
            job.folder / name, device="cpu", backbone=model.backbone if ":" in model.backbone else None
        ).network
    except CheckpointError as error:
        raise ExportError(f"Not written: {shown}. The written file cannot be opened: {error}") from error

    def embed(images: torch.Tensor) -> NDArray[np.float64]:
        with torch.no_grad():
            return np.asarray(network(images).double().numpy())

    backbone = copy.deepcopy(model.network).cpu().float().eval()
    require_same_embeddings(shown, embed, backbone, fixed_inputs(model.image_size), f"the file {name}")


def _compare(path: Path, got_BD: NDArray[np.float64], backbone: nn.Module, inputs: torch.Tensor, what: str) -> None:
    with torch.no_grad():
        want_BD = backbone(inputs).double().numpy()
    if got_BD.shape != want_BD.shape or want_BD.ndim != 2 or len(want_BD) != len(inputs):
        raise ExportError(
            f"Not written: {path}. For {len(inputs)} image(s) {what} gives embeddings of shape {got_BD.shape}, "
            f"the backbone {want_BD.shape}: expected one row per image."
        )
    got_norms_B, want_norms_B = np.linalg.norm(got_BD, axis=1), np.linalg.norm(want_BD, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines_B = (got_BD * want_BD).sum(axis=1) / (got_norms_B * want_norms_B)
        norm_differences_B = np.abs(got_norms_B / want_norms_B - 1)
    # Written with `not`, so NaN is also a failure.
    if not (cosines_B.min() >= MIN_COSINE and norm_differences_B.max() <= MAX_NORM_DIFFERENCE):
        raise ExportError(
            f"Not written: {path}. For {len(inputs)} image(s) {what}'s embeddings differ from the backbone's: "
            f"lowest cosine {cosines_B.min():.6f} (at least {MIN_COSINE} is required), norms differ by up to "
            f"{norm_differences_B.max():.2%}."
        )
