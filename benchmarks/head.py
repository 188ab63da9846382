"""Times of the head, every alternative in one run, as a table with ratios.

    python benchmarks/head.py               # on a CPU: the chunked kernel against a dense classifier
                                            # on a GPU: four shapes; fused, chunked, dense, torch.compile
    python benchmarks/head.py --variants    # other margins, several labels, weights, inner products against ArcFace
    python benchmarks/head.py --huge        # 100 million classes on one GPU
    python benchmarks/head.py --simulate    # one rank of 64 at 100 million classes
    python benchmarks/head.py --pulls       # lists of the images of each class, up to a global batch of 262,144
    python benchmarks/head.py --output benchmarks/head-h200.md

A step is forward, backward and the update of the centres by SGD with momentum, with ArcFace unless said otherwise. On a
GPU a time is the median interval between the starts of steps that follow each other without a pause, by CUDA events;
the fused steps run under torch.cuda.set_sync_debug_mode("error"). Memory is the peak of allocated bytes.
"""

import argparse
import contextlib
import datetime
import gc
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaclass import (
    ArcFace,
    CosFace,
    DynamicArcFace,
    ElasticFace,
    InterTopK,
    NormalisedSoftmax,
    PartialFC,
    RowAdagrad,
    RowSGD,
    SphereFace2,
    UniFace,
)

D = 512
SCALE, MARGIN, MOMENTUM, DECAY, LR = 64.0, 0.5, 0.9, 5e-4, 0.1
GIB = 2**30
Step = Callable[[Tensor, Tensor], Tensor]


# ---- the alternatives -------------------------------------------------------------------------------------------


def head_step(
    num_classes: int, device: torch.device, *, num_labels: int = 1, weights: Tensor | None = None, **options: Any
) -> tuple[Step, PartialFC]:
    options = {
        "margin": ArcFace(scale=SCALE, margin=MARGIN),
        "optimizer": RowSGD(momentum=MOMENTUM, weight_decay=DECAY),
        "max_labels": num_labels,
        "weighted": weights is not None,
        **options,
    }
    head = PartialFC(D, num_classes, device=device, **options)
    # Further labels are as far apart as they can be, so an image has none twice.
    offsets = torch.arange(num_labels, device=device) * (num_classes // num_labels)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = head(x, y if num_labels == 1 else (y[:, None] + offsets) % num_classes, weights)
        loss.backward()
        head.step(lr=LR)
        return loss.detach()

    return step, head


def arcface_loss(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    cosines = F.linear(F.normalize(x), F.normalize(weight).to(x.dtype)).to(weight.dtype)
    target = cosines.gather(1, y[:, None]).clamp(-1 + 1e-7, 1 - 1e-7)
    shifted = torch.cos(torch.acos(target) + MARGIN)
    shifted = torch.where(target > -math.cos(MARGIN), shifted, target - MARGIN * math.sin(MARGIN))
    return F.cross_entropy(SCALE * cosines.scatter(1, y[:, None], shifted), y)


def plain_loss(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(SCALE * F.linear(F.normalize(x), F.normalize(weight).to(x.dtype)), y)


def dense_step(num_classes: int, device: torch.device, *, is_compiled: bool) -> Step:
    """All classes in one matrix: with the margin as it is usually written, or plain cross entropy, compiled."""
    weight = torch.nn.Parameter(torch.randn(num_classes, D, device=device).mul_(0.01))
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=device.type == "cuda")
    loss_of = torch.compile(plain_loss) if is_compiled else arcface_loss

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, weight, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# ---- measuring --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_waits(is_asked: bool) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error" if is_asked else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batches(size: int, num_classes: int, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, D, generator=generator).to(device, dtype),
            torch.randint(num_classes, (size,), generator=generator).to(device),
        )
        for _ in range(4)
    ]


def gpu_time(
    make: Callable[[], Step], size: int, num_classes: int, *, steps: int, no_waits: bool
) -> tuple[float, float]:
    """Median milliseconds a step, peak GiB."""
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    data = batches(size, num_classes, device, torch.bfloat16)
    step = make()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for index in range(4):  # compiles, fills caches
        step(data[index][0].requires_grad_(), data[index][1])
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    with without_waits(no_waits):
        for index, event in enumerate(events):
            event.record()
            if index < steps:
                x, y = data[index % len(data)]
                x.grad = None
                step(x, y)
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    peak = torch.cuda.max_memory_allocated() / GIB
    # What holds itself in a circle would otherwise still be there for the next alternative.
    del step, data
    gc.collect()
    torch.compiler.reset()
    return statistics.median(times), peak


