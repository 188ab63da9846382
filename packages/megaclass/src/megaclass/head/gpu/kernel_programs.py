"""The Triton programs of `triton_fused`: unit centres, and exponentials of all negatives' logits in one pass.

Letters as elsewhere; R counts rows of one chunk: M planes of P rows each (P: the chunk's classes, rounded up to whole
tiles), so sub-centre m of the chunk's class s is row m * P + s. Rows and columns of padding hold zeros.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_slot", "num_slots", "num_local"])
def unit_centres(
    weight,  # (K * M, D), as stored
    classes,  # (S,) int64, ascending; ids of num_local and above are padding
    unit,  # (M * P, WIDTH), out
    first_slot,
    num_slots,
    num_local,
    plane,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    IS_COSINE: tl.constexpr,  # otherwise rows stay as they are
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows of the chunk, gathered and divided by their length. Reads D stored numbers a row, writes WIDTH."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    slots = rows % plane
    is_row = (slots < num_slots) & (rows < plane * M)
    if IS_SAMPLED:
        class_ids = tl.load(classes + first_slot + slots, mask=is_row, other=0)
        is_row = is_row & (class_ids < num_local)
    else:
        class_ids = (first_slot + slots).to(tl.int64)
    source = class_ids * M + rows // plane
    inside = is_row[:, None] & (columns < D)[None, :]
    values = tl.load(weight + source[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if IS_COSINE:
        squares = tl.sum(values * values, 1)
        inverse = tl.where(squares > 0, 1 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0)
        values = values * inverse[:, None]
    target = unit + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    written = (rows < plane * M)[:, None] & (columns < WIDTH)[None, :]
    tl.store(target, values.to(unit.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["first_slot", "num_slots"])
def exponentials(
    images,  # (G, WIDTH), like the next two a descriptor or a pointer
    centres,  # (M * P, WIDTH)
    exps,  # (G, M * P), out
    masses,  # (SPLITS, G) float32, out: partial sums over classes; a row for each tile with HAS_TILE_SUMS
    won,  # (M * P,) int32, out if M > 1: some image's closest sub-centre
    target_slots,  # (G,) int64, -1 if not on this rank
    class_weights,  # (S,) float32, or None
    num_drawn,  # () int32: slots from this one on are padding; or None
    has_direction,  # (G,) bool, where M > 1: not padding, not of length zero
    borders,  # (G,) float32
    hardness,  # () float32
    first_slot,
    num_slots,
    num_images,
    plane,
    scale_log2,  # scale / ln 2
    shift_log2,
    filter_above,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    HAS_FILTER: tl.constexpr,
    IS_CURRICULAR: tl.constexpr,
    HAS_TILE_SUMS: tl.constexpr,  # for several labels: targets stay, and clear_targets follows
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
):
    """weight * exp(logit - shift) * (d logit / d cosine) / scale of every negative; zero for targets and padding.

    A program keeps one tile of images and walks over every SPLITS-th tile of classes: its row sums stay in registers,
    and programs side by side read the same centres.
    """
    num_image_tiles = tl.cdiv(num_images, BLOCK_G)
    image_0 = (tl.program_id(0) % num_image_tiles) * BLOCK_G
    split = tl.program_id(0) // num_image_tiles
    rows = image_0 + tl.arange(0, BLOCK_G)
    is_row = rows < num_images
    slots = tl.load(target_slots + rows, mask=is_row, other=-1)
    # Targets of other chunks become -1: they can meet no column.
    if num_drawn is not None:
        num_slots = tl.minimum(num_slots, tl.load(num_drawn) - first_slot)
    is_here = (slots >= first_slot) & (slots < first_slot + num_slots)
    places = tl.where(is_here, slots - first_slot, -1).to(tl.int32)
    if HAS_TILE_SUMS:
        places = tl.full((BLOCK_G,), -1, tl.int32)
    sums = tl.zeros((BLOCK_G,), tl.float32)
    for tile in tl.range(split, tl.cdiv(plane, BLOCK_S), SPLITS, flatten=FLATTEN):
        slot_0 = tile * BLOCK_S
        if HAS_TILE_SUMS:
            sums = tl.zeros((BLOCK_G,), tl.float32)
        cosines = tl.zeros((BLOCK_G, BLOCK_S), tl.float32)
        for k in range(0, WIDTH, BLOCK_D):
            x = _load_tile(images, image_0, k, num_images, BLOCK_G, BLOCK_D, WIDTH, BY_DESCRIPTOR)
            c = _load_tile(centres, slot_0, k, M * plane, BLOCK_S, BLOCK_D, WIDTH, BY_DESCRIPTOR)
            cosines = tl.dot(x, c.T, cosines, input_precision="ieee")
        winners = tl.zeros((BLOCK_G, BLOCK_S), tl.int32)
        if M > 1:
            for m in range(1, M):
                others = tl.zeros((BLOCK_G, BLOCK_S), tl.float32)
                for k in range(0, WIDTH, BLOCK_D):
                    x = _load_tile(images, image_0, k, num_images, BLOCK_G, BLOCK_D, WIDTH, BY_DESCRIPTOR)
                    c = _load_tile(centres, m * plane + slot_0, k, M * plane, BLOCK_S, BLOCK_D, WIDTH, BY_DESCRIPTOR)
                    others = tl.dot(x, c.T, others, input_precision="ieee")
                winners = tl.where(others > cosines, m, winners)
                cosines = tl.maximum(cosines, others)
            columns = slot_0 + tl.arange(0, BLOCK_S)
            counts = tl.load(has_direction + rows, mask=is_row, other=0) != 0
            for m in range(M):
                has_won = tl.max(((winners == m) & counts[:, None]).to(tl.int32), 0)
                tl.atomic_max(won + m * plane + columns, has_won, mask=columns < num_slots)
        if PARTS == 1:
            sums += _store_exponentials(
                cosines, winners, exps, class_weights, places, borders, hardness, rows, is_row, image_0, slot_0,
                first_slot, num_slots, plane, scale_log2, shift_log2, filter_above,
                M, HAS_FILTER, IS_CURRICULAR, BY_DESCRIPTOR, BLOCK_G, BLOCK_S,
            )  # fmt: skip
        else:
            # Half the columns at a time: the tile on its way to memory takes half the shared memory.
            halves = tl.permute(tl.reshape(cosines, (BLOCK_G, 2, BLOCK_S // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            sums += _store_exponentials(
                left, left, exps, class_weights, places, borders, hardness, rows, is_row, image_0, slot_0,
                first_slot, num_slots, plane, scale_log2, shift_log2, filter_above,
                M, HAS_FILTER, IS_CURRICULAR, BY_DESCRIPTOR, BLOCK_G, BLOCK_S // 2,
            )  # fmt: skip
            sums += _store_exponentials(
                right, right, exps, class_weights, places, borders, hardness, rows, is_row, image_0,
                slot_0 + BLOCK_S // 2, first_slot, num_slots, plane, scale_log2, shift_log2, filter_above,
                M, HAS_FILTER, IS_CURRICULAR, BY_DESCRIPTOR, BLOCK_G, BLOCK_S // 2,
            )  # fmt: skip
        if HAS_TILE_SUMS:
            tl.store(masses + tile * num_images + rows, sums, mask=is_row)
    if not HAS_TILE_SUMS:
        tl.store(masses + split * num_images + rows, sums, mask=is_row)


@triton.jit(do_not_specialize=["first_slot", "num_slots"])
def clear_targets(
    exps,  # (G, M * P), in and out
    masses,  # (tiles, G) float32, in and out
    target_slots,  # (G * num_labels,) int64, -1 if not on this rank
    first_slot,
    num_slots,
    num_images,
    plane,
    num_labels,
    M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Takes an image's labels out of the negatives, in the tile that holds one of them. One program per label.

    The row sum of the tile is formed again from what is left: subtracting a large target from it would lose the rest. Programs
    of several labels in one tile write the same.
    """
    image = tl.program_id(0) // num_labels
    slot = tl.load(target_slots + tl.program_id(0)) - first_slot
    if (slot >= 0) & (slot < num_slots):
        tile = slot // BLOCK_S
        columns = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        is_target = columns == slot
        for label in range(num_labels):
            is_target = is_target | (columns == tl.load(target_slots + image * num_labels + label) - first_slot)
        total = 0.0
        for m in tl.static_range(M):
            cells = exps + (image.to(tl.int64) * M + m) * plane + columns
            total += tl.sum(tl.where(is_target, 0.0, tl.load(cells).to(tl.float32)), 0)
            tl.store(cells, tl.zeros((BLOCK_S,), exps.dtype.element_ty), mask=is_target)
        tl.store(masses + tile * num_images + image, total)


