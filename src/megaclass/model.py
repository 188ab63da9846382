"""The public inference API: loads a run folder, model.safetensors, InsightFace's .pth or ONNX, and embeds images.

import megaclass
model = megaclass.load("runs/demo")
embeddings = model.embed(["anna.jpg", "anna-again.jpg", "bert.jpg"])
print(embeddings @ embeddings.T)
"""

import hashlib
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from megaclass.backbones import BACKBONES, build_backbone
from megaclass.backbones.recognise import BackboneShape, recognise
from megaclass.checkpoint.load import load_shared, newest_whole
from megaclass.checkpoint.manifest import read_manifest
from megaclass.checkpoint.tensor_file import tensors_with_prefix
from megaclass.data.decode import Fit
from megaclass.distributed.devices import usable_device
from megaclass.errors import CheckpointError, ConfigError, DataError
from megaclass.evaluate.embed import embed_part
from megaclass.evaluate.images import GivenImages
from megaclass.evaluate.onnx_network import OnnxNetwork
from megaclass.image_size import ImageSize, height_and_width, shown_size, size_from_text
from megaclass.insightface.checkpoints import check_fits, load_backbone_, read_backbone

_logger = logging.getLogger("megaclass.model")
ImageInput = str | Path | Image.Image | NDArray[np.uint8] | Tensor
"""One image for embed(), or a batch of images in one array or tensor."""
_DEFAULT_IMAGE_SIZE = 112
# Limits of what a file may state; larger numbers indicate damage. Recipes have the same limit for embeddings.
_MAX_EMBEDDING_DIM, _MAX_IMAGE_SIZE = 65536, 4096


@dataclass(frozen=True, kw_only=True)
class ImageTreatment:
    """How images are prepared for a model: as in its training."""

    fit: Fit | None = None
    """How images of another size are fitted; None if the model does not state it."""
    mirror: bool = True
    """Add the embedding of the mirrored image; false if training did not mirror."""

    @classmethod
    def of(cls, said: Mapping[str, object]) -> "ImageTreatment":
        """Reads the `data` settings of a run, or the metadata of a model file; ignores missing or invalid values."""
        fits: dict[object, Fit] = {"pad": "pad", "crop": "crop", "squash": "squash"}
        fit = said.get("fit")
        return cls(
            fit=fits.get(fit) if isinstance(fit, str) else None, mirror=said.get("mirror") not in (False, "false")
        )

    def chosen(self, fit: Fit | None, mirror: bool | None, *, resize: bool) -> tuple[Fit | None, bool]:
        """Returns the user's choices; where they are None, those of the model."""
        return fit or self.fit or ("squash" if resize else None), self.mirror if mirror is None else mirror


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A network in eval mode, with its name, sizes and device."""

    name: str
    """Name in tables and reports."""
    path: Path
    """The file that was read, or the checkpoint of a run folder."""
    network: nn.Module
    """(B, 3, H, W) in [-1, 1] -> (B, D), not normalised."""
    backbone: str
    image_size: ImageSize
    embedding_dim: int
    device: torch.device
    treatment: ImageTreatment = field(default_factory=lambda: ImageTreatment())
    """How training prepared images."""

    def __call__(self, images_B3HW: Tensor) -> Tensor:
        """Returns (B, D), not normalised, of (B, 3, H, W) images in [-1, 1]; gradients as torch's mode says."""
        height, width = height_and_width(self.image_size)
        is_input = images_B3HW.ndim == 4 and images_B3HW.shape[1:] == (3, height, width)
        if not is_input or not images_B3HW.is_floating_point():
            raise DataError(
                f"{self.name} was called with a tensor of shape {tuple(images_B3HW.shape)} and {images_B3HW.dtype}: it takes "
                f"(B, 3, {height}, {width}) of a floating dtype with values in [-1, 1]. Files, Pillow images and bytes go to "
                f"embed()."
            )
        dtype = next((weight.dtype for weight in self.network.parameters()), torch.float32)
        embeddings: Tensor = self.network(images_B3HW.to(self.device, dtype))
        return embeddings

    def embed(
        self,
        images: ImageInput | Sequence[ImageInput],
        *,
        resize: bool = False,
        fit: Fit | None = None,
        mirror: bool | None = None,
        batch_size: int = 64,
    ) -> NDArray[np.float32]:
        """Returns (N, D): f(x) + f(mirrored x) of each image, normalised; the product of two rows is their cosine.

        images: one image or a list of them: paths of files, Pillow images, RGB bytes as arrays (H, W, 3) or tensors
        (3, H, W); or a batch in one array (N, H, W, 3) or tensor (N, 3, H, W). A floating tensor is taken as the network's
        input: (N, 3, H, W) with values in [-1, 1]. One image gives one row.
        Images of another size are fitted as `fit` says, otherwise as in training if the model states it, otherwise refused
        unless `resize` allows to stretch them. mirror: False gives f(x); None mirrors as in training.
        """
        fit, mirror = self.treatment.chosen(fit, mirror, resize=resize)
        given = _listed(images)
        if not given:
            return np.empty((0, self.embedding_dim), dtype=np.float32)
        if all(isinstance(image, Tensor) and image.is_floating_point() for image in given):
            return self._embed_inputs(torch.stack(given), mirror, batch_size)
        source = GivenImages(images=given, image_size=self.image_size, fit=fit)
        rows = embed_part(
            self.network, source, range(len(given)), device=self.device, batch_size=batch_size, mirror=mirror
        )
        return nn.functional.normalize(rows[:, :-1]).cpu().numpy()

    @torch.no_grad()
    def _embed_inputs(self, images_N3HW: Tensor, mirror: bool, batch_size: int) -> NDArray[np.float32]:
        """Embeds what is the network's input already."""
        low, high = (float(value) for value in images_N3HW.aminmax())
        if not (low >= -1.01 and high <= 1.01):
            raise DataError(
                f"Cannot embed a floating tensor with values from {low:g} to {high:g}: they must lie in [-1, 1], as "
                f"(bytes / 127.5 - 1) gives; tensors of bytes (uint8) are taken as they are."
            )
        if low >= 0 and high > 0:
            _logger.warning(
                f"embed() was given a floating tensor with values from {low:.3g} to {high:.3g}, none of them below 0: the "
                f"network expects [-1, 1]. Images in [0, 1] are 2 * x - 1."
            )
        parts = [self(part) + self(part.flip(3)) if mirror else self(part) for part in images_N3HW.split(batch_size)]
        return nn.functional.normalize(torch.cat(parts).float()).cpu().numpy()

    def fingerprint(self) -> str:
        """Returns a digest of the weights, by which resumed embeddings and stored results are recognised."""
        if isinstance(self.network, OnnxNetwork):
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        return weights_fingerprint(self.network)