def try_gpu_time(name: str, *args: Any, **options: Any) -> tuple[float, float] | None:
    try:
        return gpu_time(*args, **options)
    except torch.OutOfMemoryError:
        print(f"{name}: out of memory", flush=True)
        return None


# ---- tables -----------------------------------------------------------------------------------------------------

# B, C, r, bytes kept, what must be reached
SHAPES = [
    (1024, 1 << 20, 1.0, None, "8.0 ms, 8 GiB"),
    (4096, 1 << 20, 1.0, None, "23 ms, 14 GiB"),
    (4096, 1 << 20, 1.0, 1200 << 20, "34 ms, 6 GiB"),
    (1024, 2 << 20, 0.1, None, "2.5 ms, 9 GiB"),
    (4096, 4 << 20, 0.1, None, "9.5 ms, 21 GiB"),
]
INSIGHTFACE_MS = {(1024, 1 << 20): 135.1, (4096, 1 << 20): 469.9, (1024, 2 << 20): 62.9, (4096, 4 << 20): 267.8}


def gpu_table() -> list[str]:
    lines = [
        "| B, C, r | kernel | time | peak memory | time / fused | must reach |",
        "|---|---|---|---|---|---|",
    ]
    device = torch.device("cuda")
    for size, num_classes, rate, stored, goal in SHAPES:
        options = {"sample_rate": rate, "max_batch": size, "stored_bytes": stored}
        is_low = stored is not None

        def head(kernel: str, count: int = num_classes, options: dict[str, Any] = options) -> Callable[[], Step]:
            return lambda: head_step(count, device, kernel=kernel, **options)[0]

        def dense(is_compiled: bool, count: int = num_classes) -> Callable[[], Step]:
            return lambda: dense_step(count, device, is_compiled=is_compiled)

        makers: list[tuple[str, Callable[[], Step], int]] = [("triton_fused", head("triton_fused"), 30)]
        if not is_low:
            makers.append(("chunked", head("chunked"), 6))
            if rate == 1:
                makers.append(("dense eager bf16, ArcFace", dense(False), 4))
                makers.append(("torch.compile, bf16, no margin", dense(True), 8))
        fused_ms = math.nan
        for name, make, steps in makers:
            outcome = try_gpu_time(
                name, make, size, num_classes, steps=steps, no_waits=name in ("triton_fused", "chunked")
            )
            if outcome is None:
                lines.append(f"| {size}, {num_classes:,}, {rate:g} | {name} | out of memory | | | |")
                continue
            ms, peak = outcome
            is_fused = name == "triton_fused"
            fused_ms = ms if is_fused else fused_ms
            label = name + (f", {stored >> 20} MiB kept" if stored is not None else "")
            lines.append(
                f"| {size}, {num_classes:,}, {rate:g} | {label} | {ms:.2f} ms | {peak:.2f} GiB | {ms / fused_ms:.2f} "
                f"| {goal if is_fused else ''} |"
            )
            print(lines[-1], flush=True)
        if not is_low:
            known = INSIGHTFACE_MS[size, num_classes]
            lines.append(
                f"| {size}, {num_classes:,}, {rate:g} | InsightFace as shipped, measured earlier | {known} ms | "
                f"| {known / fused_ms:.1f} | |"
            )
    return lines


