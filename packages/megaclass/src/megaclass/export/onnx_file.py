"""Writes model.onnx: one file for any batch size, compared with the backbone before it appears.

Input "input": float32 (batch, 3, H, W), RGB, (x - 127.5) / 127.5.
Output "embedding": float32 (batch, D), not normalised. InsightFace's tools expect both like this.
"""

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megaclass.errors import CheckpointError, ExportError
from megaclass.evaluation.centres import ModelCentres
from megaclass.evaluation.protocols.classification import no_centres
from megaclass.evaluation.search import unit_rows_or_zero
from megaclass.export.check import MAX_NORM_DIFFERENCE, Exporter, ExportJob, fixed_inputs, require_same_embeddings
from megaclass.image_size import ImageSize
from megaclass.inference.loaded_model import OnnxNetwork
from megaclass_launch.files import published_file

# A protobuf, and so a model in one file, holds at most 2 GiB.
_MAX_BYTES = 2**31 - 2**20
_FILE = "model.onnx"
_USAGE = """```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("FILE")
{batch}
OUTPUT
```"""


def export_onnx(
    path: Path, backbone: nn.Module, *, image_size: ImageSize, metadata: Mapping[str, str] | None = None
) -> None:
    """Exports a copy of the backbone in eval mode and float32; the backbone itself is not changed.

    onnxruntime must give torch's embeddings on fixed inputs, one image and seven (cosine of at least 0.99999, norm
    within 0.1 %); otherwise an ExportError is raised and no file appears. `metadata` becomes metadata properties of the
    file.
    """
    _require_packages()
    exported = _copied(backbone)
    if (num_bytes := _num_bytes(exported)) > _MAX_BYTES:
        raise ExportError(
            f"Cannot write {path}: {num_bytes / 2**30:.1f} GiB of weights, but a single ONNX file holds at most 2 GiB. "
            f"Export to safetensors instead."
        )
    with published_file(path) as unfinished:
        _write(path, unfinished, exported, image_size, metadata or {})
        _check(path, unfinished, exported, exported, image_size)


def _copied(backbone: nn.Module) -> nn.Module:
    return copy.deepcopy(backbone).cpu().float().eval()


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def _check(path: Path, unfinished: Path, exported: nn.Module, backbone: nn.Module, image_size: ImageSize) -> None:
    """Requires that the first output of the file is the embeddings of the backbone."""
    require_same_embeddings(
        path,
        lambda images: _run_onnx(path, unfinished, exported, images),
        backbone,
        fixed_inputs(image_size),
        "the ONNX model",
    )


def _require_packages() -> None:
    missing = []
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ExportError(f"ONNX export needs {', '.join(missing)}: pip install 'megaclass[onnx]'")