def _listed(images: object) -> list[Any]:
    """Returns the images one by one: of a list, of a batch in one array or tensor, or the only one."""
    if isinstance(images, str | Path | Image.Image) or (isinstance(images, np.ndarray | Tensor) and images.ndim <= 3):
        return [images]
    if isinstance(images, Iterable):
        return list(images)
    raise DataError(
        f"Cannot embed an object of {type(images).__name__}: expected the path of an image, a Pillow image, an array, a "
        f"tensor, or a list of these."
    )


def weights_fingerprint(network: nn.Module) -> str:
    """Returns a digest of the weights, independent of their device and memory layout."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load(path: str | Path, *, device: str | torch.device = "cpu", backbone: str | None = None) -> LoadedModel:
    """Loads a run folder, `.safetensors`, InsightFace's `.pth`/`.pt`/`.params` or `.onnx`, recognised by its suffix.

    backbone: `package.module:Class` of your own, if the model is not a built-in one. A file can only name built-in
    backbones: the caller chooses which code is imported and called, never the file.
    """
    path, device = Path(path), usable_device(device, "megaclass.load")
    if path.is_dir():
        return _load_run(path, device, backbone)
    if not path.is_file():
        raise CheckpointError(f"There is no model at {path}: expected a run folder, .safetensors, .pth or .onnx.")
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
        shared = load_shared(folder)
        # If training kept a moving average of the weights, it evaluated and exported that.
        return folder, tensors_with_prefix(shared, "backbone.") | tensors_with_prefix(shared, "ema.")
    if (run / "model.safetensors").is_file():
        return run / "model.safetensors", _read_safetensors(run / "model.safetensors")[0]
    raise CheckpointError(
        f"{run} is not a run folder with a model: looked for a whole checkpoint in {run / 'checkpoints'} and for "
        f"model.safetensors."
    )


def _load_run(run: Path, device: torch.device, backbone: str | None) -> LoadedModel:
    path, state = read_run_state(run)
    if not path.is_dir():
        said = _read_safetensors(path)[1]
        return _build(
            run.name, path, state, _stated_shape(state, said, path, backbone), device, ImageTreatment.of(said)
        )
    settings = _settings_of(path)
    shape = _shape_of_run(run, path, state, settings, backbone)
    return _build(run.name, path, state, shape, device, ImageTreatment.of(_section(settings, "data")))


def _shape_of_run(
    run: Path, path: Path, state: dict[str, Tensor], settings: Mapping[str, Any], backbone: str | None
) -> BackboneShape:
    own = _section(settings, "backbone")
    name = str(own.get("name", ""))
    if backbone is None and ":" not in name:
        return recognise(state, str(path), _stated_size(_section(settings, "data").get("size")))
    # The user's own backbone: its width is in the settings, its input size in the metadata of its exported weights.
    exported = run / "model.safetensors"
    said = _read_safetensors(exported)[1] if exported.is_file() else {}
    stated = {"backbone": name, "embedding_dim": str(own.get("embedding_dim")), **said}
    return _stated_shape(state, stated, path, backbone)


def _settings_of(checkpoint: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_manifest(checkpoint).config)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The settings in {checkpoint} cannot be read: {error}.") from error


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name, {})
    return section if isinstance(section, dict) else {}


def _stated_size(given: object) -> ImageSize | None:
    """Returns `data.size` of a run, or None where it is not stated (0) or is damaged."""
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
    if backbone is None and name not in BACKBONES:
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
    if not (1 <= shape.embedding_dim <= _MAX_EMBEDDING_DIM and 1 <= min(sides) <= max(sides) <= _MAX_IMAGE_SIZE):
        raise CheckpointError(
            f"{path} states embeddings of {shape.embedding_dim} numbers and images of {shown_size(shape.image_size)} pixels: "
            f"at most {_MAX_EMBEDDING_DIM:,} numbers and {_MAX_IMAGE_SIZE:,} pixels per side are accepted."
        )
    if ":" not in shape.name:
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
        embedding_dim=network(torch.zeros(1, 3, *height_and_width(image_size))).shape[1],
        device=device,
        treatment=ImageTreatment.of(network.metadata),
    )
