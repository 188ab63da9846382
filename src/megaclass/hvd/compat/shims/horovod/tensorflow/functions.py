from megaclass.hvd.process_sets import ProcessSet, global_process_set
from megaclass.hvd.tensorflow.functions import *
from megaclass.hvd.tensorflow.mpi_ops import allgather, broadcast, broadcast_, rank, size
