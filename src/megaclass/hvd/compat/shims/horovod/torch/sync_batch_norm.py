from megaclass.hvd.sync_batch_norm import SyncBatchNorm
