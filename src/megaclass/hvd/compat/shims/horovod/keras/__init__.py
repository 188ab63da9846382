from megaclass.hvd.compat.util import check_extension as _check_extension

_check_extension("horovod.keras", "HOROVOD_WITH_TENSORFLOW", __file__)

from megaclass.hvd.keras import *
from megaclass.hvd.keras import __all__ as _names  # type: ignore[attr-defined]

from . import callbacks as callbacks
from . import elastic as elastic

__all__ = list(_names)
