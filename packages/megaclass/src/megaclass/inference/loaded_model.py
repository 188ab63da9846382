"""A trained model: embeds, classifies, compares, verifies and searches images.

Its methods may be called from several threads at once: the network is in eval mode, and a call keeps what it needs to itself.
"""

import functools
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.decode import Fit
from megaclass.data.sources.open_source import open_source
from megaclass.errors import CheckpointError, DataError
from megaclass.evaluation.centres import CENTRES_FILE, ClassShard, ModelCentres, read_exported_centres, read_run_centres
from megaclass.evaluation.embed import OnBad, embed_part
from megaclass.evaluation.images import GivenImages, Images, Samples
from megaclass.evaluation.protocols.classification import no_centres
from megaclass.evaluation.results import NUMBERS_FILE, read_results, weights_in
from megaclass.image_size import ImageSize, compact_size, has_rows, height_and_width, input_shape, shown_size
from megaclass.inference.classes import Classification, classify, facts_of_results
from megaclass.inference.image_index import Comparable, ImageIndex, ImageInput, index_of, listed_images
from megaclass.inference.thresholds import Comparison, Threshold, choose_threshold, points_of_results


class OnnxNetwork(nn.Module):
    """A network without parameters. It runs on the GPU if onnxruntime was built for it, otherwise on the CPU."""

    def __init__(self, path: Path, device: torch.device, output: int = 0) -> None:
        """output: number of the output that `forward` returns."""
        super().__init__()
        try:
            import onnxruntime
        except ImportError:
            raise CheckpointError(f"Opening {path} needs onnxruntime: pip install 'megaclass[onnx]'") from None

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        options.intra_op_num_threads = torch.get_num_threads()
        wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
        providers = [
            name for name in [*wanted, "CPUExecutionProvider"] if name in onnxruntime.get_available_providers()
        ]
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
            inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
            shapes = [(one.name, [*one.shape]) for one in inputs]
            self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        # Damaged files raise exceptions of onnxruntime, which have no common base class, and Python's own, for names that are
        # not UTF-8 or numbers that are too large.
        except Exception as error:
            raise CheckpointError(f"Cannot open {path} as an ONNX model: {error}") from error
        sizes = shapes[0][1] if len(shapes) == 1 else []
        has_features = len(sizes) == 2 and isinstance(sizes[1], int)
        if not outputs or not (has_features or (len(sizes) == 4 and sizes[1] == 3)):
            shown = ", ".join(f"{name} {shape}" for name, shape in shapes) or "nothing"
            raise CheckpointError(
                f"{path} takes {shown} and has {len(outputs)} output(s): expected one input of shape (batch, 3, height, "
                f"width), or (batch, features), and an output of shape (batch, embedding size)."
            )
        self._path, self._input, self._output = path, inputs[0].name, outputs[output].name
        batch, (height, width) = sizes[0], (1, sizes[1]) if has_features else sizes[2:]
        is_fixed = isinstance(height, int) and isinstance(width, int)
        self.image_size: ImageSize | None = compact_size((height, width)) if is_fixed else None
        # Some published files have a fixed batch size, mostly 1.
        self.fixed_batch: int | None = batch if isinstance(batch, int) and batch > 0 else None

    def forward(self, images_B: Tensor) -> Tensor:
        parts = images_B.split(self.fixed_batch) if self.fixed_batch else [images_B]
        try:
            rows = [self._session.run([self._output], {self._input: part.cpu().numpy()})[0] for part in parts]
            embeddings_BD = torch.cat([torch.from_numpy(row) for row in rows]).to(images_B.device)
        # As above; a file that opens may still hold operations, shapes or output types that do not fit.
        except Exception as error:
            raise CheckpointError(
                f"{self._path} cannot embed images of shape {tuple(images_B.shape)}: {error}"
            ) from error
        if embeddings_BD.ndim != 2 or len(embeddings_BD) != len(images_B) or not embeddings_BD.is_floating_point():
            raise CheckpointError(
                f"{self._path} gives {embeddings_BD.dtype} of shape {tuple(embeddings_BD.shape)} for {len(images_B)} images: "
                f"expected floating-point numbers of shape (batch, embedding size)."
            )
        return embeddings_BD


