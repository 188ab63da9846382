"""A model of the whole step on 8, 64 and 512 GPUs: python benchmarks/scaling.py [--out benchmarks/scaling.md]

Nothing here was measured on more than one GPU. Compute is measured (step-h200.md, head-h200.md), bytes are counted from the
code, link speeds are published ones; the text that is written names every assumption.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

DIM = 512
# Backbone, forward and backward, milliseconds per image: step-h200.md, batch 512. Parameters in millions.
BACKBONES = {"iresnet50": (56.7 / 512, 43.6), "iresnet100": (98.3 / 512, 65.2)}
# Head: fitted to four measured times (check below): TFLOP/s of the products, picoseconds per parameter of the sampled
# centres (normalisation, update), and milliseconds per step for everything of the size of the batch.
HEAD_TFLOPS, HEAD_PS_PER_PARAMETER, HEAD_FIXED_MS = 600.0, 5.1, 0.35
# (global batch, sampled classes on this rank, measured milliseconds)
MEASURED_HEADS = [
    (1024, 1_048_576, 8.52),
    (4096, 1_048_576, 25.01),
    (4096, 419_430 + 4096, 10.18),
    (8192, 156_250 + 128, 7.48),
]
# Published: NVLink 4 has 450 GB/s per direction and GPU; NDR InfiniBand 400 Gbit/s, one adapter per GPU; eight GPUs per host.
NVLINK_GBS, NETWORK_GBS, GPUS_PER_HOST = 450.0, 50.0, 8
# Assumptions: share of the published speed that large messages reach, and the time of one hop.
EFFICIENCY, HOP_US, NETWORK_HOP_US = 0.8, 4.0, 12.0
# Share of the backbone's time during which its gradients can travel: its backward pass.
OVERLAP = 2 / 3
# The host starts a step of iresnet50 in this time (step-h200.md), one of iresnet100 in twice as much. Smaller batches are
# replayed as CUDA graphs, and nothing travels during a backward that is one graph.
HOST_MS = {"iresnet50": 45.0, "iresnet100": 90.0}
# Decoded per second and core: bare simplejpeg in 15 processes, 80,300 images per second.
IMAGES_PER_CORE = 80_300 / 15
MEMORY_GIB = 140.0


@dataclass(frozen=True)
class Step:
    """Milliseconds of one step on every GPU."""

    backbone: float
    head: float
    head_messages: float
    gradients: float
    """Of the all-reduce that does not hide behind the backward pass."""
    images_per_second: float
    sampled: float
    centres_gib: float

    @property
    def total(self) -> float:
        return self.backbone + self.head + self.head_messages + self.gradients


def head_ms(global_batch: float, sampled: float) -> float:
    products = 6 * global_batch * sampled * DIM / (HEAD_TFLOPS * 1e12) * 1e3
    return products + sampled * DIM * HEAD_PS_PER_PARAMETER * 1e-9 + HEAD_FIXED_MS


def hops_ms(num_gpus: int) -> float:
    """Latency of one collective as a tree: within hosts, then between them."""
    inside = math.log2(min(num_gpus, GPUS_PER_HOST)) * HOP_US
    between = math.log2(max(1, num_gpus // GPUS_PER_HOST)) * NETWORK_HOP_US
    return (inside + between) / 1000


def gather_ms(total_bytes: float, num_gpus: int) -> float:
    """All-gather or reduce-scatter of `total_bytes` in all: each GPU receives nearly all of them."""
    if num_gpus == 1:
        return 0.0
    speed = NVLINK_GBS if num_gpus <= GPUS_PER_HOST else NETWORK_GBS
    # Between hosts every adapter carries an eighth of what its host needs; NVLink passes it on.
    per_link = total_bytes if num_gpus <= GPUS_PER_HOST else total_bytes / GPUS_PER_HOST
    passing_on = 0.0 if num_gpus <= GPUS_PER_HOST else total_bytes / (NVLINK_GBS * EFFICIENCY * 1e9) * 1e3
    return per_link / (speed * EFFICIENCY * 1e9) * 1e3 + passing_on + hops_ms(num_gpus)


def step(backbone: str, num_gpus: int, batch: int, num_classes: int, rate: float) -> Step:
    per_image, millions = BACKBONES[backbone]
    backbone_ms = per_image * batch
    global_batch = batch * num_gpus
    own = num_classes / num_gpus
    # Positives: distinct classes of the global batch, spread over the ranks, if labels are uniform.
    positives = num_classes * (1 - math.exp(-global_batch / num_classes)) / num_gpus
    sampled = own if rate == 1 else min(own, positives + rate * (own - positives))
    embeddings_bytes, gradients_bytes = global_batch * DIM * 2, global_batch * DIM * 4
    messages = gather_ms(embeddings_bytes + 8 * global_batch, num_gpus) + gather_ms(gradients_bytes, num_gpus)
    messages += 2 * gather_ms(16 * global_batch, num_gpus)
    all_reduce = 2 * gather_ms(millions * 1e6 * 4, num_gpus)
    overlap = OVERLAP if backbone_ms > HOST_MS[backbone] else 0.0
    exposed = max(0.0, all_reduce - overlap * backbone_ms)
    head = head_ms(global_batch, sampled)
    total = backbone_ms + head + messages + exposed
    # Weights and momentum, float32.
    centres = own * DIM * 8 / 2**30
    return Step(backbone_ms, head, messages, exposed, global_batch / total * 1000, sampled, centres)


def tables() -> list[str]:
    lines = ["## The model of the head against measurements", ""]
    lines += ["| G | sampled classes | measured ms | model ms | error |", "|---|---|---|---|---|"]
    for global_batch, sampled, measured in MEASURED_HEADS:
        model = head_ms(global_batch, sampled)
        lines.append(f"| {global_batch:,} | {sampled:,} | {measured:.2f} | {model:.2f} | {model / measured - 1:+.0%} |")
    lines += ["", "## Steps", ""]
    lines += [
        "| backbone | classes | r | GPUs | images per GPU | backbone ms | head ms | head's messages ms "
        "| gradients not hidden ms | img/s | efficiency | centres GiB per GPU | loader cores per host |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for backbone, num_classes, rate in (
        ("iresnet50", 1_000_000, 1.0),
        ("iresnet100", 10_000_000, 0.1),
        ("iresnet100", 100_000_000, 0.1),
    ):
        for batch in (128, 512):
            first: float | None = None
            for num_gpus in (1, 8, 64, 512):
                found = step(backbone, num_gpus, batch, num_classes, rate)
                if found.centres_gib > MEMORY_GIB:
                    lines.append(
                        f"| {backbone} | {num_classes:,} | {rate} | {num_gpus} | {batch} | | | | | does not fit | | "
                        f"{found.centres_gib:.0f} | |"
                    )
                    continue
                per_gpu = found.images_per_second / num_gpus
                first = first or per_gpu
                cores = per_gpu * min(num_gpus, GPUS_PER_HOST) / IMAGES_PER_CORE
                cells = [
                    backbone,
                    f"{num_classes:,}",
                    rate,
                    num_gpus,
                    batch,
                    f"{found.backbone:.1f}",
                    f"{found.head:.2f}",
                ]
                cells += [f"{found.head_messages:.2f}", f"{found.gradients:.2f}", f"{found.images_per_second:,.0f}"]
                cells += [f"{per_gpu / first:.2f}", f"{found.centres_gib:.1f}", f"{cores:.0f}"]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def limits() -> list[str]:
    """Where adding GPUs stops helping, in the same model."""
    lines = ["## Where Partial FC stops scaling", ""]
    for backbone, num_classes, rate in (("iresnet50", 1_000_000, 0.1), ("iresnet100", 10_000_000, 0.1)):
        for batch in (128, 512):
            reached = next(
                w
                for w in (2**n for n in range(20))
                if num_classes * (1 - math.exp(-batch * w / num_classes)) > rate * num_classes
            )
            lines.append(
                f"- {backbone}, {num_classes:,} classes, r = {rate}, {batch} images per GPU: from {reached:,} GPUs on "
                f"the positives of a batch are more classes than r draws; a smaller r changes nothing any more."
            )
    for batch in (128, 512):
        large = step("iresnet50", 512, batch, 1_000_000, 1.0)
        lines.append(
            f"- iresnet50, 1,000,000 classes, r = 1, 512 GPUs, {batch} images each (global batch {512 * batch:,}): the head's "
            f"products and messages are {(large.head + large.head_messages) / large.total:.0%} of the step."
        )
    return lines


ASSUMPTIONS = f"""
What is assumed, and not measured:

