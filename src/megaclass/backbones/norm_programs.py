"""Triton programs of batch norm over channels-last images, seen as (rows, C): one row a pixel.

Every program that reads images goes over them once: they are bound by memory, and a convolution stands between any two.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def image_moments(
    x,  # (num_rows, C)
    partial,  # (programs, 2, C) float32, scratch
    arrivals,  # () int32 zero, and zero again afterwards
    mean,  # (C,) float32, out
    variance,  # (C,) float32, out: biased
    inverse,  # (C,) float32, out: 1 / sqrt(variance + eps)
    running_mean,  # (C,), follows; or None with the two below
    running_variance,  # (C,)
    num_batches,  # () int64
    num_rows,
    eps,
    momentum,
    C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Every program sums its rows, the last to arrive sums the sums. Taken from x - x[0]: a large mean costs no digits."""
    columns = tl.arange(0, C)
    shift = tl.load(x + columns, mask=columns < C * tl.minimum(num_rows, 1), other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, C), tl.float32)
    square = tl.zeros((ROWS, C), tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        places = rows.to(tl.int64)[:, None] * C + columns[None, :]
        inside = (rows < num_rows)[:, None]
        z = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) - shift[None, :]
        z = tl.where(inside, z, 0.0)
        total += z
        square += z * z
    mine = partial + tl.program_id(0) * 2 * C + columns
    tl.store(mine, tl.sum(total, 0))
    tl.store(mine + C, tl.sum(square, 0))
    if _is_last(arrivals):
        count = tl.maximum(num_rows, 1)
        from_shift, spread, _ = _sum_partial(partial, C, 2)
        from_shift = from_shift / count
        spread = spread / count - from_shift * from_shift
        average = (shift + from_shift).to(tl.float32)
        spread = tl.maximum(spread, 0.0).to(tl.float32)
        tl.store(mean + columns, average)
        tl.store(variance + columns, spread)
        tl.store(inverse + columns, 1 / tl.sqrt(spread + eps))
        if running_mean is not None:
            # Like nn.BatchNorm: normalised by the biased variance, remembered as the unbiased one.
            unbiased = spread * (count / tl.maximum(count - 1, 1))
            old_mean = tl.load(running_mean + columns)
            old_variance = tl.load(running_variance + columns)
            tl.store(running_mean + columns, old_mean + momentum * (average - old_mean))
            tl.store(running_variance + columns, old_variance + momentum * (unbiased - old_variance))
            tl.store(num_batches, tl.load(num_batches) + 1)


