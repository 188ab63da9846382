"""Bytes per rank on its GPU, part by part, at the peak of a step."""

from dataclasses import dataclass

import numpy as np

from megaclass.capacity.job import HeadCosts, PlannedJob, head_costs

LIBRARIES = 100 << 20
"""Workspaces of cuBLAS and the scratch memory of the fused batch norm, in torch's count."""
OUTSIDE_TORCH = 1 << 30
"""CUDA's context, NCCL's buffers and loaded kernels, which torch does not count."""
USABLE = 0.97
"""Share of the rest that torch's allocator can hand out; the rest is lost in gaps between blocks."""
_CAST_BYTES = 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the moment when most are in use."""

    parts: dict[str, int]
    """By name, in the order of the stacked bar; their sum is the peak."""
    peak_moment: str

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    def fits(self, memory: int) -> bool:
        """True if a GPU with this much memory has room for the peak."""
        return self.peak <= (memory - OUTSIDE_TORCH) * USABLE


def plan_memory(job: PlannedJob) -> Memory:
    """Adds up what a rank holds all the time, and what it holds at each moment of a step."""
    config, backbone, head = job.config, job.backbone(), head_costs(job)
    parts = job.num_ranks if config.train.shard_backbone else 1
    trained, parameters = 4 * -(-backbone.num_trained // parts), 4 * -(-backbone.num_parameters // parts)
    state = {"adamw": 2 * trained, "sgd": trained * bool(config.optimizer.momentum)}[config.optimizer.name]
    lasting = {
        "backbone": parameters + 3 * backbone.buffer_bytes,
        # One block is gathered while another one is used, and gradients are whole until they are averaged.
        "gathered blocks": 3 * 4 * backbone.largest_part if config.train.shard_backbone else 0,
        "gradients": trained,
        "optimizer state": state,
        "moving average": parameters if config.train.ema else 0,
        "centres": head.centres,
        "state of the centres": head.row_state,
        "communication buffers": _communication(job),
        "training images": _images_on_gpu(job),
        "libraries": LIBRARIES,
    }
    moments = _moments(job, head)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return Memory({name: size for name, size in (lasting | moments[moment]).items() if size}, moment)


def _moments(job: PlannedJob, head: HeadCosts) -> dict[str, dict[str, int]]:
    """Returns the temporary bytes at the moments that may be the peak."""
    step = job.backbone().at(job.part_batch)
    kept = round(step.kept_for_backward())
    backward = round(float(np.max(step.working[step.num_forward :], initial=0.0)))
    forward = round(float(np.max(step.working[: step.num_forward], initial=0.0)))
    pool = _graph_pool(job, max(forward, backward))
    return {
        "drawing the first centres": {"logits": head.building - head.row_state},
        "forward of the backbone": {"activations": max(pool, forward)},
        "forward of the head": {
            "activations": max(pool, kept),
            "batch in the head": head.images,
            "logits": head.stored + head.forward_extra,
        },
        "backward": {
            "activations": max(pool, backward),
            "batch in the head": head.images,
            "logits": head.stored,
        },
        "update of the centres": {
            "activations": pool,
            "batch in the head": head.images,
            "logits": head.stored + head.update_extra,
        },
    }


def _graph_pool(job: PlannedJob, most: int) -> int:
    """Returns the bytes that stay allocated between steps if the backbone is replayed as CUDA graphs, otherwise 0.

    most: bytes of activations at the peak of forward and backward, for which the graphs' pool has room all the time.
    """
    height, width = job.image_size
    # The graphs read the images, as float32, from memory of their own.
    return (most + job.part_batch * height * width * 3 * 4) * job.replays_backbone


def _images_on_gpu(job: PlannedJob) -> int:
    """With data.on_gpu every rank keeps the pixels of all images."""
    height, width = job.image_size
    return job.num_images * height * width * 3 if job.config.data.on_gpu else 0


def _communication(job: PlannedJob) -> int:
    """Gradients are exchanged in place; a compressed format needs a copy and its rounding errors."""
    trained = job.backbone().num_trained
    compression = job.config.train.compression
    if job.num_ranks == 1 or compression == "none":
        return 0
    narrow = {"fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}[compression]
    return trained * (4 + 2 * narrow)
