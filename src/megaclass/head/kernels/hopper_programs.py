"""Programs for Hopper (H100, H200), in Gluon: the exponentials, and the product for the centres' gradient.

In both, one producer warp copies tiles into a ring of shared memory by hardware, and two groups of four warps multiply.

exponentials: a third faster than Triton's own schedule. The groups hold 64 images each in registers, as long as the program
runs, and take turns: while the tensor cores multiply for one, the other forms its exponentials and stores them.

centre_gradient: as fast as cuBLAS, with fewer registers. The rest is enough for programs of the update, which run on the same
multiprocessors: one waits for the tensor cores, the other for memory.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megaclass.gpu.triton_launch import launch
from megaclass.head.kernels.cut import GRADIENT_COLUMNS, HOPPER_TILES

# Renamed after Triton 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


_GROUP_IMAGES = gl.constexpr(HOPPER_TILES.images // 2)
_NUM_CLASSES = gl.constexpr(HOPPER_TILES.classes)
_BLOCK_D = gl.constexpr(HOPPER_TILES.width)
# Registers of a thread. Every one starts with a third of what three groups of four warps may have; the producer gives most of
# it to the others.
REGISTERS_AT_START = 168
_GROUP_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)
# centre_gradient takes three quarters of a multiprocessor's registers.
GRADIENT_REGISTERS_AT_START = 128
_GRADIENT_GROUP_REGISTERS = gl.constexpr(176)

GRADIENT_STAGES = 4
# Classes of a group; both multiply the same columns of the images. Blocks of copies have 64 rows or columns.
_CLASSES = gl.constexpr(64)
_COLUMNS = gl.constexpr(GRADIENT_COLUMNS)
_BLOCK_G = gl.constexpr(64)
_BLOCK_OUT = gl.constexpr(64)


@cache
def descriptor_layout(height: int, width: int, dtype: torch.dtype) -> Any:
    """Returns the layout in shared memory of a block that is copied by hardware."""
    return gl.NVMMASharedLayout.get_default_for([height, width], getattr(gl, str(dtype).removeprefix("torch.")))


def _descriptor(matrix: Tensor, height: int, width: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [height, width], descriptor_layout(height, width, matrix.dtype))


def launch_exponentials(
    images_GD: Tensor,
    centres_PD: Tensor,
    exps_GP: Tensor,
    masses_NG: Tensor,
    target_slot_G: Tensor,
    num_drawn: Tensor | None,
    *,
    first_slot: int,
    num_slots: int,
    scale_log2: float,
    shift_log2: float,
    splits: int,
) -> None:
    """Launches the program below on one chunk."""
    (num_images, width), tiles = images_GD.shape, HOPPER_TILES
    launch(
        exponentials,
        -(-num_images // tiles.images) * splits,
        _descriptor(images_GD, tiles.images, tiles.width),
        _descriptor(centres_PD, tiles.classes, tiles.width),
        _descriptor(exps_GP, tiles.images // 2, tiles.classes),
        masses_NG,
        target_slot_G,
        num_drawn,
        first_slot,
        num_slots,
        num_images,
        exps_GP.shape[1],
        scale_log2,
        shift_log2,
        WIDTH=width,
        SPLITS=splits,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        maxnreg=REGISTERS_AT_START,
    )


def launch_centre_gradient(exps_GP: Tensor, images_GD: Tensor, grad_PD: Tensor, *, num_sms: int) -> None:
    """Launches grad_PD = exps_GP.T @ images_GD."""
    num_images, width = images_GD.shape
    parts = width // GRADIENT_COLUMNS
    launch(
        centre_gradient,
        num_sms // parts * parts,
        _descriptor(exps_GP, 64, 64),
        _descriptor(images_GD, 64, GRADIENT_COLUMNS),
        _descriptor(grad_PD, 64, 64),
        exps_GP.shape[1],
        num_images,
        WIDTH=width,
        STAGES=GRADIENT_STAGES,
        num_warps=4,
        maxnreg=GRADIENT_REGISTERS_AT_START,
    )


@gluon.jit(do_not_specialize=["first_slot", "num_slots"])
def exponentials(
    images,  # (G, WIDTH), like the next two a descriptor
    centres,  # (P, WIDTH)
    exps,  # (G, P), out
    masses,  # (SPLITS, G) float32, out: partial sums over classes
    target_slots,  # (G,) int64, -1 where not on this rank
    num_drawn,  # () int32: slots from this one on are padding; or None
    first_slot,
    num_slots,
    num_images,
    plane,
    scale_log2,  # scale / ln 2
    shift_log2,
    WIDTH: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """exp(logit - shift) of every negative; zero for targets and padding. Programs share the work as in Triton's one."""
    ring = gl.allocate_shared_memory(centres.dtype, [STAGES, _NUM_CLASSES, _BLOCK_D], centres.layout)
    tiles = gl.allocate_shared_memory(exps.dtype, [2, _GROUP_IMAGES, _NUM_CLASSES], exps.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(filled.index(place), count=1)
        mbarrier.init(freed.index(place), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()

    num_image_tiles = gl.cdiv(num_images, 2 * _GROUP_IMAGES)
    image_0 = (gl.program_id(0) % num_image_tiles) * (2 * _GROUP_IMAGES)
    split = gl.program_id(0) // num_image_tiles
    num_tiles = gl.cdiv(gl.cdiv(plane, _NUM_CLASSES) - split, SPLITS)
    if num_drawn is not None:
        num_slots = gl.minimum(num_slots, gl.load(num_drawn) - first_slot)
    shared = (ring, tiles, filled, freed, turns)
    numbers = (image_0, split, num_tiles, first_slot, num_slots, num_images, scale_log2, shift_log2)
    gl.warp_specialize(
        [
            (_multiply_and_store, (0, shared, numbers, exps, masses, target_slots, WIDTH, SPLITS, STAGES)),
            (_multiply_and_store, (1, shared, numbers, exps, masses, target_slots, WIDTH, SPLITS, STAGES)),
            (_fill_ring, (shared, numbers, images, centres, WIDTH, SPLITS, STAGES)),
        ],
        [4, 1],
        [_GROUP_REGISTERS, _PRODUCER_REGISTERS],
    )


@gluon.jit
def _fill_ring(
    shared, numbers, images, centres, WIDTH: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The images first, then tile after tile of the centres, BLOCK_D columns at a time."""
    ring, _, filled, freed, _ = shared
    image_0, split, num_tiles, _, _, _, _, _ = numbers
    STEPS: gl.constexpr = WIDTH // _BLOCK_D
    for k in range(STEPS):
        _fill(ring, filled, freed, images, image_0, k * _BLOCK_D, k, STAGES)
    for tile in range(num_tiles):
        slot_0 = (split + tile * SPLITS) * _NUM_CLASSES
        for k in range(STEPS):
            _fill(ring, filled, freed, centres, slot_0, k * _BLOCK_D, (tile + 1) * STEPS + k, STAGES)


@gluon.jit
def _fill(ring, filled, freed, source, row, column, number, STAGES: gl.constexpr):
    place, phase = _place(number, STAGES)
    mbarrier.wait(freed.index(place), phase ^ 1)  # passes at once on the first way round
    mbarrier.expect(filled.index(place), source.block_type.nbytes)
    _load(source, [row, column], filled.index(place), ring.index(place))


@gluon.jit
def _place(number, STAGES: gl.constexpr):
    """Place in the ring of the copy of this number, and its way round, odd or even."""
    return number % STAGES, (number // STAGES) & 1


@gluon.jit
def _multiply_and_store(
    GROUP: gl.constexpr, shared, numbers, exps, masses, target_slots,
    WIDTH: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ring, tiles, filled, freed, turns = shared
    image_0, split, num_tiles, first_slot, num_slots, num_images, scale_log2, shift_log2 = numbers
    STEPS: gl.constexpr = WIDTH // _BLOCK_D
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _NUM_CLASSES, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)

    held = ()
    for k in gl.static_range(STEPS):
        place, phase = _place(k, STAGES)
        mbarrier.wait(filled.index(place), phase)
        part = ring.index(place).slice(GROUP * _GROUP_IMAGES, _GROUP_IMAGES)
        held += (part.load(gl.DotOperandLayout(0, MMA, 2)),)  # type: ignore[assignment]
        _barrier()  # every warp has its rows
        mbarrier.arrive(freed.index(place), count=1)

    rows = image_0 + GROUP * _GROUP_IMAGES + gl.arange(0, _GROUP_IMAGES, ROWS)
    slots = gl.load(target_slots + rows, mask=rows < num_images, other=-1)
    # Targets of other chunks become -1: they can meet no column.
    is_here = (slots >= first_slot) & (slots < first_slot + num_slots)
    places = gl.where(is_here, slots - first_slot, -1).to(gl.int32)
    columns = gl.arange(0, _NUM_CLASSES, COLUMNS)
    sums = gl.zeros([_GROUP_IMAGES], gl.float32, ROWS)
    mine = tiles.index(GROUP)
    for tile in range(num_tiles):
        slot_0 = (split + tile * SPLITS) * _NUM_CLASSES
        # Group 0 begins; then each waits for the other's products.
        mbarrier.wait(turns.index(GROUP), (tile & 1) ^ (1 - GROUP))
        cosines = gl.zeros([_GROUP_IMAGES, _NUM_CLASSES], gl.float32, MMA)
        for k in gl.static_range(STEPS):
            place, phase = _place((tile + 1) * STEPS + k, STAGES)
            mbarrier.wait(filled.index(place), phase)
            operand = ring.index(place).permute((1, 0))
            cosines = warpgroup_mma(held[k], operand, cosines, use_acc=k > 0, is_async=True)
            if k > 0:
                cosines = warpgroup_mma_wait(1, deps=[cosines])
                before, _ = _place((tile + 1) * STEPS + k - 1, STAGES)
                mbarrier.arrive(freed.index(before), count=1)
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        cosines = warpgroup_mma_wait(0, deps=[cosines])
        last, _ = _place((tile + 1) * STEPS + STEPS - 1, STAGES)
        mbarrier.arrive(freed.index(last), count=1)

        values = _exp2(cosines * scale_log2 - shift_log2)
        is_target = gl.expand_dims(columns, 0) == gl.expand_dims(places - slot_0, 1)
        values = gl.where(is_target, 0.0, values)
        if slot_0 + _NUM_CLASSES > num_slots:
            values = gl.where(gl.expand_dims(columns + slot_0 < num_slots, 0), values, 0.0)
        sums += gl.sum(values, 1)
        tma.store_wait(0)
        _barrier()  # the copy of the tile before has been read
        mine.store(values.to(exps.dtype))
        fence_async_shared()
        _barrier()
        _store(exps, [image_0 + GROUP * _GROUP_IMAGES, slot_0], mine)
    tma.store_wait(0)
    gl.store(masses + split * num_images + rows, sums, mask=rows < num_images)


@gluon.jit
def _exp2(values):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], gl.float32, True, 1)


@gluon.jit(do_not_specialize=["num_classes", "num_images"])
def centre_gradient(
    exps,  # (G, P), like the next two a descriptor
    images,  # (G, WIDTH), times d loss / d mass
    grad,  # (P, WIDTH), out
    num_classes,  # P
    num_images,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The transposed exponentials times the images, summed in float32. Programs side by side have the same classes."""
    classes_ring = gl.allocate_shared_memory(exps.dtype, [2 * STAGES, _BLOCK_G, _CLASSES], exps.layout)
    images_ring = gl.allocate_shared_memory(images.dtype, [STAGES, _BLOCK_G, _COLUMNS], images.layout)
    tiles = gl.allocate_shared_memory(grad.dtype, [2, _CLASSES, _BLOCK_OUT], grad.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(filled.index(place), count=1)
        mbarrier.init(freed.index(place), count=2)
    fence_async_shared()

    PARTS: gl.constexpr = WIDTH // _COLUMNS
    column = (gl.program_id(0) % PARTS) * _COLUMNS
    first = gl.program_id(0) // PARTS
    stride = gl.num_programs(0) // PARTS
    num_tiles = gl.cdiv(gl.cdiv(num_classes, 2 * _CLASSES) - first, stride)
    shared = (classes_ring, images_ring, tiles, filled, freed)
    numbers = (column, first, stride, num_tiles, gl.cdiv(num_images, _BLOCK_G))
    gl.warp_specialize(
        [
            (_sum_and_store, (0, shared, numbers, grad, STAGES)),
            (_sum_and_store, (1, shared, numbers, grad, STAGES)),
            (_fill_rings, (shared, numbers, exps, images, STAGES)),
        ],
        [4, 1],
        [_GRADIENT_GROUP_REGISTERS, _PRODUCER_REGISTERS],
    )


@gluon.jit
def _fill_rings(shared, numbers, exps, images, STAGES: gl.constexpr):
    classes_ring, images_ring, _, filled, freed = shared
    column, first, stride, num_tiles, num_steps = numbers
    for number in range(num_tiles * num_steps):
        place, phase = _place(number, STAGES)
        row = (number % num_steps) * _BLOCK_G
        class_0 = (first + number // num_steps * stride) * (2 * _CLASSES)
        mbarrier.wait(freed.index(place), phase ^ 1)
        mbarrier.expect(filled.index(place), 2 * exps.block_type.nbytes + images.block_type.nbytes)
        for group in gl.static_range(2):
            _load(exps, [row, class_0 + group * _CLASSES], filled.index(place), classes_ring.index(2 * place + group))
        _load(images, [row, column], filled.index(place), images_ring.index(place))


@gluon.jit
def _sum_and_store(GROUP: gl.constexpr, shared, numbers, grad, STAGES: gl.constexpr):
    classes_ring, images_ring, tiles, filled, freed = shared
    column, first, stride, num_tiles, num_steps = numbers
    # Two instructions for 256 columns: one would not be compiled with so few registers.
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS // 2, 16])
    mine = tiles.index(GROUP)
    for tile in range(num_tiles):
        sums = gl.zeros([_CLASSES, _COLUMNS], gl.float32, MMA)
        for step in range(num_steps):
            number = tile * num_steps + step
            place, phase = _place(number, STAGES)
            mbarrier.wait(filled.index(place), phase)
            operand = classes_ring.index(2 * place + GROUP).permute((1, 0))
            sums = warpgroup_mma(operand, images_ring.index(place), sums, use_acc=step > 0, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            before, _ = _place(number + STAGES - 1, STAGES)
            mbarrier.arrive(freed.index(before), count=1, pred=step > 0)
        sums = warpgroup_mma_wait(0, deps=[sums])
        last, _ = _place((tile + 1) * num_steps - 1, STAGES)
        mbarrier.arrive(freed.index(last), count=1)

        class_0 = (first + tile * stride) * (2 * _CLASSES) + GROUP * _CLASSES
        left, right = _halves(sums)
        for half in gl.static_range(2):
            quarters = _halves(left if half == 0 else right)
            for quarter in gl.static_range(2):
                tma.store_wait(0)
                _barrier()  # the copy of the part before has been read
                mine.store(quarters[quarter].to(grad.dtype))
                fence_async_shared()
                _barrier()
                _store(grad, [class_0, column + (2 * half + quarter) * _BLOCK_OUT], mine)
    tma.store_wait(0)


@gluon.jit
def _halves(values):
    """The left and the right half of the columns, without moving a number."""
    HEIGHT: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    return values.reshape([HEIGHT, 2, WIDTH // 2]).permute([0, 2, 1]).split()
