"""Runs an ONNX file as a torch module through onnxruntime: our own exports, and the files that InsightFace publishes."""

from pathlib import Path

import torch
from torch import Tensor, nn

from megaclass.errors import CheckpointError
from megaclass.image_size import ImageSize, compact_size


class OnnxNetwork(nn.Module):
    """A network without parameters. It runs on the GPU if onnxruntime was built for it, otherwise on the CPU."""

    def __init__(self, path: Path, device: torch.device) -> None:
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
        if len(shapes) != 1 or len(shapes[0][1]) != 4 or shapes[0][1][1] != 3 or not outputs:
            shown = ", ".join(f"{name} {shape}" for name, shape in shapes) or "nothing"
            raise CheckpointError(
                f"{path} takes {shown} and has {len(outputs)} output(s): expected one input of shape (batch, 3, height, width) "
                f"and an output of shape (batch, embedding size)."
            )
        self._path, self._input, self._output = path, inputs[0].name, outputs[0].name
        batch, _, height, width = shapes[0][1]
        is_fixed = isinstance(height, int) and isinstance(width, int)
        self.image_size: ImageSize | None = compact_size((height, width)) if is_fixed else None
        # Some published files have a fixed batch size, mostly 1.
        self._batch: int | None = batch if isinstance(batch, int) and batch > 0 else None

    def forward(self, images_B: Tensor) -> Tensor:
        parts = images_B.split(self._batch) if self._batch else [images_B]
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
