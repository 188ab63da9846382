from megaclass.hvd.tensorflow.mpi_ops import Sum, rank, size
from megaclass.hvd.tensorflow.sync_batch_norm import SyncBatchNormalization
