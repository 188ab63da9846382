"""Opens a trained model: a run folder, an exported folder, a model file, or a repository of the Hugging Face Hub."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaclass.backbones import BackboneShape, build_backbone, is_built_in, may_be_named_by_file, own_size, recognise
from megaclass.backbones.lora import evaluated_weights
from megaclass.checkpoint.load import load_shared, newest_whole
from megaclass.checkpoint.manifest import read_manifest
from megaclass.errors import CheckpointError
from megaclass.image_size import (
    ImageSize,
    compact_size,
    has_rows,
    height_and_width,
    input_shape,
    shown_size,
    size_from_text,
    size_to_text,
)
from megaclass.inference.loaded_model import ImageTreatment, LoadedModel, OnnxNetwork
from megaclass.inference.thresholds import read_config
from megaclass.insightface.checkpoints import check_fits, load_backbone_, read_backbone
from megaclass_launch.errors import ConfigError
from megaclass_launch.ranks.devices import usable_device

_logger = logging.getLogger("megaclass.inference")
_DEFAULT_IMAGE_SIZE = 112
# Limits of what a file may state; larger numbers indicate damage. Recipes have the same limit for embeddings.
_MAX_EMBEDDING_DIM, _MAX_IMAGE_SIZE, _MAX_FEATURES = 65536, 4096, 1 << 24


def load(path: str | Path, *, device: str | torch.device = "auto", backbone: str | None = None) -> LoadedModel:
    """Opens a run folder, an exported folder, `.safetensors`, InsightFace's `.pth`/`.pt`/`.params`, `.onnx` or `hf://user/name`.

    `hf://user/name@revision` is downloaded from the Hugging Face Hub once and kept in its cache (megaclass[hub]).

    device: "auto" takes the GPU if there is one.
    backbone: `package.module:Class` of your own, if the model is not a built-in one. A file can only name built-in backbones:
    the caller chooses which code is imported and called, never the file.
    """
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = usable_device(device, "megaclass.load")
    # A Path keeps one slash only.
    address = str(path).replace("hf:/", HUB_PREFIX, 1) if isinstance(path, Path) else path
    if address.startswith(HUB_PREFIX):
        return replace(load(pull(address), device=device, backbone=backbone), name=address)
    path = Path(path)
    if path.is_dir():
        exported = _exported_file(path)
        return _load_run(path, device, backbone) if exported is None else _load_file(exported, device, backbone)
    if not path.is_file():
        raise CheckpointError(
            f"There is no model at {path}: expected a run folder, .safetensors, .pth, .onnx or hf://user/name."
        )
    return _load_file(path, device, backbone)


def _exported_file(folder: Path) -> Path | None:
    """Returns the model file of a folder that `megaclass export` wrote; None for other folders."""
    file = read_config(folder).get("file")
    # The name must not lead out of the folder.
    is_here = isinstance(file, str) and Path(file).name == file and (folder / file).is_file()
    return folder / str(file) if is_here else None


def _load_file(path: Path, device: torch.device, backbone: str | None) -> LoadedModel:
    said = read_config(path.parent)
    facts = {key: said[key] for key in ("verification", "classification") if isinstance(said.get(key), dict)}
    return replace(_open_file(path, device, backbone), stated_facts=facts if said.get("file") == path.name else {})


def _open_file(path: Path, device: torch.device, backbone: str | None) -> LoadedModel:
    if path.suffix == ".safetensors":
        state, said = _read_safetensors(path)
        shape = _stated_shape(state, said, path, backbone)
        return _build(path.stem, path, state, shape, device, ImageTreatment.of(said))
    # Pickles are read by a restricted reader that builds tensors and nothing else.
    if path.suffix in (".pth", ".pt", ".params"):
        if backbone is not None:
            raise CheckpointError(
                f"{path} states no embedding size and no image size, so {backbone} cannot be built for it: load your own "
                f"backbones from a run folder or a .safetensors file."
            )
        state = read_backbone(path)
        return _build(path.stem, path, state, recognise(state, str(path)), device)
    if path.suffix == ".onnx":
        return _load_onnx(path, device)
    raise CheckpointError(
        f"Cannot tell what model {path} is: expected a run folder, .safetensors, .pth, .pt, .params or .onnx."
    )


def read_run_state(run: Path) -> tuple[Path, dict[str, Tensor]]:
    """Returns path and weights of a run's backbone: the newest whole checkpoint, otherwise its model.safetensors."""
    folder, passed_over = newest_whole(run / "checkpoints")
    for reason in passed_over:
        _logger.info(f"passed over a checkpoint: {reason}")
    if folder is not None:
        return folder, evaluated_weights(load_shared(folder))
    if (run / "model.safetensors").is_file():
        return run / "model.safetensors", _read_safetensors(run / "model.safetensors")[0]
    raise CheckpointError(
        f"{run} is not a run folder with a model: looked for a whole checkpoint in {run / 'checkpoints'} and for "
        f"model.safetensors."
    )


