"""The GPU kernel: logits, margins of negatives and exponentials in one Triton program, the two other products by cuBLAS.

Class chunk by class chunk, forward forms the unit centres, the exponentials, and at once their product with the
centres: the softmax denominator, not known yet, is a factor of each image's row, so `grad_images` only has to scale.
Exponentials are kept for the centres' gradient as far as `stored_bytes` allows and computed again beyond. A step costs
three products of 2 * G * S * D operations, four for what is not stored.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megaclass.head.gpu import kernel_programs as programs
from megaclass.head.gpu.tiling import (
    FLOAT32_TILES,
    GRADIENT_BYTES,
    SUBCENTRE_TILES,
    cut_classes,
    next_power_of_2,
    round_up,
    tiles_for,
)
from megaclass.head.problem import CentreGradient, Problem, Stored
from megaclass.triton_launch import launch

# Logits up to 64 give exponentials whose sum over 1e9 classes fits float32; larger ones are shifted down to that.
# Beyond 128 the shift would take away what counts of a row whose logits are all small.
_UNSHIFTED_LOGIT = 64.0
MAX_LOGIT = 128.0
# Inner products have no bound, and are not shifted. Larger sums of their exponentials are a fault: gradients might overflow.
MAX_INNER_LOGIT = 80.0

_ALIGNED = 32
"""Rows of a product are a multiple of this; so are tiles of classes."""


def mass(problem: Problem) -> Tensor:
    run = _Run(problem)
    problem.stored = stored = StoredProducts()
    # Of tiles the last chunk may have fewer; every program writes.
    new = torch.zeros if run.has_tile_sums else torch.empty
    masses_NG = new((run.num_chunks * run.num_sums, run.num_images), device=run.device)
    left = problem.stored_bytes
    sums_GD = torch.empty((run.num_images, run.width), device=run.device) if problem.wants_grad_images else None
    for place, (start, stop) in enumerate(run.chunks()):
        chunk = run.exponentials(start, stop, masses_NG[place * run.num_sums : (place + 1) * run.num_sums])
        if sums_GD is not None:
            assert chunk.centres_RD is not None, "a chunk just formed has its centres"
            _product_into_(sums_GD, chunk.exps_GR, chunk.centres_RD.to(run.exp_dtype), adds=place > 0)
        left -= chunk.exps_GR.nbytes
        if left >= 0:
            chunk.forget_centres()
            stored.chunks[start, stop] = chunk
        del chunk  # before the next one is formed
    stored.sums_GD = sums_GD
    mass_G = masses_NG.sum(0, dtype=torch.float64)
    return mass_G * math.exp(_shift(problem)) if _shift(problem) else mass_G


def grad_images(problem: Problem, coefficients_G: Tensor) -> Tensor:
    sums_GD = stored_products(problem).sums_GD
    assert sums_GD is not None, "grad_images was not announced by wants_grad_images"
    grad_GD = sums_GD * (coefficients_G * weight_factor(problem))[:, None]
    return grad_GD[:, : problem.weight_RD.shape[1]].to(problem.work_dtype)


def grad_centres(problems: list[Problem], coefficients: list[Tensor]) -> Iterator[CentreGradient]:
    runs = [_Run(problem) for problem in problems]
    weighted = [_weighted_images(run, c) for run, c in zip(runs, coefficients, strict=True)]
    first = problems[0]
    width, num_subcentres = first.weight_RD.shape[1], first.num_subcentres
    # Accumulate several parts in float32; a single part keeps the precision of its factors, at half the bytes.
    dtype = runs[0].exp_dtype if len(runs) == 1 else torch.float32
    step = max(256, GRADIENT_BYTES // (dtype.itemsize * runs[0].width * num_subcentres) // 256 * 256)
    buffer = torch.empty((min(step, runs[0].plane) * num_subcentres, runs[0].width), dtype=dtype, device=runs[0].device)
    for start, stop in runs[0].chunks():
        chunks = [run.recall(start, stop) for run in runs]
        for here in range(start, stop, step):
            last = min(here + step, stop)
            # With the zeros behind the last class: odd sizes send cuBLAS to slow kernels.
            height = round_up(last - here, _ALIGNED)
            grad_RD = buffer[: height * num_subcentres]
            for place, (chunk, images_GD) in enumerate(zip(chunks, weighted, strict=True)):
                for m in range(num_subcentres):
                    first_column = m * chunk.plane + here - start
                    exps_GR = chunk.exps_GR[:, first_column : first_column + height]
                    _product_into_(grad_RD[m * height : (m + 1) * height], exps_GR.T, images_GD, adds=place > 0)
            grad_RD = _by_class(grad_RD, num_subcentres)[: (last - here) * num_subcentres, :width]
            yield CentreGradient(here, last, grad_RD, _won(chunks, here - start, last - start))
        del chunks, chunk


@dataclass(slots=True)
class _Chunk:
    exps_GR: Tensor
    centres_RD: Tensor | None
    won_R: Tensor | None
    plane: int

    def forget_centres(self) -> None:
        """They cost a copy to form again; the exponentials cost a product."""
        self.centres_RD = None


@dataclass(slots=True)
class StoredProducts(Stored):
    """Kept between forward and backward."""

    chunks: dict[tuple[int, int], _Chunk] = field(default_factory=dict)
    """Exponentials by (start, stop), as far as stored_bytes allows."""
    sums_GD: Tensor | None = None
    """Exponentials times unit centres, written by mass(): the embeddings' gradient but for each image's factor."""
    weighted_GD: Tensor | None = None
    """Images times d loss / d mass, if images.py has formed it for the centres' gradient."""


