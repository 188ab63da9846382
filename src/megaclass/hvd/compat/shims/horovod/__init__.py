"""`horovod` for jobs whose launcher has put this folder on PYTHONPATH: the objects of `megaclass.hvd`."""

from .runner import run

__version__ = "0.28.1"

__all__ = ["__version__", "run"]
