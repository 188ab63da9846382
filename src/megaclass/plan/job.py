"""A job as a plan sees it: settings, ranks, data and GPU, without any of them being there."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from megaclass.backbones.configured import backbone_on_paper
from megaclass.config.schema import BackboneConfig, Config
from megaclass.gpu.cuda_graphs import largest_backbone_bytes
from megaclass.head.sampling import rate_schedule, sample_capacity
from megaclass.head.settings import SHARE_OF_DEVICE
from megaclass.image_size import compact_size
from megaclass.plan.gpus import Gpu
from megaclass.plan.trace import BackboneTrace, trace_backbone

_DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class PlannedJob:
    """Settings, ranks, data and GPU of a job. The letters are those of CONTRIBUTING.md."""

    config: Config
    gpu: Gpu
    num_ranks: int
    ranks_per_host: int
    num_classes: int
    num_images: int
    image_size: tuple[int, int]
    network: float
    """Bytes per second between hosts, per host and direction."""

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.config.train.precision]

    @property
    def max_batch(self) -> int:
        return -(-self.config.train.global_batch // self.num_ranks)

    @property
    def part_batch(self) -> int:
        """Images that pass through the backbone at once."""
        return -(-self.max_batch // self.config.train.accumulate)

    @property
    def gathered(self) -> int:
        """G: rows of the global batch on every rank."""
        return self.max_batch * self.num_ranks

    @property
    def local_classes(self) -> int:
        """K of the rank that has the most classes."""
        return -(-self.num_classes // self.num_ranks)

    @property
    def sample_rate(self) -> float:
        """The largest of a schedule: memory must suffice for it."""
        return max(rate_schedule(self.config.head.sample_rate).rates)

    @property
    def sampled(self) -> int:
        """S: classes of a rank that take part in a step; on a GPU the list has a fixed length."""
        rate = self.sample_rate
        return self.local_classes if rate == 1 else sample_capacity(self.local_classes, rate, self.gathered)

    @property
    def stored_bytes(self) -> int:
        """Bytes of exponentials that the head may keep."""
        given = self.config.head.stored_gib
        return self.gpu.memory // SHARE_OF_DEVICE if given is None else round(given * 2**30)

    @property
    def num_hosts(self) -> int:
        return -(-self.num_ranks // self.ranks_per_host)

    def backbone(self) -> BackboneTrace:
        return _traced(self.config.backbone, self.image_size, self.dtype)

    @property
    def replays_backbone(self) -> bool:
        """True where the backbone's steps are replayed as CUDA graphs (train/model/graphed_backbone.py).

        On several ranks `auto` decides by measurement; the plan then counts ordinary steps.
        """
        setting = self.config.train.cuda_graph
        if not self.config.may_replay_backbone() or (setting == "auto" and self.num_ranks > 1):
            return False
        kept = self.backbone().at(self.part_batch).kept_for_backward()
        return setting == "on" or kept <= largest_backbone_bytes(self.gpu.memory)

    def with_settings(self, **sections: dict[str, object]) -> "PlannedJob":
        """Returns the job with other settings: with_settings(head={"sample_rate": 0.1})."""
        changed = {name: replace(getattr(self.config, name), **values) for name, values in sections.items()}
        return replace(self, config=replace(self.config, **changed))


@cache
def _traced(settings: BackboneConfig, image_size: tuple[int, int], dtype: torch.dtype) -> BackboneTrace:
    return trace_backbone(
        lambda: backbone_on_paper(settings, compact_size(image_size)),
        image_size,
        dtype,
    )
