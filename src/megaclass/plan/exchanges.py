"""Exchanges of a step: bytes of every collective and its estimated time, by the formulas of docs/how-it-works.md."""

from dataclasses import dataclass

from megaclass.plan.job import PlannedJob

_LATENCY_S = {"in a host": 50e-6, "between hosts": 200e-6}
"""Per collective, beside its bytes, as in benchmarks/head-h200.md."""
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
    table = [
        ("embeddings and labels", "all-gather", parts * job.num_ranks * block, 1),
        ("softmax sums and target cosines", "all-reduce", parts * 8 * (2 * gathered + 1), 2),
        ("gradient of the embeddings", "reduce-scatter", parts * 4 * gathered * dim, 1),
        ("gradient of the backbone", "all-reduce", narrow * job.backbone().num_trained, 2),
    ]
    return [Exchange(name, kind, size, _seconds(job, size, passes)) for name, kind, size, passes in table]


def exposed_seconds(job: PlannedJob, sent: list[Exchange], backbone_s: float) -> float:
    """Returns the time that the exchanges add to a step: the backbone's runs beside its backward, the head's do not.

    Nothing runs beside a backward that is replayed as one CUDA graph.
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
