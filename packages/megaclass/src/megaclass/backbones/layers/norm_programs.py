"""Triton programs for batch norm over channels-last images, seen as (rows, C) with one row per pixel.

Every program reads the images once: it is bound by memory. Programs that sum start at the end, which the convolution wrote
last and the cache may still hold. The programs after them start at the beginning, which was then read last.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

# Number of programs whose sums are added together, and the largest number of such groups.
GROUP = tl.constexpr(32)
MAX_GROUPS = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_rows"])
def image_moments(
    x,  # (num_rows, C)
    partial,  # (programs + groups, 2, C) float32, scratch
    arrivals,  # (1 + groups,) int32 zeros, and zeros again afterwards
    moments,  # (3, C) float32, out: mean, biased variance, 1 / sqrt(variance + eps)
    running_mean,  # (C,), updated; or None with the two below
    running_variance,  # (C,)
    num_batches,  # () int64
    num_rows,
    eps,
    momentum,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes the moments of x - x[0], so that a large mean costs no precision."""
    columns = tl.arange(0, C)
    shift = tl.load(x + columns, mask=columns < C * tl.minimum(num_rows, 1), other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, C), tl.float32)
    square = tl.zeros((ROWS, C), tl.float32)
    num_tiles = tl.cdiv(num_rows, ROWS)
    for number in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (num_tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
        places = rows.to(tl.int64)[:, None] * C + columns[None, :]
        inside = (rows < num_rows)[:, None]
        z = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) - shift[None, :]
        z = tl.where(inside, z, 0.0)
        total += z
        square += z * z
    mine = partial + tl.program_id(0) * 2 * C + columns
    tl.store(mine, tl.sum(total, 0))
    tl.store(mine + C, tl.sum(square, 0))
    if _has_summed_last(partial, arrivals, C, 2):
        count = tl.maximum(num_rows, 1)
        from_shift = _sum_of_groups(partial, 0, C, 2) / count
        spread = _sum_of_groups(partial, 1, C, 2) / count - from_shift * from_shift
        average = (shift + from_shift).to(tl.float32)
        spread = tl.maximum(spread, 0.0).to(tl.float32)
        tl.store(moments + columns, average)
        tl.store(moments + C + columns, spread)
        tl.store(moments + 2 * C + columns, 1 / tl.sqrt(spread + eps))
        if running_mean is not None:
            # Like nn.BatchNorm: the biased variance normalises, the unbiased one enters the running statistics.
            unbiased = spread * (count / tl.maximum(count - 1, 1))
            old_mean = tl.load(running_mean + columns)
            old_variance = tl.load(running_variance + columns)
            tl.store(running_mean + columns, old_mean + momentum * (average - old_mean))
            tl.store(running_variance + columns, old_variance + momentum * (unbiased - old_variance))
            tl.store(num_batches, tl.load(num_batches) + 1)


@triton.jit
def _has_summed_last(partial, arrivals, C: tl.constexpr, K: tl.constexpr):
    """The last program of each group adds up the sums of the group. Returns True in the last group that does so.

    Loads bypass the L1 cache (.cg), which does not see the writes of other programs.
    """
    group = tl.program_id(0) // GROUP
    size = tl.minimum(GROUP, tl.num_programs(0) - group * GROUP)
    is_last = False
    if _arrives_last(arrivals + 1 + group, size):
        members = tl.arange(0, GROUP)
        columns = tl.arange(0, C)
        places = partial + (group * GROUP + members)[:, None] * K * C + columns[None, :]
        inside = (members < size)[:, None]
        whole = partial + (tl.num_programs(0) + group) * K * C + columns
        for k in tl.static_range(K):
            part = tl.load(places + k * C, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(whole + k * C, tl.sum(part, 0))
        is_last = _arrives_last(arrivals, tl.cdiv(tl.num_programs(0), GROUP))
    return is_last


@triton.jit
def _arrives_last(counter, size):
    """Returns True if the `size` - 1 other programs have written their sums, and then resets the counter."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == size - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _sum_of_groups(partial, k, C: tl.constexpr, K: tl.constexpr):
    """Returns the k-th sum over all programs, (C,) float64."""
    groups = tl.arange(0, MAX_GROUPS)
    columns = tl.arange(0, C)
    inside = (groups < tl.cdiv(tl.num_programs(0), GROUP))[:, None]
    places = partial + (tl.num_programs(0) + groups)[:, None] * K * C + k * C + columns[None, :]
    return tl.sum(tl.load(places, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64), 0)


@triton.jit(do_not_specialize=["num_rows"])
def normalise(
    x,  # (num_rows, C)
    skip,  # (num_rows, C), added last; or None
    y,  # (num_rows, C), out
    moments,
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
    factor = tl.load(moments + 2 * C + columns) * tl.load(weight + columns)
    h = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) - tl.load(moments + columns)[None, :]
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
    moments,
    weight,
    bias,
    slope,  # or None
    partial,  # (programs + groups, K, C) float32, scratch
    arrivals,  # (1 + groups,) int32 zeros, and zeros again afterwards
    sums,  # (K + 2, C) float32, out: gradients of bias, weight and, K = 3, slope; then the first two over num_rows
    num_rows,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    K: tl.constexpr,
):
    columns = tl.arange(0, C)
    center = tl.load(moments + columns)[None, :]
    spread = tl.load(moments + 2 * C + columns)[None, :]
    total = tl.zeros((ROWS, C), tl.float32)
    product = tl.zeros((ROWS, C), tl.float32)
    if slope is not None:
        scale = tl.load(weight + columns)[None, :]
        offset = tl.load(bias + columns)[None, :]
        leak = tl.load(slope + columns)[None, :]
        below = tl.zeros((ROWS, C), tl.float32)
    num_tiles = tl.cdiv(num_rows, ROWS)
    for number in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (num_tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
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
    if _has_summed_last(partial, arrivals, C, K):
        count = tl.maximum(num_rows, 1)
        for k in tl.static_range(K):
            whole = _sum_of_groups(partial, k, C, K)
            tl.store(sums + k * C + columns, whole.to(tl.float32))
            if k < 2:
                tl.store(sums + (K + k) * C + columns, (whole / count).to(tl.float32))


@triton.jit(do_not_specialize=["num_rows"])
def spread_gradients(
    grad_y,  # (num_rows, C)
    x,  # (num_rows, C)
    through,  # (num_rows, C): gradient of x from its second use, added; or None
    grad_x,  # (num_rows, C), out
    moments,
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
    spread = tl.load(moments + 2 * C + columns)
    scale = tl.load(weight + columns)
    g = tl.load(grad_y + places, mask=inside, other=0.0).to(tl.float32)
    unit = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) - tl.load(moments + columns)[None, :]
    unit = unit * spread[None, :]
    if slope is not None:
        h = unit * scale[None, :] + tl.load(bias + columns)[None, :]
        g = tl.where(h > 0, g, g * tl.load(slope + columns)[None, :])
    g = g - tl.load(means + columns)[None, :] - unit * tl.load(means + C + columns)[None, :]
    g = g * (spread * scale)[None, :]
    if through is not None:
        g += tl.load(through + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_x + places, g.to(grad_x.dtype.element_ty), mask=inside)
