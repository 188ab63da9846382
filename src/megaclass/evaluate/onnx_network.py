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
        from onnxruntime.capi import onnxruntime_pybind11_state as failures

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        options.intra_op_num_threads = torch.get_num_threads()
        wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
        providers = [
            name for name in [*wanted, "CPUExecutionProvider"] if name in onnxruntime.get_available_providers()
        ]
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        # onnxruntime's exceptions have no common base class; a bad file causes these.
        except (
            failures.Fail,
            failures.InvalidArgument,
            failures.InvalidGraph,
            failures.InvalidProtobuf,
            failures.NoSuchFile,
            failures.NotImplemented,
            failures.RuntimeException,
        ) as error:
            raise CheckpointError(f"Cannot open {path} as an ONNX model: {error}") from error
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].shape[1] != 3:
            shown = ", ".join(f"{one.name} {one.shape}" for one in inputs)
            raise CheckpointError(f"{path} takes {shown}: expected one input of shape (batch, 3, height, width).")
        self._input, self._output = inputs[0].name, outputs[0].name
        batch, _, height, width = inputs[0].shape
        is_fixed = isinstance(height, int) and isinstance(width, int)
        self.image_size: ImageSize | None = compact_size((height, width)) if is_fixed else None
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        # Some published files have a fixed batch size, mostly 1.
        self._batch: int | None = batch if isinstance(batch, int) else None

    def forward(self, images_B: Tensor) -> Tensor:
        parts = images_B.split(self._batch) if self._batch else [images_B]
        rows = [self._session.run([self._output], {self._input: part.cpu().numpy()})[0] for part in parts]
        return torch.cat([torch.from_numpy(row) for row in rows]).to(images_B.device)
