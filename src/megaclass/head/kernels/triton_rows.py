"""Triton programs over rows: the centres' update in one pass, and the draw of the classes that take part."""
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "first_id", "num_pulls"]
    + ["key_a0", "key_b0", "key_a1", "key_b1", "key_a2", "key_b2"]
)
def update_rows(
    weight,  # (K * M, D)
    state_1,  # (K * M, D) momentum or mean, (K * M,) Adagrad's square
    state_2,  # (K * M, D) AdamW's square
    counts,  # (K * M,) int32, AdamW's steps
    grad,  # (num_rows, D) float32, row stride GRAD_STRIDE: gradient of the unit centres from the negatives
    classes,  # (S,) int64; ids of num_local and above are padding
    won,  # (num_rows,) bool
    pull_heads,  # (S * M,) int32: 1 + place in the sorted pulls of the row's first one, 0 for none
    pull_rows,  # (num_pulls,) int64, sorted
    pull_order,  # (num_pulls,) int64: image of each sorted pull
    pull_images,  # (num_pulls, D) float32
    pull_weights,  # (num_pulls,) float32
    scalars,  # (3,) float32: learning rate, 1 / loss scale, 1 to skip
    first_row,  # among all S * M
    num_rows,
    num_local,
    first_id,  # global row id of this rank's row 0
    num_pulls,
    key_a0, key_b0, key_a1, key_b1, key_a2, key_b2,
    weight_decay,
    clip_value,
    clip_row_norm,
    momentum,
    beta2,
    eps,
    D: tl.constexpr,
    GRAD_STRIDE: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,  # "sgd", "nesterov", "plain", "adamw", "adagrad"
    CLIPS_VALUE: tl.constexpr,
    CLIPS_ROW: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    HAS_WON: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Target pulls, normalisation, clipping, optimizer, stochastic rounding. A row is read and written once."""
    if tl.load(scalars + 2) != 0:
        return
    places = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = places < num_rows
    slot_rows = first_row + places
    if IS_SAMPLED:
        class_ids = tl.load(classes + slot_rows // M, mask=is_row, other=num_local)
        is_row = is_row & (class_ids < num_local)
        rows = class_ids * M + slot_rows % M
    else:
        rows = slot_rows.to(tl.int64)
    heads = tl.load(pull_heads + slot_rows, mask=is_row, other=0)
    if HAS_WON:
        has_won = tl.load(won + places, mask=is_row, other=0) != 0
        is_row = is_row & (has_won | (heads > 0))
    columns = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (columns < D)[None, :]
    cells = rows[:, None] * D + columns[None, :]
    w = tl.load(weight + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    g = tl.load(grad + places.to(tl.int64)[:, None] * GRAD_STRIDE + columns[None, :], mask=inside, other=0.0)

    # Images whose own class this is. In the order of the batch, so that the sum is the same in every run.
    at = heads - 1
    is_pulled = is_row & (at >= 0)
    while tl.max(is_pulled.to(tl.int32), 0) > 0:
        image = tl.load(pull_order + at, mask=is_pulled, other=0)
        factor = tl.load(pull_weights + image, mask=is_pulled, other=0.0)
        pulled = inside & is_pulled[:, None]
        g += factor[:, None] * tl.load(pull_images + image[:, None] * D + columns[None, :], mask=pulled, other=0.0)
        at += 1
        is_pulled = is_pulled & (at < num_pulls)
        is_pulled = is_pulled & (tl.load(pull_rows + at, mask=is_pulled, other=-1) == slot_rows)

    # Through the normalisation: only what is orthogonal to the centre changes its direction.
    squares = tl.sum(w * w, 1)
    inverse = tl.where(squares > 0, 1 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0)
    unit = w * inverse[:, None]
    g = (g - unit * tl.sum(unit * g, 1)[:, None]) * (inverse * tl.load(scalars + 1))[:, None]
    if CLIPS_VALUE:
        g = tl.minimum(tl.maximum(g, -clip_value), clip_value)
    if CLIPS_ROW:
        length = tl.sqrt(tl.sum(g * g, 1))
        g = g * tl.minimum(clip_row_norm / tl.maximum(length, 1e-30), 1.0)[:, None]

    lr = tl.load(scalars)
    ids = (first_id + rows).to(tl.uint32)
    if KIND == "adamw":
        steps = tl.load(counts + rows, mask=is_row, other=0) + 1
        tl.store(counts + rows, steps, mask=is_row)
        mean = tl.load(state_1 + cells, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(state_2 + cells, mask=inside, other=0.0).to(tl.float32)
        mean = mean + (1 - momentum) * (g - mean)
        square = beta2 * square + (1 - beta2) * g * g
        bias_1 = 1 - tl.exp2(steps.to(tl.float32) * tl.log2(momentum + 0.0))
        bias_2 = 1 - tl.exp2(steps.to(tl.float32) * tl.log2(beta2 + 0.0))
        direction = mean / bias_1[:, None] / (tl.sqrt(square / bias_2[:, None]) + eps)
        w = w * (1 - lr * weight_decay) - lr * direction
        _store_rounded(state_1 + cells, mean, ids, columns, inside, key_a1, key_b1)
        _store_rounded(state_2 + cells, square, ids, columns, inside, key_a2, key_b2)
    else:
        g += weight_decay * w
        if KIND == "adagrad":
            square = tl.load(state_1 + rows, mask=is_row, other=0.0) + tl.sum(g * g, 1) / D
            tl.store(state_1 + rows, square, mask=is_row)
            g = g / (tl.sqrt(square) + eps)[:, None]
        elif KIND != "plain":
            old = tl.load(state_1 + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            moved = momentum * old + g
            _store_rounded(state_1 + cells, moved, ids, columns, inside, key_a1, key_b1)
            if KIND == "nesterov":
                g = g + momentum * moved
            else:
                g = moved
        w -= lr * g
    _store_rounded(weight + cells, w, ids, columns, inside, key_a0, key_b0)


@triton.jit
def _store_rounded(pointers, values, ids, columns, inside, key_a, key_b):
    """As counter_random.round_stochastically, for bfloat16; other dtypes take the values as they are."""
    if pointers.dtype.element_ty == tl.bfloat16:
        row_keys = _mix_32(ids ^ key_a.to(tl.uint32, bitcast=True))
        column_keys = _mix_32(columns.to(tl.uint32) ^ key_b.to(tl.uint32, bitcast=True))
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


@triton.jit(do_not_specialize=["first_class", "num_local", "threshold", "key_a", "key_b", "capacity"])
def draw_classes(
    is_positive,  # (num_local,) uint8
    counts,  # (blocks,) int32: out of the first pass; in the second, running totals
    classes,  # (capacity,) int64, out of the second pass
    weights,  # (capacity,) float32, likewise
    first_class,
    num_local,
    threshold,
    key_a,
    key_b,
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
    hashed = _mix_32((first_class + local).to(tl.uint32) ^ key_a.to(tl.uint32, bitcast=True))
    hashed = _mix_32(hashed + key_b.to(tl.uint32, bitcast=True))
    takes_part = is_local & (positive | (hashed.to(tl.int32, bitcast=True) < threshold))
    flags = takes_part.to(tl.int32)
    if COUNTS_ONLY:
        tl.store(counts + block, tl.sum(flags, 0))
    else:
        before = tl.load(counts + block - 1, mask=block > 0, other=0)
        places = before + tl.cumsum(flags, 0) - 1
        fits = takes_part & (places < capacity)
        tl.store(classes + places, local.to(tl.int64), mask=fits)
        tl.store(weights + places, tl.where(positive, 1.0, drawn_weight), mask=fits)
