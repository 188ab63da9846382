"""The plan as text for a terminal."""

from megaclass.plan.plan import Plan
from megaclass.progress import duration_text, size_text

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
