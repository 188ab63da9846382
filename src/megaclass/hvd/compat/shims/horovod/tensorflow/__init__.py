from megaclass.hvd.compat.util import check_extension as _check_extension

_check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)

from megaclass.hvd.tensorflow import *
from megaclass.hvd.tensorflow import __all__ as _names
from megaclass.hvd.tensorflow import __getattr__ as __getattr__

from . import compression as compression
from . import elastic as elastic
from . import functions as functions
from . import gradient_aggregation as gradient_aggregation
from . import mpi_ops as mpi_ops
from . import util as util
from .util import _executing_eagerly

__all__ = list(_names)