@triton.jit
def _store_exponentials(
    cosines, winners, exps, class_weights, places, borders, hardness, rows, is_row, image_0, slot_0,
    first_slot, num_slots, plane, scale_log2, shift_log2, filter_above,
    M: tl.constexpr, HAS_FILTER: tl.constexpr, IS_CURRICULAR: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes one tile and returns its row sums."""
    columns = slot_0 + tl.arange(0, WIDTH)
    is_slot = columns < num_slots
    if HAS_FILTER:
        is_filtered = cosines > filter_above
        cosines = tl.where(is_filtered, 0.0, cosines)
    logits = cosines
    if IS_CURRICULAR:
        border = tl.load(borders + rows, mask=is_row, other=0.0)
        t = tl.load(hardness)
        is_hard = cosines > border[:, None]
        logits = tl.where(is_hard, cosines * (t + cosines), cosines)
    # Shift, weights and padding in one number a column, which costs nothing: log(0) masks.
    biases = tl.where(is_slot, -shift_log2, float("-inf"))
    if class_weights is not None:
        biases += tl.log2(tl.load(class_weights + first_slot + columns, mask=is_slot, other=0.0))
    values = tl.exp2(logits * scale_log2 + biases[None, :])
    if class_weights is not None:
        values = tl.where(columns[None, :] == places[:, None], 0.0, values)
    else:
        # Few tiles hold a target; without weights to wait for, asking is cheaper than comparing every element.
        if tl.max(((places >= slot_0) & (places < slot_0 + WIDTH)).to(tl.int32), 0) > 0:
            values = tl.where(columns[None, :] == places[:, None], 0.0, values)
    sums = tl.sum(values, 1)
    if IS_CURRICULAR:
        values = tl.where(is_hard, values * (t + 2 * cosines), values)
    if HAS_FILTER:
        values = tl.where(is_filtered, 0.0, values)
    if M == 1:
        _store_tile(exps, values, image_0, slot_0, plane, is_row, HEIGHT, WIDTH, BY_DESCRIPTOR)
    else:
        for m in range(M):
            part = tl.where(winners == m, values, 0.0)
            _store_tile(exps, part, image_0, m * plane + slot_0, M * plane, is_row, HEIGHT, WIDTH, BY_DESCRIPTOR)
    return sums


@triton.jit
def _load_tile(
    source, row_0, column_0, num_rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    if BY_DESCRIPTOR:
        tile = source.load([row_0, column_0])
    else:
        rows = tl.arange(0, HEIGHT)
        cells = rows[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
        first = row_0.to(tl.int64) * STRIDE + column_0
        tile = tl.load(source + first + cells, mask=(row_0 + rows < num_rows)[:, None], other=0.0)
    return tile


@triton.jit
def _store_tile(
    target, values, row_0, column_0, stride, is_row,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    if BY_DESCRIPTOR:
        target.store([row_0, column_0], values.to(target.dtype))
    else:
        cells = tl.arange(0, HEIGHT)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        first = row_0.to(tl.int64) * stride + column_0
        tl.store(target + first + cells, values.to(target.dtype.element_ty), mask=is_row[:, None])