def _load_run(run: Path, device: torch.device, backbone: str | None) -> LoadedModel:
    path, state = read_run_state(run)
    if path.is_dir():
        settings = read_manifest(path).settings
        shape = _shape_of_run(run, path, state, settings, backbone)
        treatment = ImageTreatment.of(settings.get("data", {}))
    else:
        said = _read_safetensors(path)[1]
        shape, treatment = _stated_shape(state, said, path, backbone), ImageTreatment.of(said)
    return replace(_build(run.name, path, state, shape, device, treatment), run=run)


def _shape_of_run(
    run: Path, path: Path, state: dict[str, Tensor], settings: Mapping[str, Any], backbone: str | None
) -> BackboneShape:
    own = settings.get("backbone", {})
    name = str(own.get("name", ""))
    size = _stated_size(settings.get("data", {}).get("size"))
    if backbone is None and (is_built_in(name) or (not may_be_named_by_file(name) and ":" not in name)):
        return recognise(state, str(path), size)
    # Of timm, or the user's own: its width is in the settings, its input size there or in the metadata of its exported weights.
    exported = run / "model.safetensors"
    said = _read_safetensors(exported)[1] if exported.is_file() else {}
    stated = {"backbone": name, "embedding_dim": str(own.get("embedding_dim")), **said}
    if size := size or own_size(name):
        stated["image_size"] = size_to_text(compact_size(height_and_width(size)))
    return _stated_shape(state, stated, path, backbone)


def _stated_size(given: object) -> ImageSize | None:
    """Returns `data.size` of a run, or None if it is not stated (0) or is damaged."""
    if isinstance(given, int) and given > 0:
        return given
    if isinstance(given, list) and len(given) == 2 and all(isinstance(side, int) for side in given):
        return given[0], given[1]
    return None


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns weights and metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = dict(file.metadata() or {})
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"Cannot read {path} as safetensors: {error}") from error
    return state, said


def _stated_shape(
    state: Mapping[str, Tensor], said: Mapping[str, str], path: Path, backbone: str | None
) -> BackboneShape:
    """Returns the shape stated in a file's metadata; without it, recognises the backbone by the names of its tensors.

    Metadata is not trusted: it may choose among the built-in backbones and nothing else.
    """
    name = backbone or said.get("backbone", "")
    if backbone is None and ":" in name:
        raise CheckpointError(
            f"{path} states that its backbone is {name[:80]!r}, which is not a built-in one. Files never choose the code "
            f"that runs. If you trust this class and have it on the Python path, name it yourself: "
            f"--backbone package.module:Class, or megaclass.load(path, backbone=…)."
        )
    if backbone is None and not may_be_named_by_file(name):
        return recognise(state, str(path))
    try:
        shape = BackboneShape(
            name=name, embedding_dim=int(said["embedding_dim"]), image_size=size_from_text(said["image_size"])
        )
    except (KeyError, ValueError):
        if backbone is None:
            return recognise(state, str(path))
        raise CheckpointError(
            f"{path} does not state embedding_dim and image_size, which {backbone} needs: a run's model.safetensors states "
            f"them in its metadata."
        ) from None
    return shape