def stored_products(problem: Problem) -> StoredProducts:
    assert isinstance(problem.stored, StoredProducts), "mass() comes before the gradients"
    return problem.stored


class _Run:
    """One problem, cut into chunks and tiles for its device."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.device = problem.unit_GD.device
        self.num_images, self.dim = problem.unit_GD.shape[0], problem.weight_RD.shape[1]
        dtype = problem.unit_GD.dtype
        capability, num_sms = _device_facts(self.device)
        is_plain = problem.class_weight_S is None and problem.filter_above is None and problem.curriculum is None
        self.exp_dtype = problem.exp_dtype
        self.width = operand_width(self.dim, dtype)
        self.tiles = tiles_for(capability, dtype, problem.num_subcentres, is_plain=is_plain)
        # Hopper and later copy tiles by hardware; before, descriptors are emulated and eat registers.
        self.by_descriptor = capability >= (9, 0)
        self.images_GD = problem.unit_GD
        if self.images_GD.shape[1] < self.width:
            self.images_GD = torch.nn.functional.pad(problem.unit_GD, (0, self.width - self.dim))
        cut = cut_classes(
            self.tiles,
            num_images=self.num_images,
            num_classes=problem.num_classes,
            bytes_per_class=max(1, self.num_images) * problem.num_subcentres * self.exp_dtype.itemsize,
            stored_bytes=problem.stored_bytes,
            num_sms=num_sms,
        )
        self.splits, self.plane, self.num_chunks = cut.splits, cut.plane, cut.num_chunks
        # Rows of partial sums per chunk: of each program, or of each tile, whose targets are then taken out.
        self.has_tile_sums = problem.max_labels > 1
        self.num_sums = -(-self.plane // self.tiles.classes) if self.has_tile_sums else self.splits

    def chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.problem.num_classes, self.plane):
            yield start, min(start + self.plane, self.problem.num_classes)

    def recall(self, start: int, stop: int) -> _Chunk:
        stored = stored_products(self.problem).chunks.get((start, stop))
        if stored is not None:
            return stored
        return self.exponentials(start, stop, torch.empty((self.num_sums, self.num_images), device=self.device))

    def exponentials(self, start: int, stop: int, masses_NG: Tensor) -> _Chunk:
        problem, tiles = self.problem, self.tiles
        num_subcentres, plane = problem.num_subcentres, round_up(stop - start, tiles.classes)
        centres_RD = self._unit_centres(start, stop, plane)
        exps_GR = torch.empty((self.num_images, num_subcentres * plane), dtype=self.exp_dtype, device=self.device)
        won_R = None
        if num_subcentres > 1:
            won_R = torch.zeros(num_subcentres * plane, dtype=torch.int32, device=self.device)
        if self.num_images:
            curriculum = problem.curriculum
            borders_G, hardness = (None, None) if curriculum is None else (part.float() for part in curriculum)
            launch(
                programs.exponentials,
                -(-self.num_images // tiles.images) * self.splits,
                self._operand(self.images_GD, tiles.images, tiles.width),
                self._operand(centres_RD, tiles.classes, tiles.width),
                self._operand(exps_GR, tiles.images, tiles.classes // tiles.parts),
                masses_NG,
                won_R,
                problem.target_slots_N,
                problem.class_weight_S,
                problem.num_drawn,
                problem.has_direction_G if num_subcentres > 1 else None,
                borders_G,
                hardness,
                start,
                stop - start,
                self.num_images,
                plane,
                problem.scale / math.log(2),
                _shift(problem) / math.log(2),
                problem.filter_above if problem.filter_above is not None else 0.0,
                WIDTH=self.width,
                M=num_subcentres,
                HAS_FILTER=problem.filter_above is not None,
                IS_CURRICULAR=problem.curriculum is not None,
                HAS_TILE_SUMS=self.has_tile_sums,
                BLOCK_G=tiles.images,
                BLOCK_S=tiles.classes,
                BLOCK_D=tiles.width,
                SPLITS=self.splits,
                FLATTEN=tiles.flatten,
                PARTS=tiles.parts,
                BY_DESCRIPTOR=self.by_descriptor,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            if self.has_tile_sums:
                launch(
                    programs.clear_targets,
                    problem.target_slots_N.shape[0],
                    exps_GR,
                    masses_NG,
                    problem.target_slots_N,
                    start,
                    stop - start,
                    self.num_images,
                    plane,
                    problem.max_labels,
                    M=num_subcentres,
                    BLOCK_S=tiles.classes,
                    num_warps=1,
                )
        return _Chunk(exps_GR, centres_RD, won_R, plane)

    def _operand(self, tensor: Tensor, height: int, width: int) -> Any:
        return TensorDescriptor.from_tensor(tensor, [height, width]) if self.by_descriptor else tensor

    def _unit_centres(self, start: int, stop: int, plane: int) -> Tensor:
        problem = self.problem
        num_rows = problem.num_subcentres * plane
        unit_RD = torch.empty((num_rows, self.width), dtype=problem.unit_GD.dtype, device=self.device)
        block_d = next_power_of_2(self.width)
        block_r = max(1, 4096 // block_d)
        launch(
            programs.unit_centres,
            -(-num_rows // block_r),
            problem.weight_RD,
            problem.classes_S,
            unit_RD,
            start,
            stop - start,
            problem.weight_RD.shape[0] // problem.num_subcentres,
            plane,
            D=self.dim,
            WIDTH=self.width,
            M=problem.num_subcentres,
            IS_SAMPLED=problem.classes_S is not None,
            IS_COSINE=problem.is_cosine,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=8,
        )
        return unit_RD


@cache
def _device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors; on a CPU (Triton's interpreter) those of a tiny device."""
    if device.type != "cuda":
        return (8, 0), 2
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


