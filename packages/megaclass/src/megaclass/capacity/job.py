"""A job as a plan sees it: settings, ranks, data and one of the known GPUs, without any of them being there."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from megaclass.backbones.configured import backbone_on_paper, largest_replayed_bytes
from megaclass.capacity.trace import BackboneTrace, trace_backbone
from megaclass.config.schema import BackboneConfig, Config
from megaclass.head.gpu.tiling import (
    FLOAT32_TILES,
    GRADIENT_BYTES,
    SUBCENTRE_TILES,
    cut_classes,
    round_up,
    tiles_for,
)
from megaclass.head.margins import MARGINS, Margin
from megaclass.head.sampling import rate_schedule, sample_capacity
from megaclass.head.settings import SHARE_OF_DEVICE
from megaclass.image_size import compact_size
from megaclass_launch.errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory: int
    """Bytes that torch sees."""
    flops: float
    """Dense bf16 operations per second, as stated."""
    bandwidth: float
    """Bytes per second of its memory, as stated."""
    link: float
    """Bytes per second that each GPU of a host sends in a collective: NVLink, or else PCIe."""
    capability: tuple[int, int]
    num_sms: int


# name, GiB, bf16 TFLOPS, memory GB/s, GB/s between GPUs of a host, compute capability, multiprocessors
GPUS = {
    name: Gpu(name, round(gib * GIB), tflops * 1e12, gb_per_s * 1e9, link * 1e9, capability, sms)
    for name, gib, tflops, gb_per_s, link, capability, sms in (
        ("b200", 178.4, 2250, 8000, 700, (10, 0), 148),
        ("h200", 139.8, 989, 4800, 350, (9, 0), 132),
        ("h100", 79.2, 989, 3350, 350, (9, 0), 132),
        ("h100-pcie", 79.2, 756, 2000, 45, (9, 0), 114),
        ("a100-80", 79.3, 312, 2039, 230, (8, 0), 108),
        ("a100-40", 39.5, 312, 1555, 230, (8, 0), 108),
        ("l40s", 44.5, 362, 864, 22, (8, 9), 142),
        ("a10", 22.1, 125, 600, 12, (8, 6), 72),
        ("l4", 22.1, 121, 300, 12, (8, 9), 58),
        ("rtx4090", 23.5, 165, 1008, 22, (8, 9), 128),
        ("rtx3090", 23.6, 71, 936, 12, (8, 6), 82),
    )
}


def gpu_named(name: str | None) -> Gpu:
    """Returns the GPU of this name or part of a name; None: that of this machine if it is in the table, or else an H200."""
    if name is None:
        return _gpu_here() or GPUS["h200"]
    asked = name.lower().replace(" ", "")
    found = [asked] if asked in GPUS else [known for known in GPUS if asked and asked in known]
    if not found:
        raise UserError(f"--gpu is {name!r}, which is not in the table; known: {', '.join(GPUS)}.")
    if len(found) > 1:
        raise UserError(f"--gpu is {name!r}, which may be {' or '.join(found)}: give one of them.")
    return GPUS[found[0]]


def _gpu_here() -> Gpu | None:
    """Returns the GPU of the table that is most like that of this machine, with the memory of this one; None if none is.

    Laptops, and slices of a GPU, have less memory than the card of that name.
    """
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    words = here.name.lower().replace("geforce rtx ", "rtx").replace("-", " ").split()
    alike = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in words]
    nearest = min(alike, key=lambda gpu: abs(gpu.memory - here.total_memory), default=None)
    return nearest and replace(nearest, memory=here.total_memory)


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
    def plain_matrices(self) -> int:
        """Matrices of float32 logits that the plain kernel holds for a chunk of classes; 0 if the fused one runs the head.

        Counted in a step of each (head/chunked.py).
        """
        head = self.config.head
        margin = MARGINS[head.margin][0] if head.margin in MARGINS else Margin
        of_margin = {"uniface": 8, "sphereface2": 11, "intertopk": 13}.get(head.margin, 0)
        is_unknown = head.label_smoothing > 0 or (head.loss or margin.loss) == "sigmoid"
        return max(of_margin, 8 * is_unknown, 4 * (head.kernel == "chunked"))

    @property
    def num_hosts(self) -> int:
        return -(-self.num_ranks // self.ranks_per_host)

    def backbone(self) -> BackboneTrace:
        return _traced(self.config.backbone, self.image_size, self.dtype)

    @property
    def replays_backbone(self) -> bool:
        """True if the backbone's steps are replayed as CUDA graphs (training/model/graphed_backbone.py).

        On several ranks `auto` decides by measurement; the plan then counts ordinary steps.
        """
        setting = self.config.train.cuda_graph
        if not self.config.may_replay_backbone() or (setting == "auto" and self.num_ranks > 1):
            return False
        kept = self.backbone().at(self.part_batch).kept_for_backward()
        return setting == "on" or kept <= largest_replayed_bytes(self.gpu.memory)

    def with_settings(self, **sections: dict[str, object]) -> "PlannedJob":
        """Returns the job with other settings: with_settings(head={"sample_rate": 0.1})."""
        changed = {name: replace(getattr(self.config, name), **values) for name, values in sections.items()}
        return replace(self, config=replace(self.config, **changed))


@cache
def _traced(settings: BackboneConfig, image_size: tuple[int, int], dtype: torch.dtype) -> BackboneTrace:
    return trace_backbone(lambda: backbone_on_paper(settings, compact_size(image_size)), image_size, dtype)


# Of the plain kernel: bytes of one chunk of logits, and passes over logits and centres, fitted to benchmarks/head-h200.md
# (within 10 % with all classes; a sampled step took up to 1.7 times as long, because its chunks are small).
_PLAIN_CHUNK_BYTES, _PLAIN_BYTES_PER_LOGIT, _PLAIN_BYTES_PER_NUMBER = 512 << 20, 50, 255
_NUM_EXPONENTIALS = 3
"""Passes over the exponentials of a step: one writes them, two products read them."""


@dataclass(frozen=True)
class HeadCosts:
    """Bytes on one rank, and the work of one step."""

    centres: int
    row_state: int
    stored: int
    """Exponentials that wait for the centres' gradient."""
    images: int
    """The gathered batch in its various forms, and the list of drawn classes."""
    forward_extra: int
    """Most bytes in addition to the stored exponentials while forward forms them, minus those stored at the end."""
    update_extra: int
    """Bytes in addition to them while the centres move."""
    building: int
    """Temporary bytes while the first centres are drawn."""
    flops: float
    traffic: float


