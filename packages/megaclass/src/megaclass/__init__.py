"""Megaclass: training of classifiers with millions of classes, on one machine or many."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from megaclass.api import Evaluation as Evaluation
    from megaclass.api import TrainedRun as TrainedRun
    from megaclass.api import evaluate as evaluate
    from megaclass.api import fit as fit
    from megaclass.api import train as train
    from megaclass.head.margins import *  # noqa: F403
    from megaclass.head.partial_fc import PartialFC as PartialFC
    from megaclass.head.row_optimizers import RowAdagrad as RowAdagrad
    from megaclass.head.row_optimizers import RowAdamW as RowAdamW
    from megaclass.head.row_optimizers import RowSGD as RowSGD
    from megaclass.inference import load as load
    from megaclass_launch.errors import UserError as UserError

# Resolved on first use: `megaclass run` must start without paying for torch.
_PUBLIC = {
    "UserError": "megaclass_launch.errors",
    **dict.fromkeys(("train", "fit", "evaluate", "TrainedRun", "Evaluation"), "megaclass.api"),
    "load": "megaclass.inference",
    "PartialFC": "megaclass.head.partial_fc",
    **dict.fromkeys(("RowSGD", "RowAdamW", "RowAdagrad"), "megaclass.head.row_optimizers"),
    **dict.fromkeys(("Margin", "Targets"), "megaclass.head.margins"),
}


def _margins() -> list[str]:
    """Returns the names of the built-in margins."""
    table = importlib.import_module("megaclass.head.margins").MARGINS
    return [margin.__name__ for margin, _ in table.values()]


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name not in _PUBLIC and not name[:1].isupper():
        raise AttributeError(f"module 'megaclass' has no attribute {name!r}")
    if name != "UserError":
        importlib.import_module("megaclass.torch_version").check_torch()
    module = _PUBLIC.get(name, "megaclass.head.margins")
    if name not in _PUBLIC and name not in _margins():
        raise AttributeError(f"module 'megaclass' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return [*_PUBLIC, *_margins(), "__version__"]
