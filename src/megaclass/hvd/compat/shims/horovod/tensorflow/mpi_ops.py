from megaclass.hvd.basics import _Basics as _HorovodBasics
from megaclass.hvd.basics import _basics
from megaclass.hvd.compat.util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
from megaclass.hvd.tensorflow.mpi_ops import *