- The backbone's time is proportional to the images per GPU (measured at 512; smaller batches use a GPU less well: iresnet50
  with 128 images took 17.8 ms for everything). With 128 images the steps are replayed as CUDA graphs (train.cuda_graph=on);
  launch by launch the host would need about 45 ms for iresnet50.
- Messages reach {EFFICIENCY:.0%} of the published link speeds: {NVLINK_GBS:.0f} GB/s per direction and GPU within a host of
  {GPUS_PER_HOST} (NVLink 4), {NETWORK_GBS:.0f} GB/s per GPU between hosts (400 Gbit/s), nothing else on the network; a hop
  takes {HOP_US:.0f} µs within a host and {NETWORK_HOP_US:.0f} µs between hosts, and collectives are trees.
- Gradients travel during the backward pass, two thirds of the backbone's time; with CUDA graphs after it. The head's three
  exchanges hide behind nothing: they lie between forward and backward.
- The head was measured up to a global batch of 8,192. The lists of images per class, which the update needs, are sorted:
  0.17 ms at 8,192 images and 0.19 ms at 262,144 (head.py --pulls).
- Labels are uniform over the classes. Slow ranks, checkpoints and evaluation are left out.
- A core decodes {IMAGES_PER_CORE:,.0f} JPEGs of 112 × 112 per second.

What follows:

- The products of the head do not shrink with more GPUs at the same number of images per GPU: each GPU holds 1/W of the classes
  and compares W times as many images with them. The time per step stays, the memory for centres shrinks as 1/W.
- The messages of the head grow with the global batch, 6 bytes per image and dimension in all. Between hosts they are the
  first thing that shows. What helps then: bf16 gradients of the embeddings (4 bytes in all), a smaller embedding, or classes
  that are split within a host and replicated over hosts: each host then all-gathers its own images only, and the gradients
  of the centres are averaged over hosts, which pays for few classes. Neither is built.
- A large global batch makes the positives themselves a large sample. From there on the batch decides, not r.
- Beyond some ten thousand images the limit is the optimization, not the machine: 512 GPUs with 512 images each mean a
  global batch of 262,144.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    title = [
        "# Scale, calculated",
        "",
        "Made by `python benchmarks/scaling.py`. A model, not a measurement: no run had more than one GPU.",
    ]
    text = "\n".join([*title, ASSUMPTIONS, *tables(), "", *limits(), ""])
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
