"""Features in a .npy or .safetensors file: a matrix (N, W) of numbers, and the labels of its rows.

The file is mapped into memory: opening it reads the labels only, and a batch reads its own rows.

    X.safetensors   tensors `features` (N, W) and `labels`
    X.npy           the features; the labels are in X.labels.npy next to it

Labels are integers: (N,), or (N, K) for several labels per row, with -1 after the last one.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.data.sources.files import require_plausible_labels
from megaclass.data.sources.source import CLASSES_FILE, SourceFormat
from megaclass.errors import DataError
from megaclass_launch.files import published_file, write_text

FEATURE_SUFFIXES = (".npy", ".safetensors")


class FeatureSource:
    """Rows of a matrix, each with one label or several."""

    def __init__(self, features_NW: Tensor, labels: NDArray[np.int64], path: Path, num_names: int = 0) -> None:
        self.features_NW, self.labels, self.path = features_NW, labels, path
        self.num_images = len(labels)
        self.num_classes = max(num_names, int(labels.max()) + 1)
        self.image_size = (1, features_NW.shape[1])

    def tensors(self, indices: NDArray[np.int64]) -> Tensor:
        return self.features_NW[torch.from_numpy(indices)]

    def read(self, index: int) -> bytes:
        row: NDArray[np.float32] = self.features_NW[index].float().numpy()
        return row.tobytes()

    def name_of(self, index: int) -> str:
        return f"row {index} of {self.path}"

    def describe(self) -> str:
        several = "" if self.labels.ndim == 1 else f", up to {self.labels.shape[1]} labels per row"
        return f"{self.path}: {self.num_images:,} rows of {self.num_classes:,} classes, {self.image_size[1]:,} numbers{several}"


class FeatureFormat(SourceFormat):
    """A .safetensors file of features and labels, or a .npy file of features with its labels next to it."""

    suffix = ", ".join(FEATURE_SUFFIXES)

    @classmethod
    def matches(cls, path: str) -> bool:
        return Path(path).suffix in FEATURE_SUFFIXES and not Path(path).is_dir()

    @property
    def folder(self) -> Path:
        return self.place.parent

    def files(self) -> Iterable[Path]:
        return [file for file in (self.place, *self._labels_file(), self.folder / CLASSES_FILE) if file.is_file()]

    def check(self) -> None:
        for file in (self.place, *self._labels_file()):
            if not file.is_file():
                expected = f"integers (N,) or (N, K), the labels of {self.place}" if file != self.place else "features"
                raise DataError(f"There is no file {file}: expected {expected}.")

    def open(self) -> FeatureSource:
        features, labels = [tensor for file in (self.place, *self._labels_file()) for tensor in _mapped(file)]
        # A part that is held out may lack the last classes.
        return FeatureSource(*checked(features, labels, str(self.place)), self.place, len(self.class_names() or ()))

    def _labels_file(self) -> tuple[Path, ...]:
        return (self.place.with_suffix(".labels.npy"),) if self.place.suffix == ".npy" else ()


def checked(features: Tensor, labels: Tensor, where: str) -> tuple[Tensor, NDArray[np.int64]]:
    """Returns features and labels that fit together; raises a DataError otherwise. where: names them in errors."""
    if features.ndim != 2 or not features.is_floating_point() or not features.numel():
        raise DataError(
            f"The features of {where} have shape {tuple(features.shape)} and {_name_of(features)}: expected a matrix (N, W) "
            f"of floating-point numbers, one row per sample."
        )
    is_integer = not labels.is_floating_point() and not labels.is_complex() and labels.dtype != torch.bool
    if not is_integer or labels.ndim not in (1, 2) or len(labels) != len(features) or not labels.numel():
        raise DataError(
            f"The labels of {where} have shape {tuple(labels.shape)} and {_name_of(labels)}: expected integers of shape "
            f"({len(features)},), or ({len(features)}, K) for several labels per row with -1 after the last one."
        )
    numbers: NDArray[np.int64] = labels.numpy().astype(np.int64)
    by_row = numbers.reshape(len(numbers), -1)
    # -1 is padding, and nothing follows it.
    is_bad = (by_row < -1) | (by_row[:, :1] < 0)
    is_bad[:, 1:] |= (by_row[:, 1:] >= 0) & (by_row[:, :-1] < 0)
    if is_bad.any():
        row = int(is_bad.any(1).argmax())
        raise DataError(
            f"Row {row} of {where} has the labels {by_row[row].tolist()}: each must be 0 or more, at least one per row; -1 "
            f"stands after the last one only."
        )
    require_plausible_labels(by_row.max(axis=1), lambda index: f"Row {index} of {where}")
    return features, numbers


def _name_of(tensor: Tensor) -> str:
    return f"dtype {str(tensor.dtype).removeprefix('torch.')}"


def _mapped(path: Path) -> list[Tensor]:
    """Returns the array of a .npy file, or features and labels of a .safetensors file, as views of the mapped file."""
    from safetensors import SafetensorError, safe_open

    is_array = path.suffix == ".npy"
    try:
        if is_array:
            with warnings.catch_warnings():
                # The mapping is read-only, and nothing writes to it.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                return [torch.from_numpy(np.load(path, mmap_mode="r", allow_pickle=False))]
        with safe_open(path, framework="pt") as file:
            if missing := {"features", "labels"} - set(file.keys()):
                raise ValueError(f"it has no tensor {' and no tensor '.join(sorted(missing))}")
            return [file.get_tensor("features"), file.get_tensor("labels")]
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        expected = "a NumPy array of numbers" if is_array else "tensors `features` (N, W) and `labels`"
        raise DataError(f"Cannot read {path}: {reason}. Expected {expected}.") from error


def write_features(features: Any, labels: Any, folder: Path) -> Path:
    """Writes a matrix and its labels as a file of features, and classes.txt if the labels are names; returns the file."""
    from safetensors.torch import save_file

    names: list[str] = []
    try:
        matrix = torch.as_tensor(features if isinstance(features, Tensor) else np.asarray(features)).detach().cpu()
        numbers = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if numbers.dtype.kind in "US" and numbers.ndim == 1:
            listed, numbers = np.unique(numbers.astype(str), return_inverse=True)
            names = listed.tolist()
        labels_N = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"Cannot read features of {type(features).__name__} and labels of {type(labels).__name__}: {error}. Expected a "
            f"matrix (N, W) of floats, and integers (N,) or (N, K), or names (N,)."
        ) from error
    checked(matrix, labels_N, "fit()")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CLASSES_FILE).unlink(missing_ok=True)
    if names:
        write_text(folder / CLASSES_FILE, "".join(f"{name}\n" for name in names))
    path = folder / "features.safetensors"
    with published_file(path) as unfinished:
        save_file({"features": matrix.contiguous(), "labels": labels_N.contiguous()}, unfinished)
    return path
