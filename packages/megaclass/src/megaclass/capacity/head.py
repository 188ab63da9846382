"""The head's memory, FLOPs and traffic on one rank, from the sizes that its GPU kernel uses."""

from dataclasses import dataclass

import torch

from megaclass.capacity.job import PlannedJob
from megaclass.head.gpu.tiling import (
    FLOAT32_TILES,
    GRADIENT_BYTES,
    SUBCENTRE_TILES,
    cut_classes,
    round_up,
    tiles_for,
)

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
    """Most bytes beside the stored exponentials while forward forms them, minus those stored at the end."""
    update_extra: int
    """Bytes beside them while the centres move."""
    building: int
    """Temporary bytes while the first centres are drawn."""
    flops: float
    traffic: float


def head_costs(job: PlannedJob) -> HeadCosts:
    """Counts the head of one rank."""
    settings = job.config.head
    dim, num_sub = job.config.backbone.embedding_dim, settings.subcentres
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
        + 9 * job.local_classes * is_sampled,
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
