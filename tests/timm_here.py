"""timm, with a torchvision whose native part does not load, because it is built for CUDA and this torch is not.

Networks of timm use none of torchvision's native operators; it only refuses to be imported while they are not declared.
"""

import pytest
import torch

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_timm() -> None:
    """Skips the module if timm is not installed."""
    try:
        import timm
    except ImportError as error:
        pytest.skip(f"needs timm and torchvision ({error})", allow_module_level=True)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for name in _OPERATORS:
            torch.library.define(f"torchvision::{name}", _SCHEMA)
        import timm  # noqa: F401