def _shift(problem: Problem) -> float:
    return max(0.0, problem.logit_bound - _UNSHIFTED_LOGIT) if problem.is_cosine else 0.0


def operand_width(dim: int, dtype: torch.dtype) -> int:
    """Returns the columns of the products' operands: those of the embedding, filled up with zeros to whole tiles."""
    return round_up(dim, FLOAT32_TILES.width if dtype == torch.float32 else SUBCENTRE_TILES.width)


def weight_factor(problem: Problem) -> float:
    """Returns the factor that the stored exponentials lack of d mass / d cosine: the scale and the shift of the logits."""
    return problem.scale * math.exp(_shift(problem))


def _weighted_images(run: _Run, coefficients_G: Tensor) -> Tensor:
    """Images times d loss / d mass: the softmax denominator meets the small matrix instead of the large one."""
    weighted_GD = stored_products(run.problem).weighted_GD
    if weighted_GD is not None:
        return weighted_GD
    factors_G = coefficients_G * weight_factor(run.problem)
    return (run.images_GD * factors_G[:, None]).to(run.exp_dtype)


def _product_into_(out: Tensor, a: Tensor, b: Tensor, *, adds: bool) -> None:
    """out = a @ b, or out += a @ b, accumulated in float32 and rounded to the dtype of out."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out, beta=1 if adds else 0)
    elif a.device.type != "cuda":
        out.addmm_(a.float(), b.float(), beta=1 if adds else 0)
    elif adds:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def _by_class(grad_RD: Tensor, num_subcentres: int) -> Tensor:
    """Planes of sub-centres -> neighbouring sub-centres of a class."""
    if num_subcentres == 1:
        return grad_RD
    planes_MSD: Tensor = grad_RD.unflatten(0, (num_subcentres, -1))
    return planes_MSD.transpose(0, 1).flatten(0, 1)


def _won(chunks: list[_Chunk], start: int, stop: int) -> Tensor | None:
    won: Tensor | None = None
    for chunk in chunks:
        if chunk.won_R is not None:
            part = chunk.won_R.unflatten(0, (-1, chunk.plane))[:, start:stop].T.flatten() > 0
            won = part if won is None else won | part
    return won
