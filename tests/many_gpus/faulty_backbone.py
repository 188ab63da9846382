"""A backbone for `backbone.name=faulty_backbone:FaultyNet` that fails in its third step on the last rank, as FAULT says.

FAULT: forward, backward, memory, evaluation or save. A save fails because the state of the backbone cannot be read.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.backbones.slim import SlimNet

FAULT = os.environ["FAULT"]


def fail() -> None:
    print("the fault happens now", flush=True)
    if FAULT == "memory":
        torch.empty(2**46, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    raise RuntimeError(f"planned failure in {FAULT}")


class FaultyNet(SlimNet):
    num_steps = 0

    def _is_due(self, *faults: str) -> bool:
        return FAULT in faults and self.num_steps >= 3 and dist.get_rank() == dist.get_world_size() - 1

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += self.training
        if self._is_due("forward", "memory") or (not self.training and self._is_due("evaluation")):
            fail()
        embeddings = super().forward(x)
        if self._is_due("backward"):
            embeddings.register_hook(lambda gradient: fail())
        return embeddings

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        if self._is_due("save"):
            fail()
        return super().state_dict(*args, **options)
