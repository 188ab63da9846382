"""Megaclass: training of classifiers with millions of classes, on one machine or many."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from megaclass.errors import UserError as UserError
    from megaclass.head.margins import AdaFace as AdaFace
    from megaclass.head.margins import ArcFace as ArcFace
    from megaclass.head.margins import CombinedMargin as CombinedMargin
    from megaclass.head.margins import CosFace as CosFace
    from megaclass.head.margins import CurricularFace as CurricularFace
    from megaclass.head.margins import ElasticFace as ElasticFace
    from megaclass.head.margins import MagFace as MagFace
    from megaclass.head.margins import Margin as Margin
    from megaclass.head.margins import NormalisedSoftmax as NormalisedSoftmax
    from megaclass.head.margins import Targets as Targets
    from megaclass.head.partial_fc import PartialFC as PartialFC
    from megaclass.head.row_optimizers import RowAdagrad as RowAdagrad
    from megaclass.head.row_optimizers import RowAdamW as RowAdamW
    from megaclass.head.row_optimizers import RowSGD as RowSGD
    from megaclass.inference import load as load

# Resolved on first use: `megaclass run` must start without paying for torch.
_PUBLIC = {
    "UserError": "megaclass.errors",
    "load": "megaclass.inference",
    "PartialFC": "megaclass.head.partial_fc",
    **dict.fromkeys(("RowSGD", "RowAdamW", "RowAdagrad"), "megaclass.head.row_optimizers"),
    **dict.fromkeys(
        (
            "AdaFace",
            "ArcFace",
            "CombinedMargin",
            "CosFace",
            "CurricularFace",
            "ElasticFace",
            "MagFace",
            "Margin",
            "NormalisedSoftmax",
            "Targets",
        ),
        "megaclass.head.margins",
    ),
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megaclass' has no attribute {name!r}")
    if name != "UserError":
        importlib.import_module("megaclass.torch_version").check_torch()
    return getattr(importlib.import_module(_PUBLIC[name]), name)
