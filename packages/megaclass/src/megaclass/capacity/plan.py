"""The plan of a job: memory, exchanges, speed, what would fit, what would change the answer most, and all of it as text."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from megaclass.capacity.head import head_costs
from megaclass.capacity.job import PlannedJob
from megaclass.capacity.memory import OUTSIDE_TORCH, USABLE, LoaderPlan, Memory, plan_loader, plan_memory
from megaclass.capacity.speed import Exchange, StepTime, exchanges, exposed_seconds, step_time
from megaclass.progress import duration_text, size_text
from megaclass_launch.errors import UserError

_NUM_ADVICE = 3
_WORTH_SAYING = 0.03
"""Changes of speed or memory below this share are not worth a line."""


@dataclass(frozen=True)
class Advice:
    """A setting, and what the plan would be with it."""

    setting: str
    peak: int
    images_per_second: float
    fits: bool
    remark: str


@dataclass(frozen=True)
class Plan:
    """Everything that `megaclass plan` prints."""

    job: PlannedJob
    memory: Memory
    loader: LoaderPlan
    sent: list[Exchange]
    time: StepTime
    exchange_s: float
    decode_rate: float | None
    """Images per second that one thread of this machine reads and decodes; None if there is no data here."""
    largest_batch: int
    largest_classes: int
    advice: list[Advice]

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.job.gpu.memory)

    @property
    def step_s(self) -> float:
        return self.time.compute + self.exchange_s

    @property
    def images_per_second(self) -> float:
        return self.job.config.train.global_batch / self.step_s

    @property
    def epoch_s(self) -> float:
        return self.job.num_images / self.images_per_second

    @property
    def total_s(self) -> float:
        return self.epoch_s * self.job.config.train.epochs

    @property
    def checkpoint_bytes(self) -> int:
        """Of all ranks together: weights and optimizer state of backbone and centres."""
        parts, head = self.memory.parts, head_costs(self.job)
        shared = sum(parts.get(name, 0) for name in ("backbone", "optimizer state", "moving average"))
        return shared + round((head.centres + head.row_state) * self.job.num_classes / self.job.local_classes)

    @property
    def threads_needed(self) -> int | None:
        """Reader threads per rank that keep up with the step, at the measured rate."""
        if not self.decode_rate:
            return None
        return math.ceil(self.images_per_second / self.job.num_ranks / self.decode_rate)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, in bytes and seconds."""
        config = self.job.config
        return {
            "gpu": self.job.gpu.name,
            "gpu_bytes": self.job.gpu.memory,
            "num_ranks": self.job.num_ranks,
            "num_hosts": self.job.num_hosts,
            "num_classes": self.job.num_classes,
            "num_images": self.job.num_images,
            "backbone": config.backbone.name,
            "global_batch": config.train.global_batch,
            "fits": self.fits,
            "peak_bytes": self.memory.peak,
            "usable_bytes": round((self.job.gpu.memory - OUTSIDE_TORCH) * USABLE),
            "bytes": self.memory.parts,
            "peak_moment": self.memory.peak_moment,
            "host_loader_bytes": self.memory.host_loader,
            "loader_processes_per_rank": self.loader.num_processes,
            "reader_threads_per_rank": self.loader.num_threads,
            "exchanges": [asdict(one) for one in self.sent],
            "step_s": {**asdict(self.time), "exchange": self.exchange_s, "total": self.step_s},
            "images_per_second": self.images_per_second,
            "epoch_s": self.epoch_s,
            "total_s": self.total_s,
            "checkpoint_bytes": self.checkpoint_bytes,
            "decode_images_per_second_per_thread": self.decode_rate,
            "threads_needed_per_rank": self.threads_needed,
            "largest_global_batch": self.largest_batch,
            "largest_num_classes": self.largest_classes,
            "advice": [asdict(one) for one in self.advice],
        }


def make_plan(job: PlannedJob, *, decode_rate: float | None = None) -> Plan:
    """Plans the job. decode_rate: images per second that one thread reads and decodes here, if it was measured."""
    _check(job)
    memory, sent, seconds = plan_memory(job), exchanges(job), step_time(job)
    return Plan(
        job=job,
        memory=memory,
        loader=plan_loader(job),
        sent=sent,
        time=seconds,
        exchange_s=exposed_seconds(job, sent, seconds.backbone),
        decode_rate=decode_rate,
        largest_batch=_largest(lambda images: _with_batch(job, job.num_ranks * images), job.gpu.memory) * job.num_ranks,
        largest_classes=_largest(lambda classes: replace(job, num_classes=job.num_ranks * classes), job.gpu.memory)
        * job.num_ranks,
        advice=_advice(job),
    )


