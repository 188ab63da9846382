"""The Triton program that makes the backbone's input from raw pixels: normalised, mirrored and augmented, in one launch.

One program per image. It draws its random numbers itself, from the keys of seed and augmentation, the step and the image
(the same numbers as keyed_random.py on the host), and applies the augmentations in their order. Each of them equals the
function of the same name in data/augment.py, which is the reference: it reads the planes `had` and writes the planes `put`;
`extra` is a third set of planes for what lies between. A barrier between two augmentations makes all threads of the program
see the whole image.

H, W: height and width. PLANE: numbers from one channel to the next, enough for whole blocks of a JPEG, whose rows have PW
numbers. BLOCK: pixels at a time.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

# The host tells the program by these numbers which augmentations to apply, four bits each.
CROP = tl.constexpr(1)
AFFINE = tl.constexpr(2)
WARP = tl.constexpr(3)
LOW_RESOLUTION = tl.constexpr(4)
BLUR = tl.constexpr(5)
COLOUR = tl.constexpr(6)
GREY = tl.constexpr(7)
OCCLUSION = tl.constexpr(8)
JPEG = tl.constexpr(9)
ERASE = tl.constexpr(10)


@triton.jit
def mix_64(x):
    """keyed_random.mix64_int on a uint64."""
    x += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def combine(state, part):
    """One more key in keyed_random.combine64."""
    return mix_64(mix_64(part) ^ state)


@triton.jit
def unsigned(x):
    return x.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def uniform(key, number: tl.constexpr):
    """Draw `number` of an image's key, in [0, 1)."""
    bits = combine(combine(tl.full((), 0, tl.uint64), key), tl.full((), number, tl.uint64))
    return (bits >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def between(uniform, low, high):
    return low + uniform * (high - low)


@triton.jit
def clamp(x):
    return tl.minimum(tl.maximum(x, -1.0), 1.0)


@triton.jit
def _load(planes, place, mask, PLANE: tl.constexpr):
    red = tl.load(planes + place, mask=mask, other=0.0)
    green = tl.load(planes + PLANE + place, mask=mask, other=0.0)
    blue = tl.load(planes + 2 * PLANE + place, mask=mask, other=0.0)
    return red, green, blue


@triton.jit
def _store(planes, place, red, green, blue, mask, PLANE: tl.constexpr):
    tl.store(planes + place, red, mask=mask)
    tl.store(planes + PLANE + place, green, mask=mask)
    tl.store(planes + 2 * PLANE + place, blue, mask=mask)


# ---- augmentations that look at neighbouring pixels ----


@triton.jit
def _sample(had, put, at, u, v, is_inside, height, width, PLANE: tl.constexpr):
    """Writes to `at` the bilinear value at column u and row v of (height, width); beyond the border, that of the border."""
    u = tl.minimum(tl.maximum(u, 0.0), width - 1.0)
    v = tl.minimum(tl.maximum(v, 0.0), height - 1.0)
    left = tl.floor(u)
    top = tl.floor(v)
    right_share = u - left
    bottom_share = v - top
    left = left.to(tl.int32)
    top = top.to(tl.int32)
    right = tl.minimum(left + 1, width - 1)
    bottom = tl.minimum(top + 1, height - 1)
    for channel in tl.static_range(3):
        plane = had + channel * PLANE
        value = tl.load(plane + top * width + left, mask=is_inside, other=0.0) * (1 - right_share) * (1 - bottom_share)
        value += tl.load(plane + top * width + right, mask=is_inside, other=0.0) * right_share * (1 - bottom_share)
        value += tl.load(plane + bottom * width + left, mask=is_inside, other=0.0) * (1 - right_share) * bottom_share
        value += tl.load(plane + bottom * width + right, mask=is_inside, other=0.0) * right_share * bottom_share
        tl.store(put + channel * PLANE + at, clamp(value), mask=is_inside)


@triton.jit
def _sample_affine(
    had, put, a, b, c, d, e, f, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr
):
    """torch's affine_grid and grid_sample without aligned corners: (u, v) -> (a u + b v + c, d u + e v + f)."""
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        u = ((at % W).to(tl.float32) * 2 + 1) / W - 1
        v = ((at // W).to(tl.float32) * 2 + 1) / H - 1
        from_u = ((a * u + b * v + c + 1) * W - 1) * 0.5
        from_v = ((d * u + e * v + f + 1) * H - 1) * 0.5
        _sample(had, put, at, from_u, from_v, at < H * W, H, W, PLANE)


@triton.jit
def crop(had, put, key, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
    area = between(uniform(key, 1), 0.4, 1.0)
    shape = tl.exp(between(uniform(key, 2), -0.2, 0.2))
    width = tl.minimum(tl.sqrt(area * shape), 1.0)
    height = tl.minimum(tl.sqrt(area / shape), 1.0)
    left = (1 - width) * between(uniform(key, 3), -1.0, 1.0)
    top = (1 - height) * between(uniform(key, 4), -1.0, 1.0)
    _sample_affine(had, put, width, 0.0, left, 0.0, height, top, H, W, PLANE, BLOCK)


@triton.jit
def affine(had, put, key, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
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
    _sample_affine(had, put, width * cosine, b, shift_u, d, height * cosine, shift_v, H, W, PLANE, BLOCK)


@triton.jit
def warp(had, put, key, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
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
        _sample(had, put, at, from_u, from_v, at < H * W, H, W, PLANE)


@triton.jit
def low_resolution(
    had, put, extra, small_sizes, key, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr
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
                red_there, green_there, blue_there = _load(had, v * W + u, is_read, PLANE)
                total += weight
                red += weight * red_there
                green += weight * green_there
                blue += weight * blue_there
        _store(extra, at, red / total, green / total, blue / total, is_inside, PLANE)
    tl.debug_barrier()
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        u = ((at % W).to(tl.float32) + 0.5) * (width.to(tl.float32) / W) - 0.5
        v = ((at // W).to(tl.float32) + 0.5) * (height.to(tl.float32) / H) - 0.5
        _sample(extra, put, at, u, v, at < H * W, height, width, PLANE)


@triton.jit
def blur(had, put, extra, key, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
    sigma = between(uniform(key, 1), 0.3, 2.0) * (W / 112)
    width = tl.maximum(2 * sigma * sigma, 1e-4)
    total = tl.full((), 0.0, tl.float32)
    for tap in range(9):
        total += tl.exp(-((tap - 4.0) * (tap - 4.0)) / width)
    _blur_lines(had, extra, width, total, True, H, W, PLANE, BLOCK)
    _blur_lines(extra, put, width, total, False, H, W, PLANE, BLOCK)


@triton.jit
def _blur_lines(
    had,
    put,
    width,
    total,
    IS_ROW: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blurs along the rows, then along the columns, whose result is clamped."""
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < H * W
        for channel in tl.static_range(3):
            value = tl.zeros((BLOCK,), tl.float32)
            for tap in range(9):
                weight = tl.exp(-((tap - 4.0) * (tap - 4.0)) / width) / total
                if IS_ROW:
                    place = at // W * W + tl.minimum(tl.maximum(at % W + (tap - 4), 0), W - 1)
                else:
                    place = tl.minimum(tl.maximum(at // W + (tap - 4), 0), H - 1) * W + at % W
                value += weight * tl.load(had + channel * PLANE + place, mask=is_inside, other=0.0)
            tl.store(put + channel * PLANE + at, value if IS_ROW else clamp(value), mask=is_inside)
    tl.debug_barrier()


# ---- jpeg, and those that change each pixel by itself ----


@triton.jit
def _rounded(x):
    """To the nearest integer, halves to even, for |x| below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _cosines(line, tables, at, is_inside, STRIDE: tl.constexpr, IS_INVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """One output of an 8-point cosine transform (or its inverse) of a row or column, at position `at`.

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
def _transform_columns(
    had, put, tables, PW: tl.constexpr, PLANE: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    for first in range(0, PLANE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        for channel in tl.static_range(3):
            line = had + channel * PLANE + at % PW
            value = _cosines(line, tables, at // PW, at < PLANE, PW, INVERSE, BLOCK)
            tl.store(put + channel * PLANE + at, value, mask=at < PLANE)
    tl.debug_barrier()


@triton.jit
def jpeg(had, put, extra, tables, key, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr):
    """To YCC; cosine transform of columns, then of rows, quantised; then both back, and to RGB."""
    quality = 20 + tl.floor(uniform(key, 1) * 70)
    scale = tl.where(quality < 50, 5000 / quality, 200 - 2 * quality) / 100
    STEPS: tl.constexpr = 64
    TO_YCC: tl.constexpr = 64 + 192
    TO_RGB: tl.constexpr = 64 + 192 + 9
    PW: tl.constexpr = (W + 7) // 8 * 8
    for first in range(0, PLANE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        place = tl.minimum(at // PW, H - 1) * W + tl.minimum(at % PW, W - 1)
        red, green, blue = _load(had, place, at < PLANE, PLANE)
        for channel in tl.static_range(3):
            value = tl.load(tables + TO_YCC + channel * 3) * (red * 127.5)
            value += tl.load(tables + TO_YCC + channel * 3 + 1) * (green * 127.5)
            value += tl.load(tables + TO_YCC + channel * 3 + 2) * (blue * 127.5)
            tl.store(put + channel * PLANE + at, value, mask=at < PLANE)
    tl.debug_barrier()
    _transform_columns(put, extra, tables, PW, PLANE, False, BLOCK)
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
    _transform_columns(put, extra, tables, PW, PLANE, True, BLOCK)
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < H * W
        red = tl.zeros((BLOCK,), tl.float32)
        green = tl.zeros((BLOCK,), tl.float32)
        blue = tl.zeros((BLOCK,), tl.float32)
        for channel in tl.static_range(3):
            line = extra + channel * PLANE + at // W * PW
            value = _cosines(line, tables, at % W, is_inside, 1, True, BLOCK)
            red += tl.load(tables + TO_RGB + channel) * value
            green += tl.load(tables + TO_RGB + 3 + channel) * value
            blue += tl.load(tables + TO_RGB + 6 + channel) * value
        _store(put, at, clamp(red / 127.5), clamp(green / 127.5), clamp(blue / 127.5), is_inside, PLANE)


@triton.jit
def pixelwise(
    had, put, key, OPERATION: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr
):
    """Colour, grey, occlusion, erase: each pixel depends on itself alone."""
    draw_1 = uniform(key, 1)
    draw_2 = uniform(key, 2)
    draw_3 = uniform(key, 3)
    draw_4 = uniform(key, 4)
    for first in range(0, H * W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < H * W
        red, green, blue = _load(had, at, is_inside, PLANE)
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
        _store(put, at, clamp(red), clamp(green), clamp(blue), is_inside, PLANE)


# ---- the program ----


@triton.jit(do_not_specialize=["step", "epoch"])
def prepare_images(
    pixels,  # uint8, any strides
    out,  # (B, H, W, 3)
    indices,  # (B,)
    keys,  # (1 + augmentations,): of mirroring, then of each augmentation, without step and image
    shares,  # (augmentations,)
    scratch,  # (B, 3 sets of planes, 3, PLANE)
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
    PLANE: tl.constexpr = (H + 7) // 8 * 8 * ((W + 7) // 8 * 8)
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
                tl.store(planes + channel * PLANE + at, value, mask=is_inside)

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
                    crop(had, put, key, H, W, PLANE, BLOCK)
                elif OPERATION == AFFINE:
                    affine(had, put, key, H, W, PLANE, BLOCK)
                elif OPERATION == WARP:
                    warp(had, put, key, H, W, PLANE, BLOCK)
                elif OPERATION == LOW_RESOLUTION:
                    low_resolution(had, put, planes + 6 * PLANE, small_sizes, key, H, W, PLANE, BLOCK)
                elif OPERATION == BLUR:
                    blur(had, put, planes + 6 * PLANE, key, H, W, PLANE, BLOCK)
                elif OPERATION == JPEG:
                    jpeg(had, put, planes + 6 * PLANE, tables, key, H, W, PLANE, BLOCK)
                else:
                    pixelwise(had, put, key, OPERATION, H, W, PLANE, BLOCK)
        tl.debug_barrier()
        had = planes + now * (3 * PLANE)
        for first in range(0, H * W, BLOCK):
            at = first + tl.arange(0, BLOCK)
            is_inside = at < H * W
            for channel in tl.static_range(3):
                value = tl.load(had + channel * PLANE + at, mask=is_inside, other=0.0)
                tl.store(target + at * 3 + channel, value, mask=is_inside)


@triton.jit
def _image_key(keys, number, step, index):
    return combine(combine(unsigned(tl.load(keys + 1 + number)), unsigned(step)), index)
