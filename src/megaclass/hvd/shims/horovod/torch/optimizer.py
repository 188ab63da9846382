from megaclass.hvd.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
