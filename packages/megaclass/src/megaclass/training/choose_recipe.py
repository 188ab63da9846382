"""Chooses a recipe for data of the user's own, by its size and by what this machine has: `megaclass train photos/`."""

import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from megaclass.config.read import recipe_path
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.image_size import compact_size, shown_size

# Images up to which a small network learns as much as a large one does, and classes beyond which a tenth of them suffices.
_FEW_IMAGES, _MANY_CLASSES = 200_000, 500_000
_SMALLEST_SIDE, _LARGEST_SIDE = 32, 224
_LEAST_STEPS_PER_EPOCH = 10
_IMAGES_PER_GPU, _LARGEST_BATCH = 128, 1024


@dataclass(frozen=True, slots=True)
class ChosenRecipe:
    """A recipe of the package, and settings that fit it to the data."""

    path: Path
    overrides: list[str]
    reason: str
    """The choice and its reason; for few images also the command that fine-tunes a pretrained network."""


def choose_recipe(folder: str, run_dir: str = "") -> ChosenRecipe:
    """Opens the data to count its images and classes; an error of the data is raised as by a run.

    run_dir: the run folder, if the user has chosen one.
    """
    source, has_gpu = open_source(folder), torch.cuda.is_available()
    run_dir = run_dir or f"runs/{run_name(folder)}"
    is_rows = isinstance(source, TensorSource)
    for_gpu = "own-small" if source.num_images <= _FEW_IMAGES else "own-large"
    name = "features" if is_rows else for_gpu if has_gpu else "own-cpu"
    overrides = [f"data.path={folder}", f"train.run_dir={run_dir}"]
    fitting = []
    if (size := _own_size(source)) and name in ("own-small", "own-large"):
        fitting.append(f"data.size={size}")
    batch = {"own-cpu": 64, "own-small": 256, "own-large": 512, "features": 1024}[name]
    while batch > 8 and source.num_images < _LEAST_STEPS_PER_EPOCH * batch:
        batch //= 2
    num_gpus = torch.cuda.device_count() if name == "own-large" else 1
    # With fewer images per GPU most of a step is not the GPU's; with more in all, the learning rate would have to change.
    batch = max(batch, min(_LARGEST_BATCH, _IMAGES_PER_GPU * num_gpus)) if num_gpus > 1 else batch
    fitting.append(f"train.global_batch={batch}")
    if num_gpus > 1:
        fitting.append(f"train.nproc={num_gpus}")
    if source.num_classes > _MANY_CLASSES:
        fitting.append("head.sample_rate=0.1")
    size_text = shown_size(compact_size(source.image_size))
    what = f"{source.num_images:,} {'rows' if is_rows else 'images'} of {source.num_classes:,} classes, {size_text}"
    reason = (
        f"{folder} has {what}, and this machine has {'a' if has_gpu else 'no'} GPU: training with the recipe {name}, "
        f"{', '.join(fitting)}, into {run_dir}. Settings of your own come after the folder, as section.key=value."
    )
    if not is_rows and source.num_images <= _FEW_IMAGES and find_spec("timm") is not None:
        # Only proposed: it downloads, and the licence of the weights is for the user to judge.
        given = [f"data.path={folder}", f"train.run_dir={run_dir}-pretrained", f"train.global_batch={min(batch, 64)}"]
        reason += (
            f" A network with pretrained weights usually learns more from so few images. This downloads one, of 88 MB, and "
            f"fine-tunes it: megaclass train own-pretrained {shlex.join(given)}"
        )
    return ChosenRecipe(recipe_path(Path(name)), [*overrides, *fitting], reason)


def run_name(folder: str) -> str:
    """Returns the name of the run folder for data at this path; several paths are joined."""
    return "-".join(Path(part).resolve().name or "data" for part in folder.split(",") if part)


def _own_size(source: ImageSource) -> int:
    """Returns the size of the images if a backbone takes it as it is; 0 for the size of the recipe."""
    height, width = source.image_size
    is_usable = height == width and height % 16 == 0 and _SMALLEST_SIDE <= height <= _LARGEST_SIDE
    return height if is_usable else 0