@triton.jit
def _is_last(arrivals):
    """Whether all other programs have written their sums. True for one program; sets the counter back."""
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit
def _sum_partial(partial, C: tl.constexpr, K: tl.constexpr):
    """(programs, K, C) -> three (C,) float64, the third 0 if K = 2. Few large loads at once: one program does this alone.

    Not from the first cache, which does not see what other programs wrote.
    """
    BLOCK: tl.constexpr = 8192 // C
    columns = tl.arange(0, C)
    first = tl.zeros((C,), tl.float64)
    second = tl.zeros((C,), tl.float64)
    third = tl.zeros((C,), tl.float64)
    for start in range(0, tl.num_programs(0), BLOCK):
        programs = start + tl.arange(0, BLOCK)
        places = partial + programs[:, None] * K * C + columns[None, :]
        inside = (programs < tl.num_programs(0))[:, None]
        first += tl.sum(tl.load(places, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        second += tl.sum(tl.load(places + C, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        if K == 3:
            third += tl.sum(tl.load(places + 2 * C, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    return first, second, third


@triton.jit(do_not_specialize=["num_rows"])
def normalise(
    x,  # (num_rows, C)
    skip,  # (num_rows, C), added last; or None
    y,  # (num_rows, C), out
    mean,
    inverse,
    weight,
    bias,
    slope,  # (C,) of PReLU, or None
    num_rows,
    C: tl.constexpr,
    ROWS: tl.constexpr,
):
    columns = tl.arange(0, C)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = rows.to(tl.int64)[:, None] * C + columns[None, :]
    inside = (rows < num_rows)[:, None]
    factor = tl.load(inverse + columns) * tl.load(weight + columns)
    h = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + columns)[None, :]
    h = h * factor[None, :] + tl.load(bias + columns)[None, :]
    if slope is not None:
        h = tl.where(h > 0, h, h * tl.load(slope + columns)[None, :])
    if skip is not None:
        h += tl.load(skip + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + places, h.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def sum_gradients(
    grad_y,  # (num_rows, C)
    x,  # (num_rows, C)
    mean,
    inverse,
    weight,
    bias,
    slope,  # or None
    partial,  # (programs, K, C) float32, scratch
    arrivals,  # () int32 zero, and zero again afterwards
    sums,  # (K, C) float32, out: gradients of bias, weight and, K = 3, slope
    means,  # (2, C) float32, out: the first two over num_rows
    num_rows,
    C: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    columns = tl.arange(0, C)
    center = tl.load(mean + columns)[None, :]
    spread = tl.load(inverse + columns)[None, :]
    total = tl.zeros((ROWS, C), tl.float32)
    product = tl.zeros((ROWS, C), tl.float32)
    if slope is not None:
        scale = tl.load(weight + columns)[None, :]
        offset = tl.load(bias + columns)[None, :]
        leak = tl.load(slope + columns)[None, :]
        below = tl.zeros((ROWS, C), tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        places = rows.to(tl.int64)[:, None] * C + columns[None, :]
        inside = (rows < num_rows)[:, None]
        g = tl.load(grad_y + places, mask=inside, other=0.0).to(tl.float32)
        unit = (tl.load(x + places, mask=inside, other=0.0).to(tl.float32) - center) * spread
        if slope is not None:
            h = unit * scale + offset
            below += tl.where(h > 0, 0.0, g * h)
            g = tl.where(h > 0, g, g * leak)
        total += g
        product += g * unit
    mine = partial + tl.program_id(0) * K * C + columns
    tl.store(mine, tl.sum(total, 0))
    tl.store(mine + C, tl.sum(product, 0))
    if slope is not None:
        tl.store(mine + 2 * C, tl.sum(below, 0))
    if _is_last(arrivals):
        whole, whole_product, whole_below = _sum_partial(partial, C, K)
        count = tl.maximum(num_rows, 1)
        tl.store(sums + columns, whole.to(tl.float32))
        tl.store(sums + C + columns, whole_product.to(tl.float32))
        tl.store(means + columns, (whole / count).to(tl.float32))
        tl.store(means + C + columns, (whole_product / count).to(tl.float32))
        if K == 3:
            tl.store(sums + 2 * C + columns, whole_below.to(tl.float32))


@triton.jit(do_not_specialize=["num_rows"])
def spread_gradients(
    grad_y,  # (num_rows, C)
    x,  # (num_rows, C)
    through,  # (num_rows, C): gradient of x by another way, added; or None
    grad_x,  # (num_rows, C), out
    mean,
    inverse,
    weight,
    bias,
    slope,  # or None
    means,  # (2, C): means over all rows, of all ranks, of the gradient and of its product with the normalised x
    num_rows,
    C: tl.constexpr,
    ROWS: tl.constexpr,
):
    columns = tl.arange(0, C)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = rows.to(tl.int64)[:, None] * C + columns[None, :]
    inside = (rows < num_rows)[:, None]
    spread = tl.load(inverse + columns)
    scale = tl.load(weight + columns)
    g = tl.load(grad_y + places, mask=inside, other=0.0).to(tl.float32)
    unit = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + columns)[None, :]
    unit = unit * spread[None, :]
    if slope is not None:
        h = unit * scale[None, :] + tl.load(bias + columns)[None, :]
        g = tl.where(h > 0, g, g * tl.load(slope + columns)[None, :])
    g = g - tl.load(means + columns)[None, :] - unit * tl.load(means + C + columns)[None, :]
    g = g * (spread * scale)[None, :]
    if through is not None:
        g += tl.load(through + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_x + places, g.to(grad_x.dtype.element_ty), mask=inside)
