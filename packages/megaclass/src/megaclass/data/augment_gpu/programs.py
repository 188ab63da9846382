"""The Triton program that makes the backbone's input from raw pixels: normalised, mirrored and augmented, in one launch.

One program per image. It draws its random numbers itself, from the keys of seed and augmentation, the step and the image
(the same numbers as keyed_random.py on the host), and applies the augmentations in their order. Those that look at
neighbouring pixels read one plane of the scratch memory and write the other; a barrier between them makes all threads of
the program see the whole image.

Letters: H, W height and width; P padded to multiples of 8 for the blocks of the JPEG; N pixels per block.
Every augmentation equals the function of the same name in data/augment.py, which is the reference.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from megaclass.data.augment_gpu.operations import (
    AFFINE,
    BLUR,
    CROP,
    JPEG,
    LOW_RESOLUTION,
    WARP,
    affine,
    blur,
    combine,
    crop,
    jpeg,
    low_resolution,
    pixelwise,
    uniform,
    unsigned,
    warp,
)  # fmt: skip


@triton.jit(do_not_specialize=["step", "epoch"])
def prepare_images(
    pixels,  # uint8, any strides
    out,  # (B, H, W, 3)
    indices,  # (B,)
    keys,  # (1 + augmentations,): of mirroring, then of each augmentation, without step and image
    shares,  # (augmentations,)
    scratch,  # (B, 3 planes, 3, PH, PW)
    small_sizes,  # (2, 7): heights and widths of low_resolution
    tables,  # cosines (8, 8), then quantisation steps (3, 8, 8), then the matrices to and from YCC (3, 3) each
    step,
    epoch,
    stride_b,
    stride_c,
    stride_h,
    stride_w,
    H: tl.constexpr,
    W: tl.constexpr,
    OPERATIONS: tl.constexpr,  # four bits per augmentation, the first one lowest
    COUNT: tl.constexpr,
    PICK: tl.constexpr,  # 0: by shares; otherwise so many augmentations per image
    MIRROR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    index = unsigned(tl.load(indices + image))
    source = pixels + image * stride_b
    target = out + image * (3 * H * W)
    PH: tl.constexpr = (H + 7) // 8 * 8
    PW: tl.constexpr = (W + 7) // 8 * 8
    PLANE: tl.constexpr = PH * PW
    planes = scratch + image * (9 * PLANE)
    is_mirrored = tl.full((), 0, tl.int1)
    if MIRROR:
        state = combine(combine(unsigned(tl.load(keys)), unsigned(epoch)), index)
        is_mirrored = (state >> 63) > 0

    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < H * W
        row = at // W
        column = at % W
        column_from = tl.where(is_mirrored, W - 1 - column, column)
        place = row.to(tl.int64) * stride_h + column_from * stride_w
        for channel in tl.static_range(3):
            value = tl.load(source + place + channel * stride_c, mask=is_inside, other=0).to(tl.float32)
            # As the host does it: correctly rounded divisions. Twice is exact.
            value = (tl.div_rn(value, tl.full((BLOCK,), 255.0, tl.float32)) - 0.5) * 2.0
            if COUNT == 0:
                tl.store(target + at * 3 + channel, value, mask=is_inside)
            else:
                tl.store(planes + channel * PLANE + row * PW + column, value, mask=is_inside)

    if COUNT > 0:
        # Number of the plane that holds the image.
        now = tl.full((), 0, tl.int32)
        for number in tl.static_range(COUNT):
            key = _image_key(keys, number, step, index)
            if PICK == 0:
                is_applied = uniform(key, 0) < tl.load(shares + number)
            else:
                # The augmentations with the lowest first draws; of equal ones the first.
                mine = uniform(key, 0)
                rank = tl.full((), 0, tl.int32)
                for other in range(COUNT):
                    theirs = uniform(_image_key(keys, other, step, index), 0)
                    is_before = (theirs < mine) | ((theirs == mine) & (other < number))
                    rank += is_before.to(tl.int32)
                is_applied = rank < PICK
            if is_applied:
                tl.debug_barrier()
                had = planes + now * (3 * PLANE)
                now = 1 - now
                put = planes + now * (3 * PLANE)
                OPERATION: tl.constexpr = (OPERATIONS >> (4 * number)) & 15
                if OPERATION == CROP:
                    crop(had, put, key, H, W, PW, PLANE, BLOCK)
                elif OPERATION == AFFINE:
                    affine(had, put, key, H, W, PW, PLANE, BLOCK)
                elif OPERATION == WARP:
                    warp(had, put, key, H, W, PW, PLANE, BLOCK)
                elif OPERATION == LOW_RESOLUTION:
                    low_resolution(had, put, planes + 6 * PLANE, small_sizes, key, H, W, PW, PLANE, BLOCK)
                elif OPERATION == BLUR:
                    blur(had, put, planes + 6 * PLANE, key, H, W, PW, PLANE, BLOCK)
                elif OPERATION == JPEG:
                    jpeg(had, put, planes + 6 * PLANE, tables, key, H, W, PH, PW, PLANE, BLOCK)
                else:
                    pixelwise(had, put, key, OPERATION, H, W, PW, PLANE, BLOCK)
        tl.debug_barrier()
        had = planes + now * (3 * PLANE)
        for first in range(0, H * W, BLOCK):
            at = first + tl.arange(0, BLOCK)
            is_inside = at < H * W
            for channel in tl.static_range(3):
                value = tl.load(had + channel * PLANE + (at // W) * PW + at % W, mask=is_inside, other=0.0)
                tl.store(target + at * 3 + channel, value, mask=is_inside)


@triton.jit
def _image_key(keys, number, step, index):
    return combine(combine(unsigned(tl.load(keys + 1 + number)), unsigned(step)), index)