def variants(num_classes: int, device: torch.device, size: int) -> list[tuple[str, dict[str, Any], float | None]]:
    """Name, options, and the largest time allowed, as a multiple of ArcFace's; None: any."""
    counts = torch.arange(num_classes, 0, -1.0)
    inner = {"similarity": "inner", "margin": NormalisedSoftmax(scale=1.0)}
    in_batch = {"negatives": "in-batch", "class_counts": counts, "sample_rate": 0.1}
    return [
        ("ArcFace", {}, None),
        ("CosFace", {"margin": CosFace(scale=SCALE)}, 1.05),
        ("dynamic margins", {"margin": DynamicArcFace(scale=SCALE), "class_counts": counts}, 1.05),
        ("margin schedule", {"margin_schedule": [(0, 0.0), (1000, 1.0)]}, 1.05),
        ("elastic margins", {"margin": ElasticFace(scale=SCALE)}, 1.05),
        ("8 labels", {"num_labels": 8}, 1.2),
        ("8 labels, decoupled", {"num_labels": 8, "loss": "decoupled"}, 1.2),
        ("weights", {"weights": torch.ones(size, device=device)}, None),
        ("inner products, bias", {**inner, "bias": True}, None),
        ("ArcFace, a tenth uniform", {"sample_rate": 0.1}, None),
        # What the programs over images save: with weights this work is plain PyTorch.
        ("weights, a tenth uniform", {"sample_rate": 0.1, "weights": torch.ones(size, device=device)}, None),
        ("ArcFace, a tenth in-batch", in_batch, None),
        ("UniFace", {"margin": UniFace(scale=SCALE)}, 1.05),
        ("SphereFace2", {"margin": SphereFace2()}, 1.05),
        ("inter-topk", {"margin": InterTopK(scale=SCALE)}, 1.05),
        ("label smoothing", {"label_smoothing": 0.1}, None),
        ("ArcFace, again", {}, None),
    ]


def variants_table(size: int = 1024, num_classes: int = 1 << 20) -> list[str]:
    device = torch.device("cuda")
    lines = [
        f"B = {size}, C = {num_classes:,}, all negatives unless said otherwise. A kernel that is not fused is named.",
        "",
        "| variant | kernel | time | peak memory | time / ArcFace | at most |",
        "|---|---|---|---|---|---|",
    ]
    base = math.nan
    with warnings.catch_warnings():
        # The head warns that it takes the plain kernel; the table says so.
        warnings.simplefilter("ignore")
        for name, options, limit in variants(num_classes, device, size):
            kernels: list[str] = []

            def make(options: dict[str, Any] = options, kernels: list[str] = kernels) -> Step:
                step, head = head_step(num_classes, device, max_batch=size, **options)
                kernels.append("fused" if head.kernel.__name__.endswith("gpu.kernel") else "chunked")
                return step

            outcome = try_gpu_time(name, make, size, num_classes, steps=20, no_waits=True)
            if outcome is None:
                lines.append(f"| {name} | {kernels[0]} | out of memory | | | |")
                continue
            ms, peak = outcome
            base = ms if name == "ArcFace" else base
            is_met = "" if limit is None else f"{limit:g}: {'met' if ms <= limit * base else '**not met**'}"
            lines.append(f"| {name} | {kernels[0]} | {ms:.2f} ms | {peak:.2f} GiB | {ms / base:.3f} | {is_met} |")
            print(lines[-1], flush=True)
    return lines


def error_table() -> list[str]:
    """Relative errors against float64 for the same bfloat16 embeddings and float32 centres."""
    device = torch.device("cuda")
    size, num_classes = 256, 4000
    (x, y), *_ = batches(size, num_classes, device, torch.bfloat16)
    heads = {
        name: head_step(num_classes, device, kernel=name, optimizer=RowSGD(momentum=0.0), max_batch=size)[1]
        for name in ("triton_fused", "chunked")
    }
    weight = heads["chunked"].rows()["weight"].clone()

    def dense(dtype: torch.dtype, matrix: Tensor) -> tuple[Tensor, ...]:
        leaf, matrix = x.detach().to(dtype).requires_grad_(), matrix.clone().requires_grad_()
        loss = arcface_loss(leaf, matrix, y)
        loss.backward()
        assert leaf.grad is not None and matrix.grad is not None
        return loss.detach(), leaf.grad, matrix.grad

    truth = dense(torch.float64, weight.double())
    outcomes = {"plain bf16": dense(torch.bfloat16, weight)}
    for name, head in heads.items():
        leaf = x.detach().clone().requires_grad_()
        loss = head(leaf, y)
        loss.backward()
        head.step(lr=1.0)
        assert leaf.grad is not None
        outcomes[name] = (loss.detach(), leaf.grad, weight - head.rows()["weight"])
    lines = [
        "| B = 256, C = 4,000 | loss | gradient of the embeddings | gradient of the centres |",
        "|---|---|---|---|",
    ]
    for name, values in outcomes.items():
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(values, truth, strict=True)]
        lines.append(f"| {name} | {errors[0]:.1e} | {errors[1]:.1e} | {errors[2]:.1e} |")
    return lines


