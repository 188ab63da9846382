"""Augmentations of one image that look at neighbouring pixels: each reads the planes `had` and writes the planes `put`.

H, W: height and width. PW: width of a row in memory. PLANE: size of a channel in memory. Each equals the function of the same
name in data/augment.py. `extra` is a third set of planes for what lies between.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from megaclass.data.augment_gpu.draws import between, clamp, uniform


@triton.jit
def _sample(had, put, at, u, v, is_inside, H: tl.constexpr, W: tl.constexpr, PW: tl.constexpr, PLANE: tl.constexpr):
    """Bilinear value at column u and row v; beyond the border, that of the border."""
    u = tl.minimum(tl.maximum(u, 0.0), W - 1.0)
    v = tl.minimum(tl.maximum(v, 0.0), H - 1.0)
    left = tl.floor(u)
    top = tl.floor(v)
    right_share = u - left
    bottom_share = v - top
    left = left.to(tl.int32)
    top = top.to(tl.int32)
    right = tl.minimum(left + 1, W - 1)
    bottom = tl.minimum(top + 1, H - 1)
    for channel in tl.static_range(3):
        plane = had + channel * PLANE
        value = tl.load(plane + top * PW + left, mask=is_inside, other=0.0) * (1 - right_share) * (1 - bottom_share)
        value += tl.load(plane + top * PW + right, mask=is_inside, other=0.0) * right_share * (1 - bottom_share)
        value += tl.load(plane + bottom * PW + left, mask=is_inside, other=0.0) * (1 - right_share) * bottom_share
        value += tl.load(plane + bottom * PW + right, mask=is_inside, other=0.0) * right_share * bottom_share
        tl.store(put + channel * PLANE + (at // W) * PW + at % W, clamp(value), mask=is_inside)


@triton.jit
def _sample_affine(
    had,
    put,
    a,
    b,
    c,
    d,
    e,
    f,
    H: tl.constexpr,
    W: tl.constexpr,
    PW: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """torch's affine_grid and grid_sample without aligned corners: (u, v) -> (a u + b v + c, d u + e v + f)."""
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        u = ((at % W).to(tl.float32) * 2 + 1) / W - 1
        v = ((at // W).to(tl.float32) * 2 + 1) / H - 1
        from_u = ((a * u + b * v + c + 1) * W - 1) * 0.5
        from_v = ((d * u + e * v + f + 1) * H - 1) * 0.5
        _sample(had, put, at, from_u, from_v, at < H * W, H, W, PW, PLANE)


@triton.jit
def crop(had, put, key, H: tl.constexpr, W: tl.constexpr, PW: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
    area = between(uniform(key, 1), 0.4, 1.0)
    shape = tl.exp(between(uniform(key, 2), -0.2, 0.2))
    width = tl.minimum(tl.sqrt(area * shape), 1.0)
    height = tl.minimum(tl.sqrt(area / shape), 1.0)
    left = (1 - width) * between(uniform(key, 3), -1.0, 1.0)
    top = (1 - height) * between(uniform(key, 4), -1.0, 1.0)
    _sample_affine(had, put, width, 0.0, left, 0.0, height, top, H, W, PW, PLANE, BLOCK)


@triton.jit
def affine(had, put, key, H: tl.constexpr, W: tl.constexpr, PW: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
    angle = between(uniform(key, 1), -0.2617993877991494, 0.2617993877991494)
    scale = tl.exp(between(uniform(key, 2), -0.22, 0.22))
    shape = tl.exp(between(uniform(key, 3), -0.22, 0.22))
    shear = between(uniform(key, 4), -0.2, 0.2)
    shift_u = between(uniform(key, 5), -0.2, 0.2)
    shift_v = between(uniform(key, 6), -0.2, 0.2)
    RATIO: tl.constexpr = H / W
    root = tl.sqrt(shape)
    width = scale * root
    height = scale / root
    cosine = tl.cos(angle)
    sine = tl.sin(angle)
    b = (shear * width - sine) * RATIO
    d = sine * height / RATIO
    _sample_affine(had, put, width * cosine, b, shift_u, d, height * cosine, shift_v, H, W, PW, PLANE, BLOCK)


@triton.jit
def warp(had, put, key, H: tl.constexpr, W: tl.constexpr, PW: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
    TURN: tl.constexpr = 6.283185307179586
    phase_0 = uniform(key, 1) * TURN
    phase_1 = uniform(key, 2) * TURN
    phase_2 = uniform(key, 3) * TURN
    phase_3 = uniform(key, 4) * TURN
    strength = between(uniform(key, 7), 0.0, 0.05)
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        u = (at % W).to(tl.float32) * (2.0 / (W - 1)) - 1
        v = (at // W).to(tl.float32) * (2.0 / (H - 1)) - 1
        wave_u = tl.sin(v * (TURN / 4) + phase_0) + tl.sin(v * (TURN / 2) + u * (TURN / 4) + phase_1)
        wave_v = tl.sin(u * (TURN / 4) + phase_2) + tl.sin(u * (TURN / 2) + v * (TURN / 4) + phase_3)
        from_u = (u + strength * wave_u + 1) * 0.5 * (W - 1)
        from_v = (v + strength * wave_v + 1) * 0.5 * (H - 1)
        _sample(had, put, at, from_u, from_v, at < H * W, H, W, PW, PLANE)


@triton.jit
def low_resolution(
    had,
    put,
    extra,
    small_sizes,
    key,
    H: tl.constexpr,
    W: tl.constexpr,
    PW: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    choice = tl.minimum((uniform(key, 1) * 7).to(tl.int32), 6)
    height = tl.load(small_sizes + choice)
    width = tl.load(small_sizes + 7 + choice)
    # Shrunk with torch's antialias: a triangle as wide as two small pixels, normalised over the taps inside the image.
    scale_v = H / height.to(tl.float32)
    scale_u = W / width.to(tl.float32)
    num_taps_v = (2 * scale_v).to(tl.int32) + 2
    num_taps_u = (2 * scale_u).to(tl.int32) + 2
    for first in range(0, height * width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < height * width
        centre_v = scale_v * ((at // width).to(tl.float32) + 0.5)
        centre_u = scale_u * ((at % width).to(tl.float32) + 0.5)
        first_v = tl.maximum((centre_v - scale_v + 0.5).to(tl.int32), 0)
        first_u = tl.maximum((centre_u - scale_u + 0.5).to(tl.int32), 0)
        last_v = tl.minimum((centre_v + scale_v + 0.5).to(tl.int32), H)
        last_u = tl.minimum((centre_u + scale_u + 0.5).to(tl.int32), W)
        total = tl.zeros((BLOCK,), tl.float32)
        red = tl.zeros((BLOCK,), tl.float32)
        green = tl.zeros((BLOCK,), tl.float32)
        blue = tl.zeros((BLOCK,), tl.float32)
        for tap_v in range(num_taps_v):
            v = first_v + tap_v
            weight_v = tl.maximum(1 - tl.abs((v.to(tl.float32) - centre_v + 0.5) / scale_v), 0.0)
            weight_v = tl.where(v < last_v, weight_v, 0.0)
            for tap_u in range(num_taps_u):
                u = first_u + tap_u
                weight = weight_v * tl.maximum(1 - tl.abs((u.to(tl.float32) - centre_u + 0.5) / scale_u), 0.0)
                weight = tl.where(u < last_u, weight, 0.0)
                is_read = is_inside & (weight > 0)
                place = v * PW + u
                total += weight
                red += weight * tl.load(had + place, mask=is_read, other=0.0)
                green += weight * tl.load(had + PLANE + place, mask=is_read, other=0.0)
                blue += weight * tl.load(had + 2 * PLANE + place, mask=is_read, other=0.0)
        tl.store(extra + at, red / total, mask=is_inside)
        tl.store(extra + PLANE + at, green / total, mask=is_inside)
        tl.store(extra + 2 * PLANE + at, blue / total, mask=is_inside)
    tl.debug_barrier()
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < H * W
        u = tl.maximum(((at % W).to(tl.float32) + 0.5) * (width.to(tl.float32) / W) - 0.5, 0.0)
        v = tl.maximum(((at // W).to(tl.float32) + 0.5) * (height.to(tl.float32) / H) - 0.5, 0.0)
        left = tl.minimum(u.to(tl.int32), width - 1)
        top = tl.minimum(v.to(tl.int32), height - 1)
        right = tl.minimum(left + 1, width - 1)
        bottom = tl.minimum(top + 1, height - 1)
        share_u = u - left.to(tl.float32)
        share_v = v - top.to(tl.float32)
        for channel in tl.static_range(3):
            plane = extra + channel * PLANE
            upper = tl.load(plane + top * width + left, mask=is_inside, other=0.0) * (1 - share_u)
            upper += tl.load(plane + top * width + right, mask=is_inside, other=0.0) * share_u
            lower = tl.load(plane + bottom * width + left, mask=is_inside, other=0.0) * (1 - share_u)
            lower += tl.load(plane + bottom * width + right, mask=is_inside, other=0.0) * share_u
            value = upper * (1 - share_v) + lower * share_v
            tl.store(put + channel * PLANE + (at // W) * PW + at % W, clamp(value), mask=is_inside)


@triton.jit
def blur(
    had, put, extra, key, H: tl.constexpr, W: tl.constexpr, PW: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr
):
    sigma = between(uniform(key, 1), 0.3, 2.0) * (W / 112)
    width = tl.maximum(2 * sigma * sigma, 1e-4)
    total = tl.full((), 0.0, tl.float32)
    for tap in range(9):
        total += tl.exp(-((tap - 4.0) * (tap - 4.0)) / width)
    for direction in tl.static_range(2):
        for first in range(0, H * W, BLOCK):
            at = first + tl.arange(0, BLOCK)
            is_inside = at < H * W
            row = at // W
            column = at % W
            for channel in tl.static_range(3):
                value = tl.zeros((BLOCK,), tl.float32)
                for tap in range(9):
                    weight = tl.exp(-((tap - 4.0) * (tap - 4.0)) / width) / total
                    if direction == 0:
                        from_column = tl.minimum(tl.maximum(column + (tap - 4), 0), W - 1)
                        value += weight * tl.load(
                            had + channel * PLANE + row * PW + from_column, mask=is_inside, other=0.0
                        )
                    else:
                        from_row = tl.minimum(tl.maximum(row + (tap - 4), 0), H - 1)
                        value += weight * tl.load(
                            extra + channel * PLANE + from_row * PW + column, mask=is_inside, other=0.0
                        )
                if direction == 0:
                    tl.store(extra + channel * PLANE + row * PW + column, value, mask=is_inside)
                else:
                    tl.store(put + channel * PLANE + row * PW + column, clamp(value), mask=is_inside)
        tl.debug_barrier()
