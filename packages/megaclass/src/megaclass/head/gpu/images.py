"""Host side of the programs over the images of the global batch: one launch each; plain PyTorch needs dozens.

On a fast GPU the products of a sampled step take a millisecond, in which the host can start about fifty launches.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.head.centres import Centres
from megaclass.head.faults import MULTIPLIER, NUM_WATCHED, OverwriteCheck
from megaclass.head.gather_batch import BlockLayout
from megaclass.head.gpu import image_programs
from megaclass.head.gpu.kernel import operand_width, stored_products, weight_factor
from megaclass.head.gpu.tiling import next_power_of_2
from megaclass.head.margins import Margin
from megaclass.head.step import GatheredImages, LossesAndSlopes, LossPart
from megaclass.triton_launch import launch
from megaclass_launch.ranks.collectives import gather_blocks, scatter_sum


@dataclass(frozen=True, slots=True)
class Gathered:
    """The blocks of all ranks, still packed."""

    blocks_W: Tensor
    layout: BlockLayout
    dtype: torch.dtype
    """Of the embeddings."""

    @property
    def words_W(self) -> Tensor:
        return self.blocks_W.view(torch.int64)

    @property
    def counts_W(self) -> Tensor:
        return self.words_W[:, 0]

    @property
    def num_rows(self) -> int:
        return self.blocks_W.shape[0] * self.layout.max_batch


def gather(
    embeddings_BD: Tensor,
    labels_B: Tensor,
    max_batch: int,
    *,
    check: OverwriteCheck,
    step: Tensor,
    group: dist.ProcessGroup | None,
) -> Gathered:
    """Collective: all-gathers a block per rank (size in gather_batch.py), packed in one launch.

    That launch also does OverwriteCheck.control_word and OverwriteCheck.renew.
    """
    (count, width), dtype = embeddings_BD.shape, embeddings_BD.dtype
    layout = BlockLayout(max_batch, width, dtype.itemsize)
    data = torch.empty(layout.num_bytes, dtype=torch.uint8, device=embeddings_BD.device)
    if embeddings_BD.stride(1) != 1:
        embeddings_BD = embeddings_BD.contiguous()
    launch(
        image_programs.pack_block,
        max(1, layout.max_batch),
        data.view(torch.int64),
        data[layout.rows_at :].view(dtype),
        embeddings_BD,
        labels_B.contiguous(),
        check.watched,
        check.kept,
        step,
        count,
        embeddings_BD.stride(0),
        check.stride,
        check.kept.shape[0],
        layout.max_batch,
        D=width,
        BLOCK_D=next_power_of_2(width),
        LANES=NUM_WATCHED,
        MULTIPLIER=MULTIPLIER,
    )
    return Gathered(gather_blocks(data, group), layout, dtype)


def prepare(gathered: Gathered, store: Centres, product_dtype: torch.dtype) -> GatheredImages:
    """Unpacks the gathered blocks, normalises the images and looks up their own centres, in one launch."""
    layout, device, num_rows, dim = gathered.layout, gathered.blocks_W.device, gathered.num_rows, gathered.layout.width
    width = operand_width(dim, product_dtype)
    unit_GD, target_GD = torch.empty((2, num_rows, dim), device=device).unbind()
    operand_GD = torch.empty((num_rows, width), dtype=product_dtype, device=device)
    norms_G, cosines_G = torch.empty((2, num_rows), dtype=torch.float64, device=device).unbind()
    labels_G, rows_G, local_ids_G = torch.empty((3, num_rows), dtype=torch.int64, device=device).unbind()
    is_image_G = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        launch(
            image_programs.prepare_images,
            num_rows,
            gathered.words_W,
            gathered.blocks_W.view(-1)[layout.rows_at :].view(gathered.dtype),
            store.weight_RD,
            unit_GD,
            operand_GD,
            target_GD,
            norms_G,
            cosines_G,
            labels_G,
            is_image_G,
            rows_G,
            local_ids_G,
            layout.num_bytes // 8,
            layout.num_bytes // gathered.dtype.itemsize,
            layout.max_batch,
            store.classes.start,
            len(store.classes),
            D=dim,
            WIDTH=width,
            M=store.num_subcentres,
            BLOCK_D=next_power_of_2(width),
        )
    return GatheredImages(
        unit_GD=unit_GD,
        operand_GD=operand_GD,
        norms_G=norms_G,
        is_image_G=is_image_G,
        labels_N=labels_G,
        is_label_N=is_image_G,
        cosines_N=cosines_G,
        own_rows_N=rows_G,
        own_unit_ND=target_GD,
        local_ids_N=local_ids_G,
        counts_W=gathered.counts_W,
        max_batch=layout.max_batch,
    )


def note_faults(
    first_fault: Tensor,
    gathered: Gathered,
    images: GatheredImages,
    num_overflowed: Tensor,
    num_classes: int,
    step: Tensor,
) -> None:
    """Does what faults.find_fault, overflow_fault and FaultWatch.note do, in one launch."""
    launch(
        image_programs.note_faults,
        1,
        first_fault,
        gathered.words_W,
        images.norms_G,
        images.labels_N,
        images.is_image_G,
        num_overflowed,
        step,
        gathered.layout.num_bytes // 8,
        gathered.blocks_W.shape[0],
        gathered.num_rows,
        gathered.layout.max_batch,
        num_classes,
        BLOCK=1024,
        num_warps=8,
    )


def margin_numbers(margin: Margin, device: torch.device) -> Tensor | None:
    """Returns the constants of a margin whose derivative the program `finish_losses` contains; None for other margins."""
    # Not what a subclass inherits: it may have other logits.
    if vars(type(margin)).get("gpu_rule") is None:
        return None
    return torch.tensor(_constants(margin), dtype=torch.float64, device=device)


def write_margin_(margin: Margin, numbers: Tensor) -> None:
    """Writes the constants of a margin of another size, of a margin schedule. Four launches; the host does not wait."""
    for place, value in zip(numbers, _constants(margin), strict=True):
        place.fill_(value)


def _constants(margin: Margin) -> list[float]:
    angle = getattr(margin, "margin", 0.0)
    return [margin.scale, angle, math.cos(angle), math.sin(angle)]


def finish_losses(
    margin: Margin,
    numbers: Tensor,
    mass_G: Tensor,
    cosines_G: Tensor,
    is_image_G: Tensor,
    num_images: Tensor,
    first_fault: Tensor,
) -> LossesAndSlopes:
    """step.finish_losses for the margins with constants, and the mean loss, in one launch."""
    num_rows, device = mass_G.shape[0], mass_G.device
    slope_mass_G, slope_G = torch.empty((2, num_rows), dtype=torch.float64, device=device).unbind()
    loss = torch.empty((), device=device)
    is_exact = getattr(margin, "gradient", "exact") == "exact"
    launch(
        image_programs.finish_losses,
        1,
        mass_G,
        cosines_G,
        is_image_G,
        numbers,
        num_images,
        first_fault,
        slope_mass_G,
        slope_G,
        loss,
        num_rows,
        KIND=margin.gpu_rule if is_exact else "straight-through",
        BLOCK=512,
        num_warps=8,
    )
    return LossesAndSlopes(slope_mass_G, slope_G, None, mean_loss=loss)


def grad_embeddings(
    part: LossPart,
    upstream: Tensor,
    num_images: Tensor,
    *,
    wants_images: bool,
    rank: int,
    group: dist.ProcessGroup | None,
    factor: float,
    dtype: torch.dtype,
) -> Tensor | None:
    """PlainStep.backward: a launch before the reduce-scatter, one after.

    Also leaves the weighted images for the update.
    """
    problem, images, stored = part.problem, part.images, stored_products(part.problem)
    device, (num_rows, dim) = images.unit_GD.device, images.unit_GD.shape
    part.negative_coefficients_G, weights_G = torch.empty((2, num_rows), dtype=torch.float64, device=device).unbind()
    part.target_coefficients_N = torch.empty(num_rows, device=device)
    stored.weighted_GD = torch.empty(problem.unit_GD.shape, dtype=problem.exp_dtype, device=device)
    grad_GD = torch.empty((num_rows, dim), device=device) if wants_images else None
    if num_rows:
        launch(
            image_programs.weigh_images,
            num_rows,
            images.unit_GD,
            images.own_unit_ND,
            stored.sums_GD,
            part.losses.slope_mass_G,
            part.losses.slope_cosine_N,
            images.is_image_G,
            upstream,
            num_images,
            part.negative_coefficients_G,
            part.target_coefficients_N,
            weights_G,
            stored.weighted_GD,
            grad_GD,
            weight_factor(problem),
            D=dim,
            WIDTH=problem.unit_GD.shape[1],
            WANTS_GRAD=wants_images,
            BLOCK_D=next_power_of_2(problem.unit_GD.shape[1]),
        )
    if grad_GD is None:
        return None
    grad_BD = scatter_sum(images.by_rank(grad_GD), group)
    first, norm_slopes_G = images.of_rank(rank).start, part.losses.slope_norm_G
    out_BD = torch.empty((images.max_batch, dim), dtype=dtype, device=device)
    if images.max_batch:
        launch(
            image_programs.embedding_gradients,
            images.max_batch,
            grad_BD,
            images.unit_GD[first:],
            images.norms_G[first:],
            weights_G[first:],
            None if norm_slopes_G is None else norm_slopes_G[first:],
            out_BD,
            float(factor),
            D=dim,
            HAS_NORM_SLOPES=norm_slopes_G is not None,
            BLOCK_D=next_power_of_2(dim),
        )
    return out_BD