def cpu_table() -> list[str]:
    """One thread, and its processor time next to the clock's: on a busy machine only the former means something."""
    size, num_classes, rounds = 256, 100_000, 5
    device = torch.device("cpu")
    torch.set_num_threads(1)
    data = batches(size, num_classes, device, torch.float32)
    steps = {
        "chunked": head_step(num_classes, device, kernel="chunked")[0],
        "dense eager": dense_step(num_classes, device, is_compiled=False),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for index in range(rounds + 1):  # alternating, so a busy machine slows both alike
        for name, step in steps.items():
            x, y = data[index % len(data)]
            start = time.process_time(), time.perf_counter()
            step(x.detach().requires_grad_(), y)
            if index:
                times[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    base = medians["dense eager"]
    lines = [
        f"| B = {size}, C = {num_classes:,}, float32, one thread | processor time | by the clock | processor time / dense |",
        "|---|---|---|---|",
    ]
    for name, (processor, clock) in medians.items():
        lines.append(f"| {name} | {processor:.2f} s | {clock:.2f} s | {processor / base[0]:.2f} |")
    return lines


def huge_table() -> list[str]:
    """One repeated batch whose labels are spread over all classes."""
    device, num_classes, size, rate, num_steps = torch.device("cuda"), 100_000_000, 1024, 0.01, 24
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, D, generator=generator).to(device, torch.bfloat16).requires_grad_()
    y = (torch.arange(size) * (num_classes - 1) // (size - 1)).to(device)
    lines = [
        f"| {num_classes:,} classes, bf16, r = {rate}, B = {size} | time | peak memory | loss, first -> last of {num_steps} |",
        "|---|---|---|---|",
    ]
    for optimizer, lr in ((RowAdagrad(), 0.0005), (RowSGD(momentum=0.0), 0.05)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        options = {"sample_rate": rate, "storage": "bf16", "optimizer": optimizer, "max_batch": size}
        head = PartialFC(D, num_classes, margin=ArcFace(scale=SCALE, margin=MARGIN), device=device, **options)
        events, losses = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)], []
        for index in range(num_steps):
            with without_waits(index >= 4):
                events[index].record()
                x.grad = None
                loss = head(x, y)
                loss.backward()
                head.step(lr=lr)
                losses.append(loss.detach())
        events[num_steps].record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(events[4:])]
        curve = [loss.item() for loss in losses]
        falls = all(b < a for a, b in pairwise(curve[::4]))
        lines.append(
            f"| {type(optimizer).__name__}, lr {lr} | {statistics.median(times):.2f} ms | "
            f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB | {curve[0]:.2f} -> {curve[-1]:.2f}"
            f"{', falling throughout' if falls else ''} |"
        )
        print(lines[-1], flush=True)
        del head, loss, losses
    return lines


def pulls_table() -> list[str]:
    """Time of listing the images of each row, for which the update needs them, by the size of the global batch."""
    from megaclass.head.gpu.rows import link_pulls

    num_rows, repeats = 1 << 20, 20
    lines = ["| G | ms | ns per image |", "|---|---|---|"]
    for size in (1024, 4096, 8192, 65_536, 262_144):
        slots = torch.randint(num_rows, (size,), device="cuda")
        images, weights = torch.zeros(size, 1, device="cuda"), torch.zeros(size, device="cuda")

        def run(slots: Tensor = slots, images: Tensor = images, weights: Tensor = weights) -> None:
            link_pulls(slots, slots, images, weights, num_rows, 1)

        for _ in range(3):
            run()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        stop.synchronize()
        ms = start.elapsed_time(stop) / repeats
        lines.append(f"| {size:,} | {ms:.3f} | {ms * 1e6 / size:.1f} |")
        print(lines[-1], flush=True)
    return lines


