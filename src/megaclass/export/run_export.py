"""A run -> a folder that others can use: the model in one of three forms, config.json and a model card.

    safetensors   model.safetensors, and centres.safetensors with the class centres by name
    onnx          model.onnx, any batch, as InsightFace's tools expect it
    insightface   backbone.pth, the state dict that InsightFace's arcface_torch loads

Each model is opened again the way a user opens it and must give the embeddings of the checkpoint before the folder appears.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import megaclass
from megaclass.errors import CheckpointError, ExportError
from megaclass.evaluate.protocols.centre_health import read_run_centres
from megaclass.export.centres_file import save_centres
from megaclass.export.check import fixed_inputs, require_same_embeddings
from megaclass.export.model_card import model_card
from megaclass.export.onnx_file import export_onnx
from megaclass.export.safetensors_file import save_model
from megaclass.files import published_folder
from megaclass.image_size import size_to_text
from megaclass.model import LoadedModel, load

_NAMES_OF_INSIGHTFACE = {f"iresnet{depth}": f"r{depth}" for depth in (18, 34, 50, 100, 200, 2060)} | {
    **{name: name for name in ("mbf", "mbf_large", "vit_t", "vit_s", "vit_b", "vit_h")},
    # The only name under which InsightFace builds this size.
    "vit_l": "vit_l_dp005_mask_005",
}


def export_model(path: Path, form: str, out: Path, *, licence: str = "not stated", backbone: str | None = None) -> Path:
    """Exports a run folder, or any model file that `megaclass.load` opens, to the folder `out`.

    backbone: as for `megaclass.load`.
    An earlier export of that form there is replaced; a folder that holds anything else is refused.
    """
    _require_own(out, form)
    model = load(path, backbone=backbone)
    if model.backbone == "onnx":
        raise ExportError(
            f"{path} is an ONNX model: it runs, but has no parameters to export. Export the run it came from."
        )
    config = _config(model, form)
    with published_folder(out.resolve()) as unfinished:
        _WRITE[form](model, unfinished, out, {key: _as_text(config[key]) for key in _STATED if key in config})
        if form == "safetensors" and path.is_dir():
            _write_centres(path, unfinished)
        (unfinished / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        run = path if path.is_dir() else None
        (unfinished / "README.md").write_text(model_card(config, run, licence), encoding="utf-8")
    return out


def _require_own(out: Path, form: str) -> None:
    """Whoever names a folder of their own by mistake keeps what is in it."""
    if not out.is_dir():
        return
    foreign = sorted({file.name for file in out.iterdir()} - {_FILES[form], *_BESIDE})
    if foreign:
        raise ExportError(
            f"{out} holds {foreign[0]}, which is no part of an export to {form}: name another folder with --out."
        )


_FILES = {"onnx": "model.onnx", "safetensors": "model.safetensors", "insightface": "backbone.pth"}
_BESIDE = ("centres.safetensors", "config.json", "README.md")
_STATED = ("format", "version", "backbone", "embedding_dim", "image_size", "fit", "mirror")


def _config(model: LoadedModel, form: str) -> dict[str, Any]:
    return {
        "format": "megaclass",
        "version": megaclass.__version__,
        "name": model.name,
        "file": _FILES[form],
        "backbone": model.backbone,
        "insightface_name": _NAMES_OF_INSIGHTFACE.get(model.backbone),
        "embedding_dim": model.embedding_dim,
        "image_size": model.image_size,
        **({"fit": model.treatment.fit} if model.treatment.fit is not None else {}),
        "mirror": model.treatment.mirror,
        "input": "float32 (batch, 3, height, width), RGB, (x - 127.5) / 127.5",
        "output": "float32 (batch, embedding_dim), not normalised",
    }


def _as_text(value: Any) -> str:
    """As a model file's metadata states it."""
    if isinstance(value, bool):
        return str(value).lower()
    return size_to_text(value) if isinstance(value, tuple) else str(value)


def _write_safetensors(model: LoadedModel, folder: Path, out: Path, stated: dict[str, str]) -> None:
    file = folder / "model.safetensors"
    save_model(file, model.network, metadata=stated)
    _require_same(model, file, out / file.name)


def _write_onnx(model: LoadedModel, folder: Path, out: Path, stated: dict[str, str]) -> None:
    # It runs the file through onnxruntime itself before it lets it appear.
    export_onnx(folder / "model.onnx", model.network, image_size=model.image_size, metadata=stated)


def _write_insightface(model: LoadedModel, folder: Path, out: Path, stated: dict[str, str]) -> None:
    if model.backbone not in _NAMES_OF_INSIGHTFACE:
        raise ExportError(
            f"Not written: {out}. InsightFace has no backbone {model.backbone!r}: its own are "
            f"{', '.join(_NAMES_OF_INSIGHTFACE)}. Export to onnx or safetensors."
        )
    file = folder / "backbone.pth"
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.network.state_dict().items()}
    torch.save(state, file)
    _require_same(model, file, out / file.name)


_WRITE: dict[str, Callable[[LoadedModel, Path, Path, dict[str, str]], None]] = {
    "safetensors": _write_safetensors,
    "onnx": _write_onnx,
    "insightface": _write_insightface,
}


def _require_same(model: LoadedModel, file: Path, shown: Path) -> None:
    """Opens the written file as a user does; `shown` is where it will lie."""
    try:
        own = model.backbone if ":" in model.backbone else None
        network = load(file, backbone=own).network
    except CheckpointError as error:
        raise ExportError(f"Not written: {shown}. What was written cannot be opened: {error}") from error

    def embed(images: torch.Tensor) -> NDArray[np.float64]:
        with torch.no_grad():
            return np.asarray(network(images).double().numpy())

    backbone: nn.Module = copy.deepcopy(model.network).cpu().float().eval()
    require_same_embeddings(shown, embed, backbone, fixed_inputs(model.image_size), f"the file {shown.name}")


def _write_centres(run: Path, folder: Path) -> None:
    """A run whose checkpoints are gone has no centres, and its model is exported without them."""
    try:
        centres = read_run_centres(run).in_memory()
    except CheckpointError:
        return
    save_centres(folder / "centres.safetensors", centres, metadata={"format": "megaclass", "content": "class centres"})
