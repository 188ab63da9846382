"""The carriers of an operation: the process group, and copies in main memory. The same choice on all ranks."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from horovod.engine.messages import Request
from horovod.transport.process_set_table import ProcessSetTable


class Groups:
    """Chooses by the request alone, which all ranks have agreed on: a rank that chose otherwise would hang."""

    def __init__(self, rank: int, sets: ProcessSetTable, *, uses_nccl: bool) -> None:
        """uses_nccl: every rank has a GPU of its own, so that tensors on GPUs are sent from there."""
        self.rank = rank
        self._uses_nccl = uses_nccl
        self._sets = sets

    def ranks(self, request: Request) -> tuple[int, ...]:
        """Returns the ranks that take part, in the order of their places in the group."""
        return self._sets.connections[request.process_set].ranks

    def place(self, request: Request) -> int:
        """Returns the place of this rank among them."""
        return self.ranks(request).index(self.rank)

    def group(self, request: Request) -> dist.ProcessGroup:
        groups = self._sets.connections[request.process_set]
        if request.device == "cpu" or not self._uses_nccl:
            return groups.cpu
        assert groups.gpu is not None
        return groups.gpu

    def transport(self, request: Request) -> str:
        """Returns the name of what carries the tensors, for the timeline."""
        return "NCCL" if request.device != "cpu" and self._uses_nccl else "GLOO"

    def is_direct(self, tensor: Tensor) -> bool:
        return self._uses_nccl or tensor.device.type == "cpu"

    def staged(self, tensor: Tensor, run: Callable[[Tensor], object]) -> None:
        """Runs on a copy in main memory where NCCL cannot be used, because not every rank has its own GPU."""
        if self.is_direct(tensor):
            run(tensor)
            return
        copy = tensor.cpu()
        run(copy)
        tensor.copy_(copy)
