from megaclass.hvd.tensorflow.keras import *
from megaclass.hvd.tensorflow.keras import __all__ as _names  # type: ignore[attr-defined]

from . import callbacks as callbacks
from . import elastic as elastic

__all__ = list(_names)
