"""Finds faces and their five landmarks with an ONNX detector of the user, in the layout of SCRFD or of RetinaFace.

Both predict boxes and landmarks at every cell of grids with strides of 8, 16, 32 (and 64, 128) pixels:

    SCRFD        InsightFace's packs (det_10g.onnx): per stride scores (N, 1), distances to the four sides (N, 4) and
                 landmarks (N, 10), in strides; 2 anchors per cell, or 1 with five strides. Input RGB, (x - 127.5) / 128.
    RetinaFace   Pytorch_Retinaface: boxes (1, N, 4), scores (1, N, 2) and landmarks (1, N, 10) relative to prior boxes of
                 two sizes per cell, for all strides together. Input BGR, x minus the mean of ImageNet.

The shapes of the outputs for an empty image tell the layout, so neither names nor their order matter.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megaclass.errors import DataError

Floats = NDArray[np.float64]
_BGR_MEAN = np.array([104.0, 117.0, 123.0], dtype=np.float32)
# Of a detector that takes any size: the small one finds faces that fill the photo, as InsightFace does it.
_SIDES = (640, 128)
_MIN_OVERLAP = 0.4
_PRIOR_SIDES = {8: (16, 32), 16: (64, 128), 32: (256, 512)}
_EXPECTED = (
    "expected SCRFD with landmarks (9 or 15 outputs: scores, boxes and landmarks per stride), or RetinaFace (3 outputs: boxes, "
    "scores and landmarks)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectedFace:
    """A face in the pixels of its photo."""

    score: float
    box_4: Floats
    """Left, top, right, bottom."""
    points_52: Floats
    """Left eye, right eye, nose, left and right corner of the mouth."""


class FaceDetector:
    """An ONNX detector. `detect` may be called from several threads at once."""

    def __init__(self, path: Path, *, min_score: float = 0.5) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise DataError("A face detector needs onnxruntime: pip install 'megaclass[onnx]'") from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        # The threads that read photos keep all cores busy.
        options.intra_op_num_threads = 1
        self.path, self._min_score = path, min_score
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            inputs = [(one.name, one.shape) for one in self._session.get_inputs()]
        # onnxruntime's exceptions have no common base class, and damaged files also raise Python's own.
        except Exception as error:
            raise DataError(f"Cannot open the face detector {path}: {error}") from error
        if len(inputs) != 1 or len(inputs[0][1]) != 4 or inputs[0][1][1] != 3:
            raise DataError(
                f"The face detector {path} takes {inputs}: expected one input of shape (1, 3, height, width)."
            )
        self._input, (_, _, height, width) = inputs[0]
        is_fixed = isinstance(height, int) and isinstance(width, int)
        self._sizes = [(height, width)] if is_fixed else [(side, side) for side in _SIDES]
        height, width = self._sizes[0]
        outputs = self._run(np.zeros((1, 3, height, width), dtype=np.float32))
        columns = sorted(rows.shape[1] for rows in outputs)
        strides = {9: (8, 16, 32), 15: (8, 16, 32, 64, 128)}.get(len(outputs), ())
        self.layout = "RetinaFace" if columns == [2, 4, 10] else "SCRFD"
        self._strides = tuple(_PRIOR_SIDES) if self.layout == "RetinaFace" else strides
        self._anchors = 1 if len(self._strides) == 5 else 2
        want = {len(rows) for rows in outputs}
        if columns != sorted([1, 4, 10] * len(strides)) and self.layout == "SCRFD":
            raise DataError(f"The face detector {path} has outputs with {columns} columns: {_EXPECTED}.")
        have = [len(self._cells(stride, height, width)) * self._anchors for stride in self._strides]
        if want != ({sum(have)} if self.layout == "RetinaFace" else set(have)):
            raise DataError(
                f"The face detector {path} gives {sorted(want)} rows for {width} × {height} pixels; {self.layout} gives {have}."
            )

    def detect(self, photo_HW3: NDArray[np.uint8]) -> list[DetectedFace]:
        """Returns the faces, the best score first; of faces that overlap by 40 % of their union only the best one."""
        found = [face for size in self._sizes for face in self._detect_at(photo_HW3, size)]
        kept: list[DetectedFace] = []
        for face in sorted(found, key=lambda face: -face.score):
            if all(_overlap(face.box_4, other.box_4) <= _MIN_OVERLAP for other in kept):
                kept.append(face)
        return kept

    def _detect_at(self, photo_HW3: NDArray[np.uint8], size: tuple[int, int]) -> list[DetectedFace]:
        height, width = size
        scale = min(height / photo_HW3.shape[0], width / photo_HW3.shape[1])
        new_height, new_width = (max(1, int(side * scale)) for side in photo_HW3.shape[:2])
        canvas_HW3 = np.zeros((height, width, 3), dtype=np.uint8)
        resized = Image.fromarray(photo_HW3).resize((new_width, new_height), Image.Resampling.BILINEAR)
        canvas_HW3[:new_height, :new_width] = np.asarray(resized)
        if self.layout == "SCRFD":
            pixels = (canvas_HW3.astype(np.float32) - 127.5) / 128.0
        else:
            pixels = canvas_HW3[..., ::-1].astype(np.float32) - _BGR_MEAN
        outputs = self._run(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]))
        decode = self._decode_scrfd if self.layout == "SCRFD" else self._decode_retinaface
        scores_N, boxes_N4, points_N52 = decode(outputs, height, width)
        # Where the photo was enlarged or reduced, by the exact factor of each side.
        back_2 = np.array([photo_HW3.shape[1] / new_width, photo_HW3.shape[0] / new_height])
        return [
            DetectedFace(
                score=float(scores_N[row]), box_4=boxes_N4[row] * np.tile(back_2, 2), points_52=points_N52[row] * back_2
            )
            for row in np.flatnonzero(scores_N >= self._min_score)
        ]

    def _decode_scrfd(self, outputs: list[Floats], height: int, width: int) -> tuple[Floats, Floats, Floats]:
        # Outputs by number of columns, those of small strides, which have more rows, first.
        by_columns = {n: sorted((o for o in outputs if o.shape[1] == n), key=lambda o: -len(o)) for n in (1, 4, 10)}
        parts = []
        for stride, scores_N1, sides_N4, points_N10 in zip(self._strides, *by_columns.values(), strict=True):
            cells_N2 = np.repeat(self._cells(stride, height, width), self._anchors, axis=0) * stride
            boxes_N4 = np.hstack([cells_N2 - sides_N4[:, :2] * stride, cells_N2 + sides_N4[:, 2:] * stride])
            parts.append((scores_N1[:, 0], boxes_N4, cells_N2[:, None] + points_N10.reshape(-1, 5, 2) * stride))
        return tuple(np.concatenate(part) for part in zip(*parts, strict=True))  # type: ignore[return-value]

    def _decode_retinaface(self, outputs: list[Floats], height: int, width: int) -> tuple[Floats, Floats, Floats]:
        scores_N2, boxes_N4, points_N10 = sorted(outputs, key=lambda rows: rows.shape[1])
        centres_N2 = np.concatenate(
            [np.repeat((self._cells(s, height, width) + 0.5) * s, self._anchors, axis=0) for s in self._strides]
        )
        sides_N1 = np.concatenate(
            [np.tile(_PRIOR_SIDES[s], len(self._cells(s, height, width))) for s in self._strides]
        ).astype(np.float64)[:, None]
        # The variances with which this network is trained: 0.1 for places, 0.2 for sizes.
        middles_N2 = centres_N2 + boxes_N4[:, :2] * 0.1 * sides_N1
        halves_N2 = sides_N1 * np.exp(boxes_N4[:, 2:] * 0.2) / 2
        points_N52 = centres_N2[:, None] + points_N10.reshape(-1, 5, 2) * 0.1 * sides_N1[:, None]
        return scores_N2[:, 1], np.hstack([middles_N2 - halves_N2, middles_N2 + halves_N2]), points_N52

    def _cells(self, stride: int, height: int, width: int) -> Floats:
        """Returns (x, y) of every cell, row by row."""
        across, down = np.meshgrid(np.arange(-(-width // stride)), np.arange(-(-height // stride)))
        return np.stack([across.ravel(), down.ravel()], axis=1).astype(np.float64)

    def _run(self, images: NDArray[np.float32]) -> list[Floats]:
        try:
            outputs = [np.asarray(rows, dtype=np.float64) for rows in self._session.run(None, {self._input: images})]
        except Exception as error:
            raise DataError(f"The face detector {self.path} cannot process {images.shape}: {error}") from error
        if not all(rows.ndim >= 2 and rows.shape[-1] for rows in outputs):
            raise DataError(f"The face detector {self.path} gives {[rows.shape for rows in outputs]}: {_EXPECTED}.")
        return [rows.reshape(-1, rows.shape[-1]) for rows in outputs]


def _overlap(one_4: Floats, other_4: Floats) -> float:
    """Returns the area that two boxes share as a part of the area that they cover together."""
    sides_2 = np.minimum(one_4[2:], other_4[2:]) - np.maximum(one_4[:2], other_4[:2])
    shared = float(np.prod(sides_2.clip(min=0)))
    both = float(np.prod(one_4[2:] - one_4[:2]) + np.prod(other_4[2:] - other_4[:2])) - shared
    return shared / both if both > 0 else 0.0
