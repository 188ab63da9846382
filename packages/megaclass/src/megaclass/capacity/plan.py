"""The plan of a job: memory, exchanges, speed, what would fit, and all of it as text."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from megaclass.capacity.job import PlannedJob, head_costs
from megaclass.capacity.memory import OUTSIDE_TORCH, USABLE, Memory, plan_memory
from megaclass.capacity.speed import exchanges, step_time
from megaclass.data.loading.choose import automatic_processes
from megaclass.progress import duration_text, size_text
from megaclass_launch.errors import UserError

_MOST_RANKS = 1024
_SAMPLED = 0.1
"""The sample rate that is proposed; benchmarks/sampling_accuracy.md has its accuracy."""
_Setting = tuple[str, dict[str, dict[str, object]], int]


def make_plan(job: PlannedJob, *, decode_rate: float | None = None) -> dict[str, Any]:
    """Returns everything that `megaclass plan` prints, as plain values in bytes and seconds.

    decode_rate: images per second that one thread reads and decodes here, if it was measured.
    """
    _check(job)
    config, gpu = job.config, job.gpu.memory
    memory, sent, seconds, num_processes = plan_memory(job), exchanges(job), step_time(job), _loader_processes(job)
    speed = config.train.global_batch / seconds.total
    return {
        "gpu": job.gpu.name,
        "gpu_bytes": gpu,
        "num_ranks": job.num_ranks,
        "num_hosts": job.num_hosts,
        "num_classes": job.num_classes,
        "num_images": job.num_images,
        "backbone": config.backbone.name,
        "global_batch": config.train.global_batch,
        "fits": memory.fits(gpu),
        "peak_bytes": memory.peak,
        "usable_bytes": round((gpu - OUTSIDE_TORCH) * USABLE),
        "bytes": memory.parts,
        "peak_moment": memory.peak_moment,
        "loader_processes_per_rank": num_processes,
        "reader_threads_per_rank": num_processes or config.data.threads,
        "exchanges": [asdict(one) for one in sent],
        "step_s": {**asdict(seconds), "waiting": seconds.waiting, "total": seconds.total},
        "images_per_second": speed,
        "epoch_s": job.num_images / speed,
        "total_s": config.train.epochs * job.num_images / speed,
        "checkpoint_bytes": _checkpoint_bytes(job, memory),
        "decode_images_per_second_per_thread": decode_rate,
        # Reader threads that keep up with the step.
        "threads_needed_per_rank": math.ceil(speed / job.num_ranks / decode_rate) if decode_rate else None,
        "largest_global_batch": _largest(lambda images: _with_batch(job, job.num_ranks * images)) * job.num_ranks,
        "largest_num_classes": _largest(lambda classes: replace(job, num_classes=job.num_ranks * classes))
        * job.num_ranks,
        "smallest_that_fit": smallest_that_fit(job),
    }


def _loader_processes(job: PlannedJob) -> int:
    """Returns the number of data.workers; `auto` chooses by the CPU cores of this machine."""
    workers = job.config.data.workers
    return automatic_processes(min(job.num_ranks, job.ranks_per_host)) if workers == "auto" else workers


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


def _checkpoint_bytes(job: PlannedJob, memory: Memory) -> int:
    """Counts weights and optimizer state of backbone and centres, of all ranks together."""
    head = head_costs(job)
    shared = sum(memory.parts.get(name, 0) for name in ("backbone", "optimizer state", "moving average"))
    shared *= job.num_ranks if job.config.train.shard_backbone else 1
    return shared + round((head.centres + head.row_state) * job.num_classes / job.local_classes)


def _with_batch(job: PlannedJob, batch: int) -> PlannedJob:
    accumulate = min(job.config.train.accumulate, batch)
    return job.with_settings(train={"global_batch": batch, "accumulate": accumulate})


def _fits(job: PlannedJob) -> bool:
    return plan_memory(job).fits(job.gpu.memory)


def _largest(job_of: Callable[[int], PlannedJob]) -> int:
    """Returns the largest number whose job fits; 0 if 1 does not."""
    low, high = 0, 1
    while high < 2**40 and _fits(job_of(high)):
        low, high = high, 2 * high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(job_of(middle)) else (low, middle)
    return low


def smallest_that_fit(job: PlannedJob) -> list[dict[str, Any]]:
    """Searches numbers of ranks, storage, sample rate and batch: answers how many GPUs the job needs.

    The changes that alter the training least come first. Each later entry alters it more, and needs fewer GPUs than all
    before it; the last one is the smallest job. `setting` is what to type on the command line.
    """
    batch, parts = job.config.train.global_batch, job.config.train.accumulate
    # Settings as typed, the same for with_settings, and how much they alter the training.
    unchanged: _Setting = ("", {}, 0)
    storages: list[_Setting] = [unchanged, ("head.storage=bf16", {"head": {"storage": "bf16"}}, 1)]
    rates: list[_Setting] = [unchanged]
    if job.sample_rate > _SAMPLED:
        rates.append((f"head.sample_rate={_SAMPLED}", {"head": {"sample_rate": _SAMPLED}}, 2))
    batches: list[_Setting] = [unchanged]
    batches += [(f"train.accumulate={times * parts}", {"train": {"accumulate": times * parts}}, 1) for times in (2, 4)]
    batches += [
        (f"train.global_batch={batch // part}", {"train": {"global_batch": batch // part, "accumulate": 1}}, part)
        for part in (2, 4, 8)
    ]
    found: list[dict[str, Any]] = []
    fewest = min(_MOST_RANKS, job.num_classes) + 1
    for changes in sorted(itertools.product(storages, rates, batches), key=lambda three: sum(one[2] for one in three)):
        changed = job
        for _, sections, _ in changes:
            changed = changed.with_settings(**sections)
        num_ranks = 1
        while num_ranks < fewest and _is_possible(candidate := replace(changed, num_ranks=num_ranks)):
            if (memory := plan_memory(candidate)).fits(job.gpu.memory):
                setting = " ".join([f"-np {num_ranks}", *(text for text, _, _ in changes if text)])
                speed = candidate.config.train.global_batch / step_time(candidate).total
                found.append({"setting": setting, "peak": memory.peak, "images_per_second": speed, "fits": True})
                fewest = num_ranks
            num_ranks *= 2
    return found


def _is_possible(job: PlannedJob) -> bool:
    """Batch norm needs two images in every part of a rank's batch."""
    return job.max_batch >= 2 * job.config.train.accumulate


