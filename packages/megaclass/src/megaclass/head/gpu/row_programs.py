"""Triton programs over rows: the centres' update in one pass, and the draw of the classes that take part."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["key_prefix", "first_row", "num_rows"])
def update_rows(
    weight,  # (K * M, D)
    state_1,  # (K * M, D) momentum or mean, (K * M,) Adagrad's square
    state_2,  # (K * M, D) AdamW's square
    counts,  # (K * M,) int32, AdamW's steps
    grad,  # (num_rows, D), row stride GRAD_STRIDE: gradient of the unit centres from the negatives
    classes,  # (S,) int64; ids of NUM_LOCAL and above are padding
    won,  # (num_rows,) bool
    pull_heads,  # (S * M,) int32: 1 + the first image of the row's class, 0 for none
    pull_links,  # (P,) int32: 1 + the next image of the same row
    pull_images,  # (P, D) float32
    pull_weights,  # (P,) float32
    grad_squares,  # (programs,) float32 zeros, out: sum of squares of the rows' gradient, or None
    first_fault,  # a fault masks the update
    step,  # (1,) int64
    factors,  # (3,) float32: learning rate, loss scale, and a flag that also masks the update
    key_prefix,  # counter_random.stream_state of (purpose, seed)
    first_row,  # among all S * M
    num_rows,
    NUM_LOCAL: tl.constexpr,
    FIRST_ID: tl.constexpr,  # global row id of this rank's row 0
    D: tl.constexpr,
    GRAD_STRIDE: tl.constexpr,
    M: tl.constexpr,
    IS_COSINE: tl.constexpr,
    KIND: tl.constexpr,  # "sgd", "nesterov", "plain", "adamw", "adagrad"
    WEIGHT_DECAY: tl.constexpr,
    CLIP_VALUE: tl.constexpr,
    CLIP_ROW_NORM: tl.constexpr,
    BETA_1: tl.constexpr,  # or SGD's momentum
    BETA_2: tl.constexpr,
    LOG2_BETA_1: tl.constexpr,
    LOG2_BETA_2: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Target pulls, normalisation, clipping, optimizer, stochastic rounding. A row is read and written once."""
    if (tl.load(first_fault) != 0) | (tl.load(factors + 2) != 0):
        return
    places = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = places < num_rows
    slot_rows = first_row + places
    if classes is not None:
        class_ids = tl.load(classes + slot_rows // M, mask=is_row, other=NUM_LOCAL)
        is_row = is_row & (class_ids < NUM_LOCAL)
        rows = class_ids * M + slot_rows % M
    else:
        rows = slot_rows.to(tl.int64)
    heads = tl.load(pull_heads + slot_rows, mask=is_row, other=0)
    if won is not None:
        has_won = tl.load(won + places, mask=is_row, other=0) != 0
        is_row = is_row & (has_won | (heads > 0))
    columns = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (columns < D)[None, :]
    cells = rows[:, None] * D + columns[None, :]
    w = tl.load(weight + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    g = tl.load(grad + places.to(tl.int64)[:, None] * GRAD_STRIDE + columns[None, :], mask=inside, other=0.0).to(
        tl.float32
    )

    # Images whose own class this is. In the order of the batch, so the sum is the same in every run.
    pulls = tl.where(is_row, heads, 0)
    while tl.max(pulls, 0) > 0:
        is_pulled = pulls > 0
        image = (pulls - 1).to(tl.int64)
        factor = tl.load(pull_weights + image, mask=is_pulled, other=0.0)
        pulled = inside & is_pulled[:, None]
        g += factor[:, None] * tl.load(pull_images + image[:, None] * D + columns[None, :], mask=pulled, other=0.0)
        pulls = tl.load(pull_links + image, mask=is_pulled, other=0)

    if IS_COSINE:
        # Through the normalisation: only what is orthogonal to the centre changes its direction.
        squares = tl.sum(w * w, 1)
        inverse = tl.where(squares > 0, 1 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0)
        unit = w * inverse[:, None]
        g = (g - unit * tl.sum(unit * g, 1)[:, None]) * (inverse / tl.load(factors + 1))[:, None]
    else:
        g = g / tl.load(factors + 1)
    if grad_squares is not None:
        tl.store(grad_squares + tl.program_id(0), tl.sum(tl.sum(g * g, 1), 0))
    if CLIP_VALUE is not None:
        g = tl.minimum(tl.maximum(g, -CLIP_VALUE), CLIP_VALUE)
    if CLIP_ROW_NORM is not None:
        length = tl.sqrt(tl.sum(g * g, 1))
        g = g * tl.minimum(CLIP_ROW_NORM / tl.maximum(length, 1e-30), 1.0)[:, None]

    ids = (FIRST_ID + rows).to(tl.uint32)
    if KIND == "adamw":
        steps = tl.load(counts + rows, mask=is_row, other=0) + 1
        # Every warp that holds a part of the row reads its count; none may write before all have read.
        tl.debug_barrier()
        tl.store(counts + rows, steps, mask=is_row)
        mean = tl.load(state_1 + cells, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(state_2 + cells, mask=inside, other=0.0).to(tl.float32)
        mean = mean + (1 - BETA_1) * (g - mean)
        square = BETA_2 * square + (1 - BETA_2) * g * g
        bias_1 = 1 - tl.exp2(steps.to(tl.float32) * LOG2_BETA_1)
        bias_2 = 1 - tl.exp2(steps.to(tl.float32) * LOG2_BETA_2)
        direction = mean / bias_1[:, None] / (tl.sqrt(square / bias_2[:, None]) + EPS)
        lr = tl.load(factors)
        w = w * (1 - lr * WEIGHT_DECAY) - lr * direction
        _store_rounded(state_1 + cells, mean, ids, columns, inside, key_prefix, step, 1)
        _store_rounded(state_2 + cells, square, ids, columns, inside, key_prefix, step, 2)
    else:
        g += WEIGHT_DECAY * w
        if KIND == "adagrad":
            square = tl.load(state_1 + rows, mask=is_row, other=0.0) + tl.sum(g * g, 1) / D
            tl.debug_barrier()  # as above
            tl.store(state_1 + rows, square, mask=is_row)
            g = g / (tl.sqrt(square) + EPS)[:, None]
        elif KIND != "plain":
            old = tl.load(state_1 + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            moved = BETA_1 * old + g
            _store_rounded(state_1 + cells, moved, ids, columns, inside, key_prefix, step, 1)
            if KIND == "nesterov":
                g = g + BETA_1 * moved
            else:
                g = moved
        w -= tl.load(factors) * g
    _store_rounded(weight + cells, w, ids, columns, inside, key_prefix, step, 0)


@triton.jit
def _store_rounded(pointers, values, ids, columns, inside, key_prefix, step, PLACE: tl.constexpr):
    """As counter_random.round_stochastically, for bfloat16; other dtypes take the values as they are."""
    if pointers.dtype.element_ty == tl.bfloat16:
        state = _mix_64(step_state(key_prefix, step) ^ _mix_64(tl.full((), PLACE, tl.uint64)))
        row_keys = _mix_32(ids ^ state.to(tl.uint32))
        column_keys = _mix_32(columns.to(tl.uint32) ^ (state >> 32).to(tl.uint32))
        noise = _mix_32(row_keys[:, None] ^ column_keys[None, :]) & 0xFFFF
        # Up or down with the probability that makes the mean right: a bfloat16 is the upper half of a float32.
        carried = values.to(tl.uint32, bitcast=True) + noise
        rounded = (carried & 0xFFFF0000).to(tl.float32, bitcast=True)
        is_finite = tl.abs(values) < float("inf")
        values = tl.where(is_finite, rounded, values)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def _mix_32(x):
    """counter_random._mix_32_ on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix_64(x):
    """keyed_random.mix64_int on a uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def step_state(prefix, step):
    """counter_random.stream_state of the parts behind `prefix` and the step, as a uint64. step: (1,) int64."""
    return _mix_64(prefix.to(tl.int64).to(tl.uint64, bitcast=True) ^ _mix_64(tl.load(step).to(tl.uint64, bitcast=True)))


@triton.jit
def mark_positives(labels, is_positive, first_class, num_local, num_images, BLOCK: tl.constexpr):
    """Labels of other ranks, and padding, are left out."""
    images = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(labels + images, mask=images < num_images, other=-1) - first_class
    is_local = (images < num_images) & (local >= 0) & (local < num_local)
    tl.store(is_positive + local, tl.full((BLOCK,), 1, tl.uint8), mask=is_local)


@triton.jit(do_not_specialize=["key_prefix", "first_class", "num_local", "threshold", "capacity"])
def draw_classes(
    is_positive,  # (num_local,) uint8
    counts,  # (blocks,) int32: out of the first pass; in the second, running totals
    classes,  # (capacity,) int64, out of the second pass
    weights,  # (capacity,) float32, likewise; or None
    overflowed,  # () float64, likewise: 1 if more were drawn than fit
    step,  # (1,) int64
    key_prefix,  # counter_random.stream_state of (purpose, seed)
    first_class,
    num_local,
    threshold,
    device_threshold,  # (1,) int64, in place of `threshold`; or None
    capacity,
    drawn_weight,
    COUNTS_ONLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Classes whose hash lies below the threshold, and the positives: counted block by block, then written in order."""
    block = tl.program_id(0)
    local = block * BLOCK + tl.arange(0, BLOCK)
    is_local = local < num_local
    positive = tl.load(is_positive + local, mask=is_local, other=0) != 0
    keys = step_state(key_prefix, step)
    hashed = _mix_32((first_class + local).to(tl.uint32) ^ keys.to(tl.uint32))
    hashed = _mix_32(hashed + (keys >> 32).to(tl.uint32))
    if device_threshold is not None:
        threshold = tl.load(device_threshold)
    takes_part = is_local & (positive | (hashed.to(tl.int32, bitcast=True) < threshold))
    flags = takes_part.to(tl.int32)
    if COUNTS_ONLY:
        tl.store(counts + block, tl.sum(flags, 0))
    else:
        before = tl.load(counts + block - 1, mask=block > 0, other=0)
        places = before + tl.cumsum(flags, 0) - 1
        fits = takes_part & (places < capacity)
        tl.store(classes + places, local.to(tl.int64), mask=fits)
        if weights is not None:
            tl.store(weights + places, tl.where(positive, 1.0, drawn_weight), mask=fits)
        # Behind the last one drawn comes padding; every program writes a block of it.
        total = tl.load(counts + tl.num_programs(0) - 1)
        rest = total + local
        tl.store(classes + rest, num_local.to(tl.int64), mask=rest < capacity)
        if weights is not None:
            tl.store(weights + rest, 0.0, mask=rest < capacity)
        if block == 0:
            tl.store(overflowed, (total > capacity).to(tl.float64))
