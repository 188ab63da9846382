"""`horovod` for jobs whose launcher has put this folder on PYTHONPATH: the objects of `horovod.torch`."""

from .runner import run

__version__ = "0.28.1"

__all__ = ["__version__", "run"]
