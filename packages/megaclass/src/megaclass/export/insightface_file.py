"""Writes what InsightFace loads: backbone.pth for arcface_torch, or a model pack for insightface.app.FaceAnalysis.

FaceAnalysis takes every .onnx file of a pack's folder, tells by its inputs and outputs what it does, and insists on a face
detector. It aligns faces to squares whose side is a multiple of 112 or 128.
"""

import shutil

import torch

from megaclass.data.face_detector import FaceDetector
from megaclass.errors import DataError, ExportError
from megaclass.export.check import Exporter, ExportJob, require_same_when_opened
from megaclass.export.onnx_file import export_onnx
from megaclass.image_size import height_and_width, shown_size
from megaclass.insightface.names import INSIGHTFACE_NAMES

_FILE, _PACK_FILE, _DETECTOR_FILE = "backbone.pth", "recognition.onnx", "detector.onnx"
_USAGE = """```python
import torch
from backbones import get_model  # of InsightFace's arcface_torch

backbone = get_model("{insightface_name}", num_features={embedding_dim})
backbone.load_state_dict(torch.load("backbone.pth", weights_only=True))
backbone.eval()
```"""
_PACK_USAGE = """```python
import cv2
from insightface.app import FaceAnalysis

faces = FaceAnalysis(name="/path/of/this/folder", allowed_modules=["detection", "recognition"])
faces.prepare(ctx_id=0, det_size=(640, 640))
for face in faces.get(cv2.imread("photo.jpg")):
    print(face.bbox, face.normed_embedding)
```

Releases of InsightFace before 1.0 take a name: put this folder into `~/.insightface/models`. The face detector
`detector.onnx` was added as it is, and has a licence of its own."""


def _write(job: ExportJob) -> None:
    if job.model.backbone not in INSIGHTFACE_NAMES:
        raise ExportError(
            f"Not written: {job.out}. InsightFace has no backbone {job.model.backbone!r}; it has "
            f"{', '.join(INSIGHTFACE_NAMES)}. Export to onnx or safetensors instead."
        )
    state = job.model.network.state_dict()
    torch.save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}, job.folder / _FILE)
    require_same_when_opened(job, _FILE)


def _write_pack(job: ExportJob) -> None:
    """Writes the network as ONNX, and the detector that was given next to it."""
    assert job.detector is not None
    height, width = height_and_width(job.model.image_size)
    if height != width or (height % 112 and height % 128):
        raise ExportError(
            f"Not written: {job.out}. FaceAnalysis aligns faces to squares whose side is a multiple of 112 or 128, but "
            f"{job.model.name} takes {shown_size(job.model.image_size)}. Export to onnx instead."
        )
    try:
        layout = FaceDetector(job.detector).layout
    except DataError as error:
        raise ExportError(f"Not written: {job.out}. {error}") from error
    if layout != "SCRFD":
        raise ExportError(
            f"Not written: {job.out}. FaceAnalysis loads detectors in the layout of SCRFD, but {job.detector} has that of "
            f"{layout}: give one such as det_10g.onnx or det_500m.onnx of InsightFace's packs."
        )
    export_onnx(job.folder / _PACK_FILE, job.model.network, image_size=job.model.image_size, metadata=job.metadata)
    shutil.copyfile(job.detector, job.folder / _DETECTOR_FILE)


EXPORTER = Exporter(file=_FILE, write=_write, usage=_USAGE, extra_files=(_PACK_FILE, _DETECTOR_FILE))
PACK = Exporter(file=_PACK_FILE, write=_write_pack, usage=_PACK_USAGE, extra_files=(_FILE, _DETECTOR_FILE))
