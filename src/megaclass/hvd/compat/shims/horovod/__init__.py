"""`horovod`, for jobs whose launcher put this folder on PYTHONPATH: the same objects as `megaclass.hvd`."""

from .runner import run

__version__ = "0.28.1"

__all__ = ["__version__", "run"]
