"""The GPU kernel: logits, margins of negatives and exponentials in one Triton program, the two other products by cuBLAS.

Class chunk by class chunk, forward forms the unit centres, the exponentials, and at once their product with the
centres: the softmax denominator, not known yet, is a factor of each image's row, so `grad_images` only has to scale.
Exponentials are kept for the centres' gradient as far as `stored_bytes` allows and computed again beyond. A step costs
three products of 2 * G * S * D operations, four for what is not stored.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megaclass.head.kernels import triton_programs
from megaclass.head.kernels.problem import CentreGradient, Problem

# Logits up to 64 give exponentials whose sum over 1e9 classes fits float32; larger ones are shifted down to that.
# Beyond 128 the shift would take away what counts of a row whose logits are all small.
_UNSHIFTED_LOGIT = 64.0
MAX_LOGIT = 128.0

_CHUNK_BYTES = 256 << 20
"""Exponentials of one chunk: large enough to fill the GPU, small beside the centres."""
_GRADIENT_BYTES = 32 << 20
"""Gradient of the centres that waits for its update: small enough to stay in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the exponentials are cut into programs."""

    images: int
    classes: int
    width: int
    warps: int
    stages: int
    programs_per_sm: int = 1
    flatten: bool = False
    parts: int = 1


# By compute capability: the first row that the device reaches. Shared memory a block may use: 227, 99, 163 KiB.
TILES: list[tuple[tuple[int, int], Tiles]] = [
    ((12, 0), Tiles(128, 128, 64, warps=8, stages=2)),
    ((9, 0), Tiles(128, 256, 64, warps=8, stages=3)),
    ((8, 9), Tiles(128, 128, 64, warps=8, stages=2)),
    ((8, 7), Tiles(128, 128, 64, warps=8, stages=3)),
    ((8, 6), Tiles(128, 128, 64, warps=8, stages=2)),
    ((8, 0), Tiles(128, 128, 64, warps=8, stages=3)),
]
# Sub-centres keep the best cosine so far beside the new one; float32 operands take twice the room.
SUBCENTRE_TILES = Tiles(128, 128, 64, warps=8, stages=2)
FLOAT32_TILES = Tiles(64, 64, 32, warps=4, stages=2)


def tiles_for(capability: tuple[int, int], dtype: torch.dtype, num_subcentres: int) -> Tiles:
    if dtype == torch.float32:
        return FLOAT32_TILES
    if num_subcentres > 1:
        return SUBCENTRE_TILES
    return next(tiles for least, tiles in TILES if capability >= least)


def mass(problem: Problem) -> Tensor:
    run = _Run(problem)
    masses_NG = torch.empty((run.num_chunks * run.splits, run.num_images), device=run.device)
    left = problem.stored_bytes
    products = run.new_products() if problem.wants_grad_images else None
    for place, (start, stop) in enumerate(run.chunks()):
        chunk = run.exponentials(start, stop, masses_NG[place * run.splits : (place + 1) * run.splits])
        if products is not None:
            _add_products_(products, chunk.exps_GR, chunk.centres_RD)
        left -= chunk.exps_GR.nbytes
        if left >= 0:
            chunk.forget_centres()
            problem.stored[start, stop] = chunk
        del chunk  # before the next one is formed
    if products is not None:
        problem.stored["products"] = products
    # Float64 from here on, where the shift can be taken back.
    return masses_NG.sum(0, dtype=torch.float64) * math.exp(_shift(problem))


def grad_images(problem: Problem, coefficients_G: Tensor) -> Tensor:
    products_NGD = problem.stored["products"]
    factors_G = coefficients_G * (problem.scale * math.exp(_shift(problem)))
    grad_GD = products_NGD.sum(0) * factors_G[:, None]
    return grad_GD[:, : problem.unit_GD.shape[1]].to(problem.work_dtype)


def grad_centres(problems: list[Problem], coefficients: list[Tensor]) -> Iterator[CentreGradient]:
    runs = [_Run(problem) for problem in problems]
    weighted = [_weighted_images(run, c) for run, c in zip(runs, coefficients, strict=True)]
    first = problems[0]
    width, num_subcentres = first.unit_GD.shape[1], first.num_subcentres
    step = max(256, _GRADIENT_BYTES // (4 * runs[0].width * num_subcentres) // 256 * 256)
    buffer = torch.empty((min(step, runs[0].plane) * num_subcentres, runs[0].width), device=runs[0].device)
    for start, stop in runs[0].chunks():
        chunks = [run.recall(start, stop) for run in runs]
        for here in range(start, stop, step):
            last = min(here + step, stop)
            grad_RD = buffer[: (last - here) * num_subcentres]
            for place, (chunk, images_GD) in enumerate(zip(chunks, weighted, strict=True)):
                for m in range(num_subcentres):
                    exps_GR = chunk.exps_GR[:, m * chunk.plane + here - start : m * chunk.plane + last - start]
                    part_RD = grad_RD[m * (last - here) : (m + 1) * (last - here)]
                    _product_into_(part_RD, exps_GR.T, images_GD, adds=place > 0)
            yield CentreGradient(
                here, last, _by_class(grad_RD, num_subcentres)[:, :width], _won(chunks, here - start, last - start)
            )
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


class _Run:
    """One problem, cut into chunks and tiles for its device."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.device = problem.unit_GD.device
        self.num_images, self.dim = problem.unit_GD.shape
        dtype = problem.unit_GD.dtype
        capability, num_sms = _device_facts(self.device)
        self.tiles = tiles_for(capability, dtype, problem.num_subcentres)
        # float16 would overflow where bfloat16 has the range of float32.
        self.exp_dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        self.width = _round_up(self.dim, self.tiles.width)
        self.images_GD = torch.nn.functional.pad(problem.unit_GD, (0, self.width - self.dim)).contiguous()
        image_tiles = -(-self.num_images // self.tiles.images)
        self.splits = max(1, num_sms * self.tiles.programs_per_sm // max(1, image_tiles))
        row_bytes = max(1, self.num_images) * problem.num_subcentres * self.exp_dtype.itemsize
        num_classes = problem.num_classes
        self.num_chunks = max(1, -(-num_classes // max(self.tiles.classes, _CHUNK_BYTES // row_bytes)))
        # Every program gets as many tiles as the others, unless that would be much more than there is.
        even = self.tiles.classes * self.splits
        per_chunk = -(-num_classes // self.num_chunks)
        self.plane = _round_up(per_chunk, even if per_chunk >= 16 * even else self.tiles.classes)
        self.num_chunks = -(-num_classes // self.plane)

    def chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.problem.num_classes, self.plane):
            yield start, min(start + self.plane, self.problem.num_classes)

    def new_products(self) -> Tensor:
        """Few output tiles and a long inner dimension: so many partial products that every SM has one."""
        num_tiles = -(-self.num_images // 128) * -(-self.width // 256)
        parts = min(16, 1 << max(0, (128 // max(1, num_tiles)).bit_length() - 1))
        return torch.zeros((parts, self.num_images, self.width), device=self.device)

    def recall(self, start: int, stop: int) -> _Chunk:
        stored = self.problem.stored.get((start, stop))
        if stored is not None:
            assert isinstance(stored, _Chunk)
            return stored
        return self.exponentials(start, stop, torch.empty((self.splits, self.num_images), device=self.device))

    def exponentials(self, start: int, stop: int, masses_NG: Tensor) -> _Chunk:
        problem, tiles = self.problem, self.tiles
        num_subcentres, plane = problem.num_subcentres, _round_up(stop - start, tiles.classes)
        centres_RD = self._unit_centres(start, stop, plane)
        exps_GR = torch.empty((self.num_images, num_subcentres * plane), dtype=self.exp_dtype, device=self.device)
        won_R = None
        if num_subcentres > 1:
            won_R = torch.zeros(num_subcentres * plane, dtype=torch.int32, device=self.device)
        borders_G, hardness = (None, None) if problem.curriculum is None else (p.float() for p in problem.curriculum)
        if self.num_images:
            grid = (-(-self.num_images // tiles.images) * self.splits,)
            triton_programs.exponentials[grid](
                TensorDescriptor.from_tensor(self.images_GD, [tiles.images, tiles.width]),
                TensorDescriptor.from_tensor(centres_RD, [tiles.classes, tiles.width]),
                TensorDescriptor.from_tensor(exps_GR, [tiles.images, tiles.classes // tiles.parts]),
                masses_NG,
                won_R,
                problem.target_slot_G,
                problem.class_weight_S,
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
                HAS_WEIGHTS=problem.class_weight_S is not None,
                HAS_FILTER=problem.filter_above is not None,
                IS_CURRICULAR=problem.curriculum is not None,
                BLOCK_G=tiles.images,
                BLOCK_S=tiles.classes,
                BLOCK_D=tiles.width,
                SPLITS=self.splits,
                FLATTEN=tiles.flatten,
                PARTS=tiles.parts,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
        return _Chunk(exps_GR, centres_RD, won_R, plane)

    def _unit_centres(self, start: int, stop: int, plane: int) -> Tensor:
        problem = self.problem
        num_rows = problem.num_subcentres * plane
        unit_RD = torch.empty((num_rows, self.width), dtype=problem.unit_GD.dtype, device=self.device)
        block_d = triton.next_power_of_2(self.width)
        block_r = max(1, 4096 // block_d)
        triton_programs.unit_centres[(-(-num_rows // block_r),)](
            problem.weight_RD,
            problem.classes_S,
            unit_RD,
            start,
            stop - start,
            len(problem.weight_RD) // problem.num_subcentres,
            plane,
            D=self.dim,
            WIDTH=self.width,
            M=problem.num_subcentres,
            IS_SAMPLED=problem.classes_S is not None,
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
    return max(0.0, problem.logit_bound - _UNSHIFTED_LOGIT)


def _weighted_images(run: _Run, coefficients_G: Tensor) -> Tensor:
    """Images times d loss / d mass: the softmax denominator meets the small matrix instead of the large one."""
    factors_G = coefficients_G * (run.problem.scale * math.exp(_shift(run.problem)))
    return (run.images_GD * factors_G[:, None]).to(run.exp_dtype)


def _add_products_(products_NGD: Tensor, exps_GR: Tensor, centres_RD: Tensor | None) -> None:
    assert centres_RD is not None, "a chunk just formed has its centres"
    num_parts = len(products_NGD)
    exps_NGR = exps_GR.unflatten(1, (num_parts, -1)).transpose(0, 1)
    centres_NRD = centres_RD.to(exps_GR.dtype).unflatten(0, (num_parts, -1))
    if exps_GR.dtype == torch.float32:
        products_NGD.baddbmm_(exps_NGR, centres_NRD)
    elif exps_GR.device.type == "cuda":
        torch.baddbmm(products_NGD, exps_NGR, centres_NRD, out_dtype=torch.float32, out=products_NGD)
    else:
        products_NGD.baddbmm_(exps_NGR.float(), centres_NRD.float())


def _product_into_(out: Tensor, a: Tensor, b: Tensor, *, adds: bool) -> None:
    """out = a @ b, or out += a @ b, accumulated in float32."""
    if a.dtype != torch.float32 and a.device.type == "cuda":
        if adds:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=1 if adds else 0)


def _by_class(grad_RD: Tensor, num_subcentres: int) -> Tensor:
    """Planes of sub-centres -> the sub-centres of a class beside each other."""
    if num_subcentres == 1:
        return grad_RD
    return grad_RD.unflatten(0, (num_subcentres, -1)).transpose(0, 1).flatten(0, 1)


def _won(chunks: list[_Chunk], start: int, stop: int) -> Tensor | None:
    won: Any = None
    for chunk in chunks:
        if chunk.won_R is not None:
            part = chunk.won_R.unflatten(0, (-1, chunk.plane))[:, start:stop].T.flatten() > 0
            won = part if won is None else won | part
    return won


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
