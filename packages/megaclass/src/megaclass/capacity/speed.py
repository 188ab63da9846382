"""Seconds of a step: the backbone's operations against the roofline of the GPU, the head's products, updates, exchanges.

Shares of the stated speeds that our programs reach were measured on an H200 (benchmarks/plan.md, head-h200.md) and are
taken to be the same on other GPUs; the operations themselves are counted. Exchanges follow docs/how-it-works.md.
"""

from dataclasses import dataclass

import numpy as np

from megaclass.capacity.job import PlannedJob, head_costs

_LATENCY_S = {"in a host": 50e-6, "between hosts": 200e-6}
"""Per collective, in addition to its bytes, as in benchmarks/head-h200.md."""
_OVERLAPPED = 0.6
"""Share of backward during which DDP's all-reduce can hide: the first buckets are ready after a while only."""


@dataclass(frozen=True)
class Exchange:
    """One collective of a step."""

    name: str
    collective: str
    buffer: int
    """Bytes of the whole buffer."""
    seconds: float


def exchanges(job: PlannedJob) -> list[Exchange]:
    """Returns the collectives of a step in order; none on one rank."""
    if job.num_ranks == 1:
        return []
    dim, gathered = job.config.backbone.embedding_dim, job.gathered
    narrow = {"none": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}[job.config.train.compression]
    block = 16 + job.max_batch * (8 + dim * job.dtype.itemsize)
    parts = job.config.train.accumulate
    backbone = ("gradient of the backbone", "all-reduce", narrow * job.backbone().num_trained, 2)
    if job.config.train.shard_backbone:
        # Gathered for forward and for backward, then the gradients are averaged.
        backbone = ("weights and gradient of the backbone", "all-gather", 4 * job.backbone().num_parameters, 3 * parts)
    table = [
        ("embeddings and labels", "all-gather", parts * job.num_ranks * block, 1),
        ("softmax sums and target cosines", "all-reduce", parts * 8 * (2 * gathered + 1), 2),
        ("gradient of the embeddings", "reduce-scatter", parts * 4 * gathered * dim, 1),
        backbone,
    ]
    return [Exchange(name, kind, size, _seconds(job, size, passes)) for name, kind, size, passes in table]


def _exposed_seconds(job: PlannedJob, sent: list[Exchange], backbone_s: float) -> float:
    """Returns the time that the exchanges add to a step: the backbone's overlap with its backward, the head's do not.

    Nothing overlaps with a backward that is replayed as one CUDA graph.
    """
    if not sent:
        return 0.0
    *head, gradient = sent
    backward = 0.0 if job.replays_backbone else backbone_s * 2 / 3
    return sum(one.seconds for one in head) + max(0.0, gradient.seconds - _OVERLAPPED * backward)


def _seconds(job: PlannedJob, size: int, passes: int) -> float:
    """passes: how often a ring sends the buffer; an all-reduce is a reduce-scatter and an all-gather."""
    ranks, hosts = job.num_ranks, job.num_hosts
    seconds = _LATENCY_S["in a host"] + passes * size * (ranks - 1) / ranks / job.gpu.link
    if hosts > 1:
        # Every byte enters and leaves each host once, over the host's network.
        between = _LATENCY_S["between hosts"] + passes * size * (hosts - 1) / hosts / job.network
        seconds = max(seconds, between)
    return seconds


REACHED_BY_BACKBONE = {"iresnet": 0.65, "vit": 0.53}
"""Roofline time over measured time, by family of backbones."""
REACHED_BY_OTHERS = 0.55
FUSED_SHARE = 0.55
"""Share of the traffic of operations without FLOPs that remains when torch.compile fuses them."""
HEAD_FLOPS, HEAD_BANDWIDTH, HEAD_FIXED_S = 0.93, 1.10, 0.05e-3
"""Fitted to benchmarks/head-h200.md; above 1, because part of the traffic stays in the L2 cache."""
UPDATE_BANDWIDTH = 0.8
LAUNCH_S = 30e-6
"""Host time per operation, with autograd's and DDP's: small batches wait for the host, not for the device. Hosts of H200
needed 28 to 50 microseconds (benchmarks/step-h200.md)."""
COMPILED_LAUNCHES, REPLAYED_LAUNCHES = 0.3, 0.27
"""Share of this time that remains with torch.compile, and with CUDA graphs of the backbone (benchmarks/step-h200.md): the
exchange of gradients, the optimizers and the head are started one by one."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one rank."""

    backbone: float
    head: float
    update: float
    launches: float
    """The host's time, in parallel with the device's."""
    exchange: float
    """Time that the exchanges add."""

    @property
    def total(self) -> float:
        return self.compute + self.exchange

    @property
    def compute(self) -> float:
        return max(self.backbone + self.head + self.update, self.launches)

    @property
    def waiting(self) -> float:
        """Seconds in which the device waits for the host, which launches its operations too slowly for a small batch."""
        return self.compute - (self.backbone + self.head + self.update)


def step_time(job: PlannedJob) -> StepTime:
    config, gpu, backbone, head = job.config, job.gpu, job.backbone(), head_costs(job)
    step = backbone.at(job.part_batch)
    is_fused = config.is_compiled(on_gpu=True)
    traffic = np.where(step.flops > 0, step.traffic, step.traffic * (FUSED_SHARE if is_fused else 1.0))
    roofline = float(np.maximum(step.flops / _flops(job), traffic / gpu.bandwidth).sum())
    parts = config.train.accumulate
    launched = COMPILED_LAUNCHES if is_fused else REPLAYED_LAUNCHES if job.replays_backbone else 1.0
    passes = {"sgd": 8, "adamw": 10}[config.optimizer.name] + 3 * bool(config.train.ema)
    reached = (share for family, share in REACHED_BY_BACKBONE.items() if config.backbone.name.startswith(family))
    backbone_s = parts * roofline / next(reached, REACHED_BY_OTHERS)
    return StepTime(
        backbone=backbone_s,
        head=head.flops / (HEAD_FLOPS * _flops(job))
        + head.traffic / (HEAD_BANDWIDTH * gpu.bandwidth)
        + parts * HEAD_FIXED_S,
        update=passes * 4 * backbone.num_trained / (UPDATE_BANDWIDTH * gpu.bandwidth),
        launches=parts * len(step.flops) * LAUNCH_S * launched,
        exchange=_exposed_seconds(job, exchanges(job), backbone_s),
    )


def _flops(job: PlannedJob) -> float:
    """float32 products run as TF32 at half the speed of bf16 at best, and without tensor cores far slower; torch's default is
    the latter for products and the former for convolutions."""
    return job.gpu.flops if job.dtype.itemsize == 2 else job.gpu.flops / 4