def _write(
    path: Path,
    unfinished: Path,
    exported: nn.Module,
    image_size: ImageSize,
    metadata: Mapping[str, str],
    outputs: Sequence[str] = ("embedding",),
    *,
    is_split: bool = False,
) -> None:
    """is_split: write the weights to a second file, FILE.data."""
    with _silenced_exporter() as chatter:
        try:
            program = torch.onnx.export(
                exported,
                (fixed_inputs(image_size)[:2],),
                dynamo=True,
                input_names=["input"],
                output_names=list(outputs),
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=False,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise ExportError(
                f"Cannot export {type(exported).__name__} to {path}: {error}\n{chatter.getvalue()}".rstrip()
            ) from error
        assert program is not None
        program.model.metadata_props.update(sorted(metadata.items()))
        program.save(unfinished, external_data=is_split)


def _run_onnx(
    path: Path, unfinished: Path, exported: nn.Module, inputs: torch.Tensor, output: int = 0
) -> NDArray[np.float64]:
    try:
        network = OnnxNetwork(unfinished, torch.device("cpu"), output)
        if network.fixed_batch is not None:
            raise ExportError(
                f"Not written: {path}. The ONNX model takes batches of {network.fixed_batch} only, because "
                f"{type(exported).__name__} uses the batch size as a plain number: take it from x.shape[0], not len(x), and "
                f"use -1 or flatten in reshapes."
            )
        return np.asarray(network(inputs).double().numpy())
    except CheckpointError as error:
        raise ExportError(
            f"Not written: {path}. onnxruntime cannot run the ONNX model of {type(exported).__name__} on {len(inputs)} "
            f"image(s): {error}"
        ) from error


@contextlib.contextmanager
def _silenced_exporter() -> Iterator[io.StringIO]:
    """Hides progress lines, deprecation warnings and log lines of torch's exporter; exceptions still pass.

    Yields the hidden text, which belongs into the error if the export fails.
    """
    chatter = io.StringIO()
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield chatter
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _export(job: ExportJob) -> None:
    export_onnx(job.folder / _FILE, job.model.network, image_size=job.model.image_size, metadata=job.metadata)


EXPORTER = Exporter(
    file=_FILE,
    write=_export,
    usage=_USAGE.replace("FILE", _FILE).replace(
        "OUTPUT", 'embedding = session.run(["embedding"], {"input": batch})[0]'
    ),
)


# ---- with the class centres: the closest classes of an image -------------------------------------------------------

_CLASSIFIER_FILE, _NAMES_FILE, _TOP = "classifier.onnx", "classes.txt", 5
_CLASSIFIER_OUTPUT = """classes, cosines = session.run(["class", "cosine"], {"input": batch})
names = open("classes.txt", encoding="utf-8").read().splitlines()
print([names[number] for number in classes[0]], cosines[0])"""


class _Classifier(nn.Module):
    """A backbone followed by the comparison with all class centres."""

    centres_DR: torch.Tensor

    def __init__(self, backbone: nn.Module, centres: ModelCentres) -> None:
        super().__init__()
        self.backbone, self.rows_per_class = backbone, centres.rows_per_class
        self.num_named = min(_TOP, centres.num_classes)
        self.is_cosine, rows_RD = centres.is_cosine, centres.all_rows()
        self.register_buffer("centres_DR", (unit_rows_or_zero(rows_RD) if self.is_cosine else rows_RD).T.contiguous())

    def forward(self, images_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embeddings_BD = self.backbone(images_B)
        if self.is_cosine:
            cosines_BC = nn.functional.normalize(embeddings_BD) @ self.centres_DR
        else:
            # The last row is a bias if there is one more than an embedding has numbers.
            missing = self.centres_DR.shape[0] - embeddings_BD.shape[1]
            cosines_BC = nn.functional.pad(embeddings_BD, (0, missing), value=1.0) @ self.centres_DR
        if self.rows_per_class > 1:
            cosines_BC = cosines_BC.unflatten(1, (-1, self.rows_per_class)).amax(dim=2)
        cosines_Bk, classes_Bk = cosines_BC.topk(self.num_named, dim=1)
        return embeddings_BD, classes_Bk, cosines_Bk


def _export_classifier(job: ExportJob) -> None:
    """Writes the backbone with the centres; the embedding is the first output, so the file also opens as a model."""
    _require_packages()
    shown = job.out / _CLASSIFIER_FILE
    if job.centres is None:
        raise ExportError(f"Not written: {shown}. {no_centres(job.model.name)}")
    backbone, image_size = _copied(job.model.network), job.model.image_size
    whole = _Classifier(backbone, job.centres).eval()
    path, inputs = job.folder / _CLASSIFIER_FILE, fixed_inputs(image_size)
    outputs, is_split = ("embedding", "class", "cosine"), _num_bytes(whole) > _MAX_BYTES
    _write(shown, path, whole, image_size, job.metadata, outputs, is_split=is_split)
    _check(shown, path, whole, backbone, image_size)
    with torch.no_grad():
        want_Bk = whole(inputs)[2].double().numpy()
    error = float((np.abs(_run_onnx(shown, path, whole, inputs, 2) - want_Bk) / np.maximum(1, np.abs(want_Bk))).max())
    if not error < MAX_NORM_DIFFERENCE:
        raise ExportError(f"Not written: {shown}. The cosines of the ONNX model are off by {error:.1e}.")
    (job.folder / _NAMES_FILE).write_bytes(b"".join(name + b"\n" for name in job.centres.classes.names()))


CLASSIFIER = Exporter(
    file=_CLASSIFIER_FILE,
    write=_export_classifier,
    usage=_USAGE.replace("FILE", _CLASSIFIER_FILE).replace("OUTPUT", _CLASSIFIER_OUTPUT),
    extra_files=(_NAMES_FILE, f"{_CLASSIFIER_FILE}.data"),
)