_BAR = 40


def plan_text(plan: Mapping[str, Any], job: PlannedJob) -> str:
    """Returns the plan as text: the answer first, then the tables."""
    config, peak, seconds = job.config, plan["peak_bytes"], plan["step_s"]
    hosts = f" on {job.num_hosts} hosts" if job.num_hosts > 1 else ""
    lines = [
        f"{config.backbone.name}, {job.num_classes:,} classes, {job.num_images:,} images, global batch "
        f"{config.train.global_batch:,}, {job.num_ranks} × {job.gpu.name}{hosts}",
    ]
    if config.train.device == "cpu":
        lines += ["The recipe trains on a CPU (train.device=cpu), which is not planned: these are the numbers of GPUs."]
    lines += ["", _answer(plan), "", f"Memory per rank at its peak ({plan['peak_moment']})"]
    for name, size in plan["bytes"].items():
        lines.append(f"  {name:24}{size_text(size):>12}  {'#' * round(_BAR * size / peak)}")
    lines += [f"  {'in all':24}{size_text(peak):>12}  of {size_text(job.gpu.memory)}"]
    lines += ["", "A step on each rank"]
    for name, key in (
        ("backbone", "backbone"),
        ("head", "head"),
        ("update", "update"),
        ("waiting for launches", "waiting"),
        ("exchanges not hidden", "exchange"),
        ("in all", "total"),
    ):
        lines.append(f"  {name:24}{1e3 * seconds[key]:>9.2f} ms")
    if plan["exchanges"]:
        lines += ["", "Exchanges of a step"]
        lines += [
            f"  {one['name']:34}{one['collective']:16}{size_text(one['buffer']):>12}{1e3 * one['seconds']:>9.2f} ms"
            for one in plan["exchanges"]
        ]
    lines += [
        "",
        f"Speed         {plan['images_per_second']:,.0f} images/s, {duration_text(plan['epoch_s'])} per epoch, "
        f"{duration_text(plan['total_s'])} for {config.train.epochs:g} epochs",
        f"Checkpoint    {size_text(plan['checkpoint_bytes'])}",
        f"Data          {_data(plan)}",
        f"Would fit     {_would_fit(plan)}",
    ]
    if smallest := plan["smallest_that_fit"]:
        lines += ["", "Fewest GPUs that fit"]
        width = max(38, *(len(one["setting"]) for one in smallest))
        lines += [
            f"  {one['setting']:{width}}{size_text(one['peak']):>11}{one['images_per_second']:>12,.0f} images/s"
            for one in smallest
        ]
    return "\n".join(lines)


def _answer(plan: Mapping[str, Any]) -> str:
    memory, peak = plan["gpu_bytes"], plan["peak_bytes"]
    if plan["fits"]:
        return f"Fits: {size_text(peak)} of {size_text(memory)} per GPU ({peak / memory:.0%})."
    text = f"Does not fit: {size_text(peak)} are needed per GPU, which has {size_text(memory)}."
    if not plan["smallest_that_fit"]:
        return f"{text} Nothing fits on up to {_MOST_RANKS:,} of these GPUs: choose a smaller backbone or a larger GPU."
    return f"{text} It fits with {plan['smallest_that_fit'][0]['setting']}."


def _would_fit(plan: Mapping[str, Any]) -> str:
    batch, classes = plan["largest_global_batch"], plan["largest_num_classes"]
    with_batch = f"a global batch of {batch:,}" if batch else "no batch with these classes"
    with_classes = f"{classes:,} classes" if classes else "no number of classes with this batch"
    return f"{with_batch}, or {with_classes}"


def _data(plan: Mapping[str, Any]) -> str:
    needed = f"{plan['images_per_second'] / plan['num_ranks']:,.0f} images/s per rank are needed"
    threads, processes = plan["reader_threads_per_rank"], plan["loader_processes_per_rank"]
    wanted = plan["threads_needed_per_rank"]
    if wanted is None:
        return f"{needed}; nothing was measured, because there is no data here"
    here = (
        f"{processes} loader process" + "es" * (processes > 1)
        if processes
        else f"{threads} thread" + "s" * (threads > 1)
    )
    indent = f"\n{'':14}"
    decoded = f"{plan['decode_images_per_second_per_thread']:,.0f}"
    reads = f"{needed}; one thread of this machine{indent}reads and decodes {decoded}, so {wanted}"
    if threads >= wanted:
        return f"{reads} keep up; each rank has {here}"
    return f"{reads} would keep up;{indent}each rank has {here}: set data.workers={wanted} if the host has the cores"
