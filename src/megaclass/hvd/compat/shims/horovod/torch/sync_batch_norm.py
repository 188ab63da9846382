from megaclass.hvd.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