def _check(job: PlannedJob) -> None:
    if job.config.train.global_batch < job.num_ranks:
        raise UserError(
            f"train.global_batch is {job.config.train.global_batch}, fewer than the {job.num_ranks} ranks of -np: every rank "
            f"needs at least two images, so set train.global_batch to {2 * job.num_ranks} or more."
        )
    if job.num_classes < job.num_ranks:
        raise UserError(
            f"There are {job.num_classes} classes, fewer than the {job.num_ranks} ranks of -np: every rank needs at least one."
        )


def _with_batch(job: PlannedJob, batch: int) -> PlannedJob:
    accumulate = min(job.config.train.accumulate, batch)
    return job.with_settings(train={"global_batch": batch, "accumulate": accumulate})


def _largest(job_of: Callable[[int], PlannedJob], memory: int) -> int:
    """Returns the largest number whose job fits; 0 if 1 does not."""
    low, high = 0, 1
    while high < 2**40 and plan_memory(job_of(high)).fits(memory):
        low, high = high, 2 * high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if plan_memory(job_of(middle)).fits(memory) else (low, middle)
    return low


def _advice(job: PlannedJob) -> list[Advice]:
    """Tries the settings that usually matter, and returns those that change the answer most."""
    config = job.config
    batch, stored = config.train.global_batch, job.stored_bytes / 2**30
    accumulate = 2 * config.train.accumulate
    with_settings = job.with_settings
    tries: list[tuple[str, PlannedJob, str]] = [
        (f"train.global_batch={2 * batch}", _with_batch(job, 2 * batch), "adapt optimizer.lr"),
        (f"train.accumulate={accumulate}", with_settings(train={"accumulate": accumulate}), "the same step in parts"),
        ("head.storage=bf16", with_settings(head={"storage": "bf16"}), "centres are rounded stochastically"),
        ("head.optimizer=adagrad", with_settings(head={"optimizer": "adagrad"}), "needs another learning rate"),
        (
            "backbone.checkpoint_activations=true",
            with_settings(backbone={"checkpoint_activations": True}),
            "repeats the forward in backward",
        ),
        (f"-np {2 * job.num_ranks}", replace(job, num_ranks=2 * job.num_ranks), "twice the GPUs"),
        (f"head.stored_gib={stored / 4:g}", with_settings(head={"stored_gib": stored / 4}), "computes more again"),
    ]
    if job.sample_rate > 0.1:
        sampled = job.with_settings(head={"sample_rate": 0.1})
        tries.insert(0, ("head.sample_rate=0.1", sampled, "see benchmarks/sampling_accuracy.md"))
    if not config.is_compiled(on_gpu=True) and config.backbone.name.startswith("vit"):
        tries.append(("train.compile=true", job.with_settings(train={"compile": True}), "compiles at the start"))
    if job.num_ranks > 1 and config.train.compression == "none":
        tries.append(
            ("train.compression=bf16", job.with_settings(train={"compression": "bf16"}), "gradients travel in 16 bits")
        )
    replayed = job.with_settings(train={"cuda_graph": "on"})
    if replayed.replays_backbone and not job.replays_backbone:
        tries.append(
            ("train.cuda_graph=on", replayed, "the host starts a step with fewer calls; auto finds out by itself")
        )
    if batch // 2 >= 2 * job.num_ranks:
        tries.append((f"train.global_batch={batch // 2}", _with_batch(job, batch // 2), "adapt optimizer.lr"))
    now = _numbers(job)
    found = []
    for setting, changed, remark in tries:
        if changed == job or not _is_possible(changed):
            continue
        peak, speed, fits = _numbers(changed)
        gain = speed / now[1] - 1
        saved = 1 - peak / now[0]
        # Where the job does not fit, memory decides; where it does, speed.
        worth = gain if now[2] and fits else saved + (10 if fits and not now[2] else 0)
        if worth > _WORTH_SAYING and (fits or not now[2]):
            found.append((worth, Advice(setting, peak, speed, fits, remark)))
    found.sort(key=lambda pair: -pair[0])
    return [one for _, one in found[:_NUM_ADVICE]]


def _is_possible(job: PlannedJob) -> bool:
    has_blocks = job.config.backbone.name.startswith(("iresnet", "vit"))
    return (
        has_blocks or not job.config.backbone.checkpoint_activations
    ) and job.max_batch >= 2 * job.config.train.accumulate


def _numbers(job: PlannedJob) -> tuple[int, float, bool]:
    memory, seconds = plan_memory(job), step_time(job)
    exchange_s = exposed_seconds(job, exchanges(job), seconds.backbone)
    speed = job.config.train.global_batch / (seconds.compute + exchange_s)
    return memory.peak, speed, memory.fits(job.gpu.memory)


_BAR = 40


def plan_text(plan: Plan) -> str:
    """Returns the verdict first, then the tables."""
    job, config = plan.job, plan.job.config
    hosts = f" on {plan.job.num_hosts} hosts" if plan.job.num_hosts > 1 else ""
    lines = [
        f"{config.backbone.name}, {job.num_classes:,} classes, {job.num_images:,} images, global batch "
        f"{config.train.global_batch:,}, {job.num_ranks} × {job.gpu.name}{hosts}",
        *_about_cpu(plan),
        "",
        _verdict(plan),
        "",
        f"Memory per rank at its peak ({plan.memory.peak_moment})",
    ]
    peak = plan.memory.peak
    for name, size in plan.memory.parts.items():
        lines.append(f"  {name:24}{size_text(size):>12}  {'#' * round(_BAR * size / peak)}")
    lines += [f"  {'in all':24}{size_text(peak):>12}  of {size_text(job.gpu.memory)}"]
    lines += [f"  {'loader, host memory':24}{size_text(plan.memory.host_loader):>12}"]
    lines += ["", "A step on each rank"]
    for name, seconds in (
        ("backbone", plan.time.backbone),
        ("head", plan.time.head),
        ("update", plan.time.update),
        ("waiting for launches", plan.time.waiting),
        ("exchanges not hidden", plan.exchange_s),
        ("in all", plan.step_s),
    ):
        lines.append(f"  {name:24}{1e3 * seconds:>9.2f} ms")
    if plan.sent:
        lines += ["", "Exchanges of a step"]
        lines += [
            f"  {one.name:34}{one.collective:16}{size_text(one.buffer):>12}{1e3 * one.seconds:>9.2f} ms"
            for one in plan.sent
        ]
    lines += [
        "",
        f"Speed         {plan.images_per_second:,.0f} images/s, {duration_text(plan.epoch_s)} per epoch, "
        f"{duration_text(plan.total_s)} for {config.train.epochs:g} epochs",
        f"Checkpoint    {size_text(plan.checkpoint_bytes)}",
        f"Data          {_data(plan)}",
        f"Would fit     a global batch of {plan.largest_batch:,}, or {plan.largest_classes:,} classes",
    ]
    if plan.advice:
        lines += ["", "Settings that would change it most"]
        lines += [
            f"  {one.setting:38}{size_text(one.peak):>11}{one.images_per_second:>12,.0f} images/s"
            f"{'' if one.fits else ', does not fit'}  ({one.remark})"
            for one in plan.advice
        ]
    return "\n".join(lines)


def _about_cpu(plan: Plan) -> list[str]:
    if plan.job.config.train.device != "cpu":
        return []
    return ["The recipe trains on a CPU (train.device=cpu), which is not planned: these are the numbers of GPUs."]


def _verdict(plan: Plan) -> str:
    memory, share = plan.job.gpu.memory, plan.memory.peak / plan.job.gpu.memory
    if plan.fits:
        return f"Fits: {size_text(plan.memory.peak)} of {size_text(memory)} per GPU ({share:.0%})."
    helping = next((one for one in plan.advice if one.fits), None)
    hint = f" It would with {helping.setting}." if helping else ""
    return f"Does not fit: {size_text(plan.memory.peak)} are needed per GPU, which has {size_text(memory)}.{hint}"


def _data(plan: Plan) -> str:
    per_rank = plan.images_per_second / plan.job.num_ranks
    needed = f"{per_rank:,.0f} images/s per rank are needed"
    if plan.decode_rate is None or plan.threads_needed is None:
        return f"{needed}; nothing was measured, because there is no data here"
    loader = plan.loader
    here = f"{loader.num_threads} thread" + "s" * (loader.num_threads > 1)
    if loader.num_processes:
        here += f" in {loader.num_processes} loader process" + "es" * (loader.num_processes > 1)
    indent = f"\n{'':14}"
    reads = f"{needed}; one thread of this machine{indent}reads and decodes {plan.decode_rate:,.0f}, so {plan.threads_needed}"
    if loader.num_threads >= plan.threads_needed:
        return f"{reads} keep up; each rank has {here}"
    per_process = plan.job.config.data.threads
    change = f"data.workers={-(-plan.threads_needed // per_process)}"
    return f"{reads} would keep up;{indent}each rank has {here}: set {change} if the host has the cores"