def head_costs(job: PlannedJob) -> HeadCosts:
    """Counts the head of one rank."""
    settings = job.config.head
    dim, num_sub = job.config.backbone.embedding_dim + settings.bias, settings.subcentres
    rows, drawn, gathered = job.local_classes * num_sub, job.sampled, job.gathered
    size = 2 if settings.storage == "bf16" else 4
    state_per_row = {"sgd": dim * size * bool(settings.momentum), "adamw": 2 * dim * size + 4, "adagrad": 4}
    row_state = rows * state_per_row[settings.optimizer]
    # The products take narrow embeddings as they come, wide ones as float32.
    narrow = job.dtype != torch.float32
    operand = 2 if narrow else 4
    width = round_up(dim, SUBCENTRE_TILES.width if narrow else FLOAT32_TILES.width)
    chunks = _chunk_bytes(job, operand, width)
    left, kept, peak = job.stored_bytes, 0, 0
    for exponentials, centres in chunks:
        peak = max(peak, kept + exponentials + centres)
        left -= exponentials
        if left >= 0:
            kept += exponentials
    all_exponentials = sum(exponentials for exponentials, _ in chunks)
    again = 1 - kept / max(1, all_exponentials)
    largest = max(sum(chunk) for chunk in chunks)
    parts = job.config.train.accumulate
    gradient = min(GRADIENT_BYTES, drawn * num_sub * width * operand)
    sampled_rows = drawn * num_sub
    wide_rows, narrow_rows = sampled_rows * dim * size, sampled_rows * width * operand
    is_sampled = job.sample_rate < 1
    elements = min(rows * dim, 1 << 26)
    stored, forward_extra, update_extra = kept * parts, peak - kept, gradient + (largest if again else 0)
    plain_traffic = 0
    if job.plain_matrices:
        matrices = job.plain_matrices * min(_PLAIN_CHUNK_BYTES, 4 * gathered * sampled_rows)
        forward_extra, update_extra = forward_extra + matrices, update_extra + matrices
        plain_traffic = _PLAIN_BYTES_PER_LOGIT * gathered * sampled_rows + _PLAIN_BYTES_PER_NUMBER * sampled_rows * dim
    # unit, operand, own centres, gathered blocks, sums and gradient of the embeddings
    images = parts * gathered * dim * (4 + operand + 4 + operand + 4 + 4)
    images += (16 * drawn + 8 * job.local_classes) * is_sampled
    return HeadCosts(
        centres=rows * dim * size,
        row_state=row_state,
        stored=stored,
        images=images,
        forward_extra=forward_extra,
        update_extra=update_extra,
        # bits, their copy, the same as floats, and normal numbers
        building=elements * 16,
        flops=parts * (6 + 2 * again) * gathered * sampled_rows * dim,
        # forward: centres read, narrow ones written and read twice; update: gradient written and read, rows and state moved
        traffic=parts * (wide_rows + 3 * narrow_rows + _NUM_EXPONENTIALS * all_exponentials)
        + parts * again * (wide_rows + 2 * narrow_rows + all_exponentials)
        + 2 * narrow_rows
        + 2 * (wide_rows + row_state * sampled_rows / max(1, rows))
        + 9 * job.local_classes * is_sampled
        + parts * plain_traffic,
    )


def _chunk_bytes(job: PlannedJob, operand: int, width: int) -> list[tuple[int, int]]:
    """Returns the bytes of exponentials and of narrow centres of each chunk."""
    settings = job.config.head
    num_sub = settings.subcentres
    is_plain = settings.filter_above is None and settings.margin != "curricularface"
    tiles = tiles_for(max(job.gpu.capability, (8, 0)), job.dtype, num_sub, is_plain=is_plain)
    per_class = max(1, job.gathered) * num_sub * operand
    cut = cut_classes(
        tiles,
        num_images=job.gathered,
        num_classes=job.sampled,
        bytes_per_class=per_class,
        stored_bytes=job.stored_bytes,
        num_sms=job.gpu.num_sms,
    )
    chunks = []
    for start in range(0, job.sampled, cut.plane):
        plane = round_up(min(cut.plane, job.sampled - start), tiles.classes)
        chunks.append((plane * per_class, plane * num_sub * width * operand))
    return chunks