def simulation_table() -> list[str]:
    """Rank 0 of 64 with a process group that sends nothing; what the other ranks would send is a copy of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import megaclass_launch.ranks.collectives as collectives
    from megaclass.head import gather_batch, settings
    from megaclass.head import step as head_step_module
    from megaclass.head.gpu import images as gpu_images

    world, num_classes, per_rank, rate, num_steps = 64, 100_000_000, 128, 0.1, 24
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    sent: dict[str, int] = {}

    def gather_blocks(block: Tensor, group: Any) -> Tensor:
        blocks_W = collectives.gather_blocks(block, group)
        sent["all-gather"] = blocks_W.nbytes
        return blocks_W.copy_(block.expand_as(blocks_W))

    def sum_over_ranks_(tensor: Tensor, group: Any) -> Tensor:
        sent["all-reduce"] = tensor.nbytes
        return collectives.sum_over_ranks_(tensor, group)

    def scatter_sum(blocks_W: Tensor, group: Any) -> Tensor:
        sent["reduce-scatter"] = blocks_W.nbytes
        collectives.scatter_sum(blocks_W, group)
        return blocks_W[0]

    for module in (settings, gather_batch, gpu_images):
        module.gather_blocks = gather_blocks  # type: ignore[attr-defined]
    head_step_module.sum_over_ranks_ = sum_over_ranks_  # type: ignore[attr-defined]
    gpu_images.scatter_sum = scatter_sum  # type: ignore[attr-defined]
    options = {"sample_rate": rate, "max_batch": per_rank}
    # Labels are drawn over all classes: most belong to other ranks.
    ms, peak = gpu_time(
        lambda: head_step(num_classes, torch.device("cuda"), **options)[0],
        per_rank,
        num_classes,
        steps=num_steps,
        no_waits=True,
    )
    dist.destroy_process_group()
    lines = [
        f"One rank of {world}: {num_classes:,} classes in all, {num_classes // world:,} here, r = {rate}, "
        f"B = {per_rank} a rank (G = {world * per_rank:,}), float32 with momentum: "
        f"compute **{ms:.2f} ms** a step, **{peak:.2f} GiB**.",
        "",
        "| exchange | bytes of the whole buffer | NVLink, 350 GB/s a GPU | 100 Gbit Ethernet, 11 GB/s a node |",
        "|---|---|---|---|",
    ]
    totals = [ms, ms]
    for name, num_bytes in sent.items():
        # A ring sends (W - 1) / W of the buffer through every link, an all-reduce twice that.
        moved = num_bytes * (world - 1) / world * (2 if name == "all-reduce" else 1)
        costs = [moved / 350e9 * 1e3 + 0.05, moved / 11e9 * 1e3 + 0.2]
        totals = [total + cost for total, cost in zip(totals, costs, strict=True)]
        lines.append(f"| {name} | {num_bytes:,} | {costs[0]:.2f} ms | {costs[1]:.2f} ms |")
    lines.append(f"| step, nothing overlapped | | **{totals[0]:.2f} ms** | **{totals[1]:.2f} ms** |")
    lines.append("")
    lines.append("Each exchange is charged 0.05 ms (NVLink) or 0.2 ms (Ethernet) of latency in addition to its bytes.")
    return lines


def heading(device: str) -> str:
    versions = f"torch {torch.__version__}"
    if device == "cuda":
        import triton

        versions += f", Triton {triton.__version__}, Python {platform.python_version()}"
        name = torch.cuda.get_device_name()
    else:
        name = f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, {versions}, {datetime.date.today().isoformat()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="margins, several labels, weights, inner products")
    parser.add_argument("--huge", action="store_true", help="100 million classes on one GPU")
    parser.add_argument("--simulate", action="store_true", help="one rank of 64 at 100 million classes")
    parser.add_argument("--pulls", action="store_true", help="lists of the images of each class")
    parser.add_argument("--all", action="store_true", help="the shapes, --huge and --simulate")
    parser.add_argument("--output", type=Path, help="file for the tables (Markdown)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_special = args.huge or args.simulate or args.pulls or args.variants
    if (is_special or args.all) and device == "cpu":
        parser.error("--variants, --huge, --simulate, --pulls and --all need a GPU, and torch sees none.")
    lines = [f"# The head: {heading(device)}", "", *(__doc__ or "").split("\n\n")[-1].strip().splitlines(), ""]
    if device == "cpu":
        lines += cpu_table()
    else:
        if not is_special:
            lines += ["## Time and memory", "", *gpu_table(), "", "## Error against float64", "", *error_table(), ""]
        if args.variants or args.all:
            lines += ["## Variants", "", *variants_table(), ""]
        if args.simulate or args.all:
            lines += ["## One rank of 64, simulated", "", *simulation_table(), ""]
        if args.pulls:
            lines += ["## Lists of the images of each class", "", *pulls_table(), ""]
        if args.huge or args.all:
            lines += ["## 100 million classes on one GPU", "", *huge_table(), ""]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
