"""The augmentation `jpeg` of one image, and those that change each pixel by itself. The letters are those of neighbours.py."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from megaclass.data.augment_gpu.draws import COLOUR, GREY, OCCLUSION, between, clamp, mix_64, uniform, unsigned


@triton.jit
def _rounded(x):
    """To the nearest integer, halves to even, for |x| below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _cosines(line, tables, at, is_inside, STRIDE: tl.constexpr, IS_INVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The cosine transform, or its inverse, of 8 numbers in a row or column: the number that belongs at place `at` of it.

    line: where the row or column begins. STRIDE: from one of its numbers to the next.
    """
    value = tl.zeros((BLOCK,), tl.float32)
    for tap in range(8):
        number = tl.load(line + (at // 8 * 8 + tap) * STRIDE, mask=is_inside, other=0.0)
        # The matrix is orthogonal: its transpose is its inverse.
        if IS_INVERSE:
            value += tl.load(tables + tap * 8 + at % 8) * number
        else:
            value += tl.load(tables + (at % 8) * 8 + tap) * number
    return value


@triton.jit
def jpeg(
    had,
    put,
    extra,
    tables,
    key,
    H: tl.constexpr,
    W: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """To YCC; cosine transform of columns, then of rows, quantised; then both back, and to RGB."""
    quality = 20 + tl.floor(uniform(key, 1) * 70)
    scale = tl.where(quality < 50, 5000 / quality, 200 - 2 * quality) / 100
    STEPS: tl.constexpr = 64
    TO_YCC: tl.constexpr = 64 + 192
    TO_RGB: tl.constexpr = 64 + 192 + 9
    for first in range(0, PLANE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < PLANE
        place = tl.minimum(at // PW, H - 1) * PW + tl.minimum(at % PW, W - 1)
        red = tl.load(had + place, mask=is_inside, other=0.0) * 127.5
        green = tl.load(had + PLANE + place, mask=is_inside, other=0.0) * 127.5
        blue = tl.load(had + 2 * PLANE + place, mask=is_inside, other=0.0) * 127.5
        for channel in tl.static_range(3):
            value = tl.load(tables + TO_YCC + channel * 3) * red
            value += tl.load(tables + TO_YCC + channel * 3 + 1) * green
            value += tl.load(tables + TO_YCC + channel * 3 + 2) * blue
            tl.store(put + channel * PLANE + at, value, mask=is_inside)
    tl.debug_barrier()
    for first in range(0, PLANE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < PLANE
        row = at // PW
        column = at % PW
        for channel in tl.static_range(3):
            value = _cosines(put + channel * PLANE + column, tables, row, is_inside, PW, False, BLOCK)
            tl.store(extra + channel * PLANE + at, value, mask=is_inside)
    tl.debug_barrier()
    for first in range(0, PLANE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < PLANE
        row = at // PW
        column = at % PW
        for channel in tl.static_range(3):
            value = _cosines(extra + channel * PLANE + row * PW, tables, column, is_inside, 1, False, BLOCK)
            quantum = tl.load(tables + STEPS + channel * 64 + (row % 8) * 8 + column % 8) * scale
            quantum = tl.minimum(tl.maximum(_rounded(quantum), 1.0), 255.0)
            tl.store(put + channel * PLANE + at, _rounded(value / quantum) * quantum, mask=is_inside)
    tl.debug_barrier()
    for first in range(0, PLANE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < PLANE
        row = at // PW
        column = at % PW
        for channel in tl.static_range(3):
            value = _cosines(put + channel * PLANE + column, tables, row, is_inside, PW, True, BLOCK)
            tl.store(extra + channel * PLANE + at, value, mask=is_inside)
    tl.debug_barrier()
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < H * W
        row = at // W
        column = at % W
        red = tl.zeros((BLOCK,), tl.float32)
        green = tl.zeros((BLOCK,), tl.float32)
        blue = tl.zeros((BLOCK,), tl.float32)
        for channel in tl.static_range(3):
            value = _cosines(extra + channel * PLANE + row * PW, tables, column, is_inside, 1, True, BLOCK)
            red += tl.load(tables + TO_RGB + channel) * value
            green += tl.load(tables + TO_RGB + 3 + channel) * value
            blue += tl.load(tables + TO_RGB + 6 + channel) * value
        place = row * PW + column
        tl.store(put + place, clamp(red / 127.5), mask=is_inside)
        tl.store(put + PLANE + place, clamp(green / 127.5), mask=is_inside)
        tl.store(put + 2 * PLANE + place, clamp(blue / 127.5), mask=is_inside)


@triton.jit
def pixelwise(
    had,
    put,
    key,
    OPERATION: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PW: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Colour, grey, occlusion, erase: each pixel depends on itself alone."""
    draw_1 = uniform(key, 1)
    draw_2 = uniform(key, 2)
    draw_3 = uniform(key, 3)
    draw_4 = uniform(key, 4)
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < H * W
        place = (at // W) * PW + at % W
        red = tl.load(had + place, mask=is_inside, other=0.0)
        green = tl.load(had + PLANE + place, mask=is_inside, other=0.0)
        blue = tl.load(had + 2 * PLANE + place, mask=is_inside, other=0.0)
        if OPERATION == COLOUR:
            brightness = between(draw_1, -0.25, 0.25)
            contrast = between(draw_2, 0.7, 1.3)
            saturation = between(draw_3, 0.5, 1.5)
            red = red * contrast + brightness
            green = green * contrast + brightness
            blue = blue * contrast + brightness
            luma = red * 0.299 + green * 0.587 + blue * 0.114
            red = luma + (red - luma) * saturation
            green = luma + (green - luma) * saturation
            blue = luma + (blue - luma) * saturation
            angle = between(draw_4, -0.15, 0.15)
            cosine = tl.cos(angle)
            sine = tl.sin(angle) * 0.5773502691896258
            mean = (red + green + blue) * (1 - cosine) * 0.3333333333333333
            turned_red = cosine * red + mean + sine * (blue - green)
            turned_green = cosine * green + mean + sine * (red - blue)
            blue = cosine * blue + mean + sine * (green - red)
            red = turned_red
            green = turned_green
        elif OPERATION == GREY:
            luma = red * 0.299 + green * 0.587 + blue * 0.114
            red = luma
            green = luma
            blue = luma
        else:
            v = ((at // W).to(tl.float32) + 0.5) / H
            u = ((at % W).to(tl.float32) + 0.5) / W
            if OPERATION == OCCLUSION:
                area = between(draw_1, 0.02, 0.25)
                shape = tl.exp(between(draw_2, -0.7, 0.7))
                fill_red = between(uniform(key, 5), -1.0, 1.0)
                fill_green = between(uniform(key, 6), -1.0, 1.0)
                fill_blue = between(uniform(key, 7), -1.0, 1.0)
            else:
                area = between(draw_1, 0.02, 0.33)
                shape = tl.exp(between(draw_2, -1.2, 1.2))
                low = (uniform(key, 5) * 16777216).to(tl.int64)
                noise_key = unsigned(low + (uniform(key, 6) * 16777216).to(tl.int64) * 16777216)
                noise = mix_64(noise_key ^ mix_64(at.to(tl.uint64)))
                fill_red = (noise & 0xFF).to(tl.float32) * 0.00784313725490196 - 1
                fill_green = ((noise >> 8) & 0xFF).to(tl.float32) * 0.00784313725490196 - 1
                fill_blue = ((noise >> 16) & 0xFF).to(tl.float32) * 0.00784313725490196 - 1
            half_u = tl.sqrt(area * shape) / 2
            half_v = tl.sqrt(area / shape) / 2
            is_hidden = (tl.abs(u - draw_3) < half_u) & (tl.abs(v - draw_4) < half_v)
            red = tl.where(is_hidden, fill_red, red)
            green = tl.where(is_hidden, fill_green, green)
            blue = tl.where(is_hidden, fill_blue, blue)
        tl.store(put + place, clamp(red), mask=is_inside)
        tl.store(put + PLANE + place, clamp(green), mask=is_inside)
        tl.store(put + 2 * PLANE + place, clamp(blue), mask=is_inside)