_logger = logging.getLogger("megaclass.inference")
# Large enough to fill the device, and small enough for the memory of a small card with a large backbone.
_BATCH_SIZE = {"cpu": 64, "cuda": 256}


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
        """Returns the user's choices; if they are None, those of the model."""
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
    run: Path | None = None
    """Folder of the run, whose evaluation has the thresholds; None for a model file."""
    stated_facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """See `facts`; as config.json of an exported model states them."""

    def __repr__(self) -> str:
        size = f"{'samples' if has_rows(self.image_size) else 'images'} of {shown_size(self.image_size)}"
        return f"LoadedModel({self.name}: {self.backbone}, {size}, {self.embedding_dim} numbers, on {self.device})"

    def __call__(self, images_B3HW: Tensor) -> Tensor:
        """Returns (B, D), not normalised, of (B, 3, H, W) images in [-1, 1]; gradients as torch's mode says."""
        expected = input_shape(self.image_size)
        is_tensor = isinstance(images_B3HW, Tensor)
        is_input = is_tensor and images_B3HW.ndim > 1 and images_B3HW.shape[1:] == expected
        if not is_input or not images_B3HW.is_floating_point():
            shape = f"a tensor of shape {tuple(images_B3HW.shape)} and {images_B3HW.dtype}" if is_tensor else ""
            values = "" if has_rows(self.image_size) else " with values in [-1, 1]"
            raise DataError(
                f"{self.name} was called with {shape or f'an object of {type(images_B3HW).__name__}'}: it takes a tensor "
                f"(B, {', '.join(map(str, expected))}) of a floating dtype{values}. Files, Pillow images, bytes and sequences "
                f"go to embed()."
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
        batch_size: int | None = None,
        normalise: bool = True,
    ) -> NDArray[np.float32]:
        """Returns (N, D): f(x) + f(mirrored x) of each image, normalised; the product of two rows is their cosine.

        Images of another size are fitted as `fit` says, otherwise as in training if the model states it, otherwise refused
        unless `resize` allows to stretch them.

        A model of features takes a matrix (N, W) or one row (W,), a model of sequences a list of tensors or arrays.

        images: one image or a list of them: paths of files, the content of files (bytes or open files), Pillow images,
        RGB bytes as arrays (H, W, 3) or tensors (3, H, W); or a batch in one array (N, H, W, 3) or tensor (N, 3, H, W);
        or a folder, whose images are taken in the order of their paths. A floating tensor is taken as the network's
        input: (N, 3, H, W) with values in [-1, 1]. One image gives one row.
        mirror: False gives f(x); None mirrors as in training.
        batch_size: images per batch; None chooses it by the device.
        normalise: False leaves the rows as they are, for inner products.
        """
        if has_rows(self.image_size):
            samples = Samples.given(images, self.image_size)
            return self.embed_source(samples, mirror=False, batch_size=batch_size, normalise=normalise)
        fit, mirror = self.treatment.chosen(fit, mirror, resize=resize)
        given = listed_images(images)
        if not given:
            return np.empty((0, self.embedding_dim), dtype=np.float32)
        if all(isinstance(image, Tensor) and image.is_floating_point() for image in given):
            return self._embed_inputs(torch.stack(given), mirror, batch_size or self.batch_size, normalise)
        source = GivenImages(images=given, image_size=self.image_size, fit=fit)
        return self.embed_source(source, mirror=mirror, batch_size=batch_size, normalise=normalise)

    def embed_source(
        self,
        source: Images,
        *,
        mirror: bool,
        batch_size: int | None = None,
        on_bad: OnBad | None = None,
        normalise: bool = True,
    ) -> NDArray[np.float32]:
        """Returns (N, D), normalised unless told otherwise.

        on_bad: is told of an image that cannot be read, whose row is NaN.
        """
        rows = embed_part(
            self.network,
            source,
            range(len(source)),
            device=self.device,
            batch_size=batch_size or self.batch_size,
            num_threads=min(4, os.cpu_count() or 1),
            mirror=mirror,
            on_bad=on_bad,
        )
        rows_ND = rows[:, :-1]
        return (nn.functional.normalize(rows_ND) if normalise else rows_ND).cpu().numpy()

    @property
    def batch_size(self) -> int:
        """Images per batch if the caller gives none."""
        size = _BATCH_SIZE.get(self.device.type, _BATCH_SIZE["cpu"])
        # Rows of features are small, and so are the networks behind them.
        return 64 * size if height_and_width(self.image_size)[0] == 1 else size

    def similarity(self, first: Comparable, second: Comparable | None = None, **embedding: Any) -> NDArray[np.float32]:
        """Returns the cosines (N, M) of N images with M others; without others, of the images with each other.

        Each side is anything that `embed` takes, or embeddings: floating numbers of shape (N, D) or (D,).

        embedding: further arguments of `embed`.
        """
        rows_ND = self.rows(first, **embedding)
        cosines: NDArray[np.float32] = rows_ND @ (rows_ND if second is None else self.rows(second, **embedding)).T
        return cosines

    def verify(
        self,
        first: Comparable,
        second: Comparable,
        *,
        far: float | None = None,
        threshold: float | None = None,
        evaluation_set: str | None = None,
        **embedding: Any,
    ) -> Comparison:
        """Tells whether two images show the same identity: their cosine lies above a threshold.

        A model without an evaluation has no threshold, which is an error.

        far: the highest allowed false accept rate, such as 1e-3; None takes the threshold with the highest accuracy.
        threshold: a cosine of your own instead.
        evaluation_set: the set whose thresholds are used; None takes the one with the most different pairs.
        embedding: further arguments of `embed`.
        """
        rows_ND, rows_MD = self.rows(first, **embedding), self.rows(second, **embedding)
        if len(rows_ND) != 1 or len(rows_MD) != 1:
            raise DataError(
                f"verify() compares one image with one other, but was given {len(rows_ND)} and {len(rows_MD)}: "
                f"similarity() compares many."
            )
        if threshold is None:
            chosen = self.threshold(far=far, evaluation_set=evaluation_set)
        else:
            chosen = Threshold(similarity=float(threshold), far=None, evaluated_on="")
        cosine = float(rows_ND[0] @ rows_MD[0])
        return Comparison(is_same=cosine > chosen.similarity, similarity=cosine, threshold=chosen)

    def threshold(self, *, far: float | None = None, evaluation_set: str | None = None) -> Threshold:
        """Returns the threshold that `verify` uses, with the false accept rate that was measured for it."""
        return choose_threshold(self.known_thresholds, far=far, evaluation_set=evaluation_set, model=self.name)

    def index(
        self,
        gallery: ImageInput | Sequence[ImageInput],
        *,
        resize: bool = False,
        fit: Fit | None = None,
    ) -> ImageIndex:
        """Embeds a gallery to search in: a folder, a list of images, or an .npy file of `megaclass embed`.

        Images that cannot be read are left out and logged.
        """
        fit, mirror = self.treatment.chosen(fit, None, resize=resize)
        return index_of(self, gallery, fit=fit, mirror=mirror)

    @functools.cached_property
    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """Results of an evaluation of these weights, from the run or from config.json of an exported model.

        verification: thresholds and their rates by evaluation set. classification: temperature and rejection.
        """
        if self.run is None or not (self.run / NUMBERS_FILE).is_file():
            return self.stated_facts
        if weights_in(self.run) != self.fingerprint():
            _logger.warning(
                f"The evaluation in {self.run} is of other weights: it gives no thresholds. Evaluate again."
            )
            return {}
        results = read_results(self.run)
        return {"verification": points_of_results(results), "classification": facts_of_results(results)}

    @property
    def known_thresholds(self) -> Mapping[str, Any]:
        """Thresholds and their rates by evaluation set."""
        return self.facts.get("verification", {})

    @property
    def has_centres(self) -> bool:
        """False for a model that cannot classify: a backbone without the class centres of its training."""
        return self.path.is_dir() or (self.path.parent / CENTRES_FILE).is_file()

    @functools.cached_property
    def centres(self) -> ModelCentres:
        """The class centres: of the run's checkpoint, or of the centres.safetensors next to an exported model."""
        if not self.has_centres:
            raise DataError(no_centres(self.name))
        if self.run is not None and self.path.is_dir():
            found = read_run_centres(self.run)
        else:
            found = read_exported_centres(self.path.parent / CENTRES_FILE)
        width = found.rows(0, 1).shape[1]
        if width != self.embedding_dim and (found.is_cosine or width != self.embedding_dim + 1):
            raise DataError(
                f"The class centres of {self.name} have {width} numbers, but the model gives {self.embedding_dim}: they are "
                f"of another model."
            )
        return found

    @functools.cached_property
    def all_classes(self) -> ClassShard:
        """The centres of all classes, on the device of the model."""
        rows_RD = self.centres.all_rows().to(self.device)
        centres = self.centres
        return ClassShard.of(rows_RD, 0, centres.classes, centres.num_classes, is_cosine=centres.is_cosine)

    @functools.cached_property
    def class_names(self) -> list[str]:
        """The names of the classes in order; numbers if training knew no names."""
        return self.centres.names()

    def classify(
        self,
        images: Comparable,
        top: int = 5,
        *,
        reject: float | None = None,
        **embedding: Any,
    ) -> list[Classification]:
        """Returns the closest classes of each image, with their cosines (or inner products) and probabilities.

        Probabilities and rejection come from the model's evaluation on labelled images (`megaclass evaluate --classify`).

        images: anything that `embed` takes, or embeddings.
        top: number of classes per image.
        reject: the share of images of unknown classes that may be accepted, such as 0.01; an image is unknown if even the
            closest class is too far for that. None accepts every image.
        embedding: further arguments of `embed`.
        """
        if not self.centres.is_cosine:
            embedding |= {"mirror": False, "normalise": False}
        return classify(self, self.rows(images, **embedding), top=top, reject=reject)

    def class_shard(self, training_data: str | None = None) -> ClassShard:
        """Returns the centres of this rank's classes.

        training_data: the path of the data, for the number of images of each class.
        """
        shard = self.centres.shard()
        if training_data is None:
            return shard
        source = open_source(training_data)
        if source.num_classes != self.centres.num_classes:
            raise DataError(
                f"{training_data} has {source.num_classes:,} classes, but {self.name} was trained on "
                f"{self.centres.num_classes:,}: it is not its training data."
            )
        labels = source.labels[source.labels >= 0]
        return replace(shard, num_images_C=np.bincount(labels, minlength=source.num_classes))

    def rows(self, given: Comparable, *, normalise: bool = True, **embedding: Any) -> NDArray[np.float32]:
        """Returns rows of images, or of embeddings that the caller has already; normalised unless told otherwise."""
        array = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
        # A model of features takes numbers itself, so they are not embeddings.
        takes_numbers = has_rows(self.image_size)
        if not takes_numbers and isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.ndim <= 2:
            return self.checked_rows(array, normalise=normalise)
        return self.embed(cast(ImageInput, given), normalise=normalise, **embedding)

    def checked_rows(self, array: NDArray[Any], *, normalise: bool = True) -> NDArray[np.float32]:
        """Returns embeddings that the caller has already; normalised unless told otherwise."""
        rows_ND = np.atleast_2d(np.asarray(array, dtype=np.float32))
        norms_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
        if rows_ND.shape[1] != self.embedding_dim or not (np.isfinite(norms_N1) & (norms_N1 > 0)).all():
            raise DataError(
                f"Cannot compare embeddings of shape {rows_ND.shape}: {self.name} gives {self.embedding_dim} finite numbers "
                f"per image, not all of them 0."
            )
        scaled: NDArray[np.float32] = rows_ND / norms_N1 if normalise else rows_ND
        return scaled

    @torch.no_grad()
    def _embed_inputs(self, images_N3HW: Tensor, mirror: bool, batch_size: int, normalise: bool) -> NDArray[np.float32]:
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
        rows_ND = torch.cat(parts).float()
        return (nn.functional.normalize(rows_ND) if normalise else rows_ND).cpu().numpy()

    def fingerprint(self) -> str:
        """Returns a digest of the weights, by which resumed embeddings and stored results are recognised."""
        if isinstance(self.network, OnnxNetwork):
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        return weights_fingerprint(self.network)


def weights_fingerprint(network: nn.Module) -> str:
    """Returns a digest of the weights, independent of their device and memory layout."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
