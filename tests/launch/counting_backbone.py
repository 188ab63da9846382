"""A backbone for `backbone.name=counting_backbone:CountingNet` that writes down every image that it is trained on.

COUNT_DIR names a folder. Each process appends a line per training step to `seen-<pid>`: generation of the elastic job, step,
rank, number of ranks, and a checksum of each image. The number of the step is a buffer of the network, so it goes back
with the rest of the state. While a file `hold-<step>` exists there, all ranks wait before they do that step, counted from 0.
In an elastic job each process also prints its place in every generation. COUNT_STEP_S is the least time of a step, until there
is a file `stop`. counted_run.py is the side of the test.
"""

import json
import os
import time
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from megaclass.backbones.slim import SlimNet
from megaclass_launch.elastic import elastic_worker

STEP_S = float(os.environ.get("COUNT_STEP_S", "0"))


def lost_and_repeated(folder: Path, num_images: int, steps_per_epoch: int, num_epochs: int) -> tuple[int, int]:
    """How many images were not trained on in an epoch, or too often; of a step that was done again, the last time counts."""
    lines = [line for file in folder.glob("seen-*") for line in file.read_text().splitlines()]
    rows = sorted(json.loads(line) for line in lines)
    last = {step: generation for generation, step, *_ in rows}
    epochs: list[Counter[int]] = [Counter() for _ in range(num_epochs)]
    for generation, step, _, _, images in rows:
        if last[step] == generation:
            epochs[step // steps_per_epoch] += Counter(images)
    lost = sum(num_images - len(seen) for seen in epochs)
    return lost, sum(number - 1 for seen in epochs for number in seen.values())


class CountingNet(SlimNet):
    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.printed_generation = 0
        hold, worker = Path(os.environ["COUNT_DIR"]) / "hold-build", elastic_worker()
        if worker is not None and hold.exists():
            print(f"pid {os.getpid()} builds in generation {worker.here.generation}", flush=True)
            while hold.exists():
                time.sleep(0.05)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._note(x)
        return super().forward(x)

    def _note(self, x: torch.Tensor) -> None:
        folder, step, worker = Path(os.environ["COUNT_DIR"]), int(self.num_steps), elastic_worker()
        images = [zlib.crc32(image.contiguous().numpy().tobytes()) for image in x.detach()]
        generation = worker.here.generation if worker is not None else 0
        row = [generation, step, dist.get_rank(), dist.get_world_size(), images]
        with (folder / f"seen-{os.getpid()}").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if generation > self.printed_generation:
            self.printed_generation = generation
            print(
                f"pid {os.getpid()} rank {dist.get_rank()} of {dist.get_world_size()} from epoch ?, step {step}",
                flush=True,
            )
        if STEP_S and not (folder / "stop").exists():
            time.sleep(STEP_S)
        while (folder / f"hold-{step}").exists():
            time.sleep(0.01)
        self.num_steps += 1