def _build(
    name: str,
    path: Path,
    state: dict[str, Tensor],
    shape: BackboneShape,
    device: torch.device,
    treatment: ImageTreatment | None = None,
) -> LoadedModel:
    sides = height_and_width(shape.image_size)
    most = _MAX_FEATURES if has_rows(shape.image_size) else _MAX_IMAGE_SIZE
    if not (1 <= shape.embedding_dim <= _MAX_EMBEDDING_DIM and 0 <= min(sides) <= max(sides) <= most):
        raise CheckpointError(
            f"{path} states embeddings of {shape.embedding_dim} numbers and images of {shown_size(shape.image_size)} pixels: "
            f"at most {_MAX_EMBEDDING_DIM:,} numbers and {most:,} pixels per side are accepted."
        )
    if is_built_in(shape.name):
        # Built without memory first: a size that the weights do not have is refused before it is allocated.
        with torch.device("meta"):
            outline = _built(shape, path)
        check_fits(outline, state, path)
    network = _built(shape, path)
    load_backbone_(network, state, path)
    return LoadedModel(
        name=name,
        path=path,
        network=network.to(device).float().eval(),
        backbone=shape.name,
        image_size=shape.image_size,
        embedding_dim=shape.embedding_dim,
        device=device,
        treatment=treatment or ImageTreatment(),
    )


def _built(shape: BackboneShape, path: Path) -> nn.Module:
    try:
        return build_backbone(shape.name, embedding_dim=shape.embedding_dim, image_size=shape.image_size)
    except ConfigError as error:
        raise CheckpointError(f"Cannot build the backbone of {path}: {error}") from error


def _load_onnx(path: Path, device: torch.device) -> LoadedModel:
    network = OnnxNetwork(path, device)
    image_size = network.image_size or _DEFAULT_IMAGE_SIZE
    return LoadedModel(
        name=path.stem,
        path=path,
        network=network,
        backbone="onnx",
        image_size=image_size,
        embedding_dim=network(torch.zeros(1, *input_shape(image_size))).shape[1],
        device=device,
        treatment=ImageTreatment.of(network.metadata),
    )


HUB_PREFIX = "hf://"
# The model in any of its forms, and what describes it. Nothing else of a repository is fetched, and no code.
_DESCRIPTIONS = ("config.json", "README.md", "centres.safetensors", "classes.txt", "classifier.onnx.data")
_MODELS = ("model.safetensors", "model.onnx", "classifier.onnx", "backbone.pth")


def hub_library(purpose: str) -> Any:
    """Returns the package huggingface_hub, or says how to install it."""
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(f"{purpose} needs huggingface-hub: pip install 'megaclass[hub]'") from None
    return huggingface_hub


def pull(address: str) -> Path:
    """Returns the folder in the Hub's cache that holds the model of `hf://user/name` or `hf://user/name@revision`."""
    repository, _, revision = address.removeprefix(HUB_PREFIX).partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise CheckpointError(f"Cannot read {address!r}: expected hf://user/name or hf://user/name@revision.")
    hub = hub_library(f"Opening {address}")
    try:
        folder = Path(
            hub.snapshot_download(repository, revision=revision or None, allow_patterns=[*_MODELS, *_DESCRIPTIONS])
        )
    # The library and its HTTP client raise many types, without a common base class.
    except Exception as error:
        raise CheckpointError(
            f"Cannot fetch {address} from the Hugging Face Hub: {str(error).strip() or type(error).__name__}"
        ) from error
    if not any((folder / name).is_file() for name in _MODELS):
        raise CheckpointError(
            f"{address} holds no model of Megaclass: expected {', '.join(_MODELS)}. `megaclass push` publishes one."
        )
    return folder
