"""A backbone for `backbone.name=hanging_backbone:HangingNet` that hangs on the last rank in its fourth training step.

HANG_CAUSES names the cause of each start of the job, separated by commas; with --restarts one job tries them all.
"""

import ctypes
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megaclass.backbones.slim import SlimNet

HANGS_IN_FORWARD = 4


class HangingNet(SlimNet):
    num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        causes = os.environ["HANG_CAUSES"]
        if self.training and self.num_forwards == HANGS_IN_FORWARD and (is_last or causes == "all-slow"):
            each = causes.split(",")
            hang(each[int(os.environ.get("MEGACLASS_RESTART", "0")) % len(each)])
        return super().forward(x)


def hang(cause: str) -> None:
    if cause == "native":
        # PyDLL keeps the interpreter lock: no other Python thread of this process runs any more. A mutex that is locked twice,
        # because the signal that asks for stacks would end a sleep.
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    elif cause in ("slow", "all-slow"):
        # Longer than the limit of 3 s, then it goes on.
        time.sleep(8)
    elif cause == "pause":
        Path(os.environ["HANG_PIPE"] + ".pause-now").touch()
        # In parts: the rank needs time after the pause, too.
        for _ in range(20):
            time.sleep(0.1)
    elif cause == "read":
        pipe = Path(os.environ["HANG_PIPE"])
        # Opened for writing, too, so opening does not wait and reading does.
        os.read(os.open(pipe, os.O_RDWR), 1)
    elif cause == "collective":
        # One rank alone waits for a message that is never sent.
        dist.recv(torch.zeros(1), src=0, tag=77)
    elif cause == "cable":
        Path(os.environ["HANG_PIPE"] + ".cut-now").touch()
        time.sleep(600)
