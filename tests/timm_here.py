"""timm and peft, in a folder of their own and with a torchvision whose native part does not load.

Its wheels are built for CUDA. Networks of timm use none of its native operators; it only refuses to be imported while they are
not declared. In the environment itself it would keep other packages from being imported, such as Lightning, which looks for it.
"""

import contextlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Where the Makefile installs them.
_FOLDER = Path(sys.prefix) / "timm"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

NEEDS_TIMM = pytest.mark.skipif(
    not _FOLDER.is_dir() and (find_spec("timm") is None or find_spec("peft") is None),
    reason="needs timm, torchvision and peft",
)


def import_timm() -> None:
    """Imports all of them, so that the code under test finds them: also in each process that has its own modules."""
    sys.path.insert(0, str(_FOLDER))
    try:
        try:
            import torchvision
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            for name in _OPERATORS:
                with contextlib.suppress(RuntimeError):  # declared by an earlier attempt
                    torch.library.define(f"torchvision::{name}", _SCHEMA)
            import torchvision  # noqa: F401
        import peft  # noqa: F401
        import timm  # noqa: F401
    finally:
        sys.path.remove(str(_FOLDER))
