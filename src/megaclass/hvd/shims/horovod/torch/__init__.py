from megaclass.hvd import *  # noqa: F403
from megaclass.hvd import __all__ as _names

__all__ = [name for name in _names if name not in ("run", "shims_folder")]


def _check_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
