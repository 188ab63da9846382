"""Writes backbone.pth, the state dict that InsightFace's arcface_torch loads."""

import torch

from megaclass.errors import ExportError
from megaclass.export.check import require_same_when_opened
from megaclass.export.exporter import Exporter, ExportJob
from megaclass.insightface.names import INSIGHTFACE_NAMES

_FILE = "backbone.pth"
_USAGE = """```python
import torch
from backbones import get_model  # of InsightFace's arcface_torch

backbone = get_model("{insightface_name}", num_features={embedding_dim})
backbone.load_state_dict(torch.load("backbone.pth", weights_only=True))
backbone.eval()
```"""


def _write(job: ExportJob) -> None:
    if job.model.backbone not in INSIGHTFACE_NAMES:
        raise ExportError(
            f"Not written: {job.out}. InsightFace has no backbone {job.model.backbone!r}; it has "
            f"{', '.join(INSIGHTFACE_NAMES)}. Export to onnx or safetensors instead."
        )
    state = job.model.network.state_dict()
    torch.save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}, job.folder / _FILE)
    require_same_when_opened(job, _FILE)


EXPORTER = Exporter(file=_FILE, write=_write, usage=_USAGE)
