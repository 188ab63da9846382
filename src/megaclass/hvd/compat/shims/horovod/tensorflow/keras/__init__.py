from megaclass.hvd.tensorflow.keras import *
from megaclass.hvd.tensorflow.keras import __all__ as _names
from megaclass.hvd.tensorflow.keras import __getattr__ as __getattr__

from . import callbacks as callbacks

__all__ = list(_names)
