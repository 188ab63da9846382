from megaclass.hvd.compat.util import check_extension

check_extension("horovod.keras", "HOROVOD_WITH_TENSORFLOW", __file__)

from megaclass.hvd.keras import *
from megaclass.hvd.keras import __all__ as _names
from megaclass.hvd.keras import __getattr__ as __getattr__

from . import callbacks as callbacks

__all__ = list(_names)
