"""Triton programs over the images of the global batch: work of O(G * D), each in one launch instead of a dozen."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "stride", "watched_stride", "num_watched"])
def pack_block(
    words,
    rows,
    embeddings,
    labels,
    watched,  # numbers of the centres as integers (faults.py), every watched_stride-th
    kept,  # (num_watched,) what they were when the head last wrote them; renewed
    step,  # (1,) int64
    count,
    stride,
    watched_stride,
    num_watched,
    max_batch,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
    MULTIPLIER: tl.constexpr,
):
    """A rank's block of the gathered buffer (gather_batch.py): control words, labels, embeddings; padding behind."""
    image = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    if image == 0:
        # OverwriteCheck.control_word, then OverwriteCheck.renew: a change is judged once, by all ranks.
        lanes = tl.arange(0, LANES)
        now = tl.load(watched + lanes.to(tl.int64) * watched_stride, mask=lanes < num_watched, other=0)
        before = tl.load(kept + lanes, mask=lanes < num_watched, other=0)
        num_changed = tl.sum((now != before).to(tl.int32), 0)
        digest = tl.sum(now.to(tl.int64) * ((2 * lanes.to(tl.int64) + 1) * MULTIPLIER), 0) & 0x3FFFFFFFFFFFFFFF
        tl.store(kept + lanes, now, mask=lanes < num_watched)
        tl.store(words, count)
        tl.store(words + 1, tl.where(num_changed > 0, -1 - digest, tl.load(step)))
    is_image = image < count
    label = tl.load(labels + image, mask=is_image, other=-1).to(tl.int64)
    tl.store(words + 2 + image, label, mask=image < max_batch)
    source = embeddings + image.to(tl.int64) * stride + columns
    values = tl.load(source, mask=columns < tl.where(is_image, D, 0), other=0.0)
    tl.store(rows + image.to(tl.int64) * D + columns, values, mask=columns < tl.where(image < max_batch, D, 0))


@triton.jit(do_not_specialize=["first_class", "num_local"])
def prepare_images(
    words,  # the gathered blocks as int64
    rows,  # the embeddings of the first block, in their dtype
    weight,  # (K * M, D)
    units,  # (G, D) float32, out
    products,  # (G, WIDTH) in the dtype of the products, out
    targets,  # (G, D) float32, out: unit centre of the own class; zero if it is on another rank
    norms,  # (G,) float64, out
    cosines,  # (G,) float64, out: with the own class; zero if it is on another rank
    labels,  # (G,) int64, out
    is_image,  # (G,) bool, out
    target_rows,  # (G,) int64, out: row of the closest centre of the own class, -1 if on another rank
    slots,  # (G,) int64, out: local id of the own class, -1 if on another rank
    words_stride,
    rows_stride,
    max_batch,
    first_class,
    num_local,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Unpacks one image, normalises it and compares it with its own class."""
    g = tl.program_id(0)
    rank = (g // max_batch).to(tl.int64)
    place = g % max_batch
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    is_here = place < tl.load(words + rank * words_stride)
    label = tl.load(words + rank * words_stride + 2 + place)
    tl.store(is_image + g, is_here)
    tl.store(labels + g, label)

    x = tl.load(rows + rank * rows_stride + place * D + columns, mask=inside, other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, 0))
    unit = x * tl.where(norm > 0, 1 / norm, 0.0)
    out = g.to(tl.int64)
    tl.store(norms + g, norm.to(tl.float64))
    tl.store(units + out * D + columns, unit, mask=inside)
    tl.store(products + out * WIDTH + columns, unit.to(products.dtype.element_ty), mask=columns < WIDTH)

    local = label - first_class
    is_here = is_here & (local >= 0) & (local < num_local)
    row = tl.where(is_here, local, 0) * M
    best = tl.full((), float("-inf"), tl.float32)
    best_row = row
    target = tl.zeros((BLOCK_D,), tl.float32)
    for m in range(M):
        centre = tl.load(weight + (row + m) * D + columns, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(centre * centre, 0)
        centre = centre * tl.where(square > 0, 1 / tl.sqrt(square), 0.0)
        cosine = tl.sum(unit * centre, 0)
        is_better = cosine > best
        best = tl.where(is_better, cosine, best)
        best_row = tl.where(is_better, row + m, best_row)
        target = tl.where(is_better, centre, target)
    tl.store(targets + out * D + columns, tl.where(is_here, target, 0.0), mask=inside)
    tl.store(cosines + g, tl.where(is_here, best, 0.0).to(tl.float64))
    tl.store(target_rows + g, tl.where(is_here, best_row, -1))
    tl.store(slots + g, tl.where(is_here, local, -1))


@triton.jit
def note_faults(
    first_fault,  # (6,) int64, in and out
    words,
    norms,
    labels,
    is_image,
    num_overflowed,  # () float64
    step,  # (1,) int64
    words_stride,
    num_ranks,
    num_images,
    max_batch,
    num_classes,
    BLOCK: tl.constexpr,
):
    """faults.find_fault and overflow_fault, in one program; a fault already there stays."""
    lanes = tl.arange(0, BLOCK)
    first_label = num_images
    first_infinite = num_images
    first_step = num_ranks
    first_changed = num_ranks
    num_changed = 0
    num_twins = 0
    num_labels = 0
    num_infinite = 0
    num_steps = 0
    for start in range(0, num_images, BLOCK):
        images = start + lanes
        counts = (tl.load(is_image + images, mask=images < num_images, other=0)) != 0
        label = tl.load(labels + images, mask=counts, other=0)
        norm = tl.load(norms + images, mask=counts, other=0.0)
        is_bad = counts & ((label < 0) | (label >= num_classes))
        is_infinite = counts & ~(norm < float("inf"))  # a NaN is below nothing
        first_label = tl.minimum(first_label, tl.min(tl.where(is_bad, images, num_images), 0))
        first_infinite = tl.minimum(first_infinite, tl.min(tl.where(is_infinite, images, num_images), 0))
        num_labels += tl.sum(is_bad.to(tl.int32), 0)
        num_infinite += tl.sum(is_infinite.to(tl.int32), 0)
    step_0 = tl.load(words + 1)
    for start in range(0, num_ranks, BLOCK):
        ranks = start + lanes
        word = tl.load(words + ranks.to(tl.int64) * words_stride + 1, mask=ranks < num_ranks, other=0)
        is_out = (ranks < num_ranks) & (word != step_0) & (word >= 0) & (step_0 >= 0)
        is_changed = (ranks < num_ranks) & (word < 0)
        first_changed = tl.minimum(first_changed, tl.min(tl.where(is_changed, ranks, num_ranks), 0))
        num_changed += tl.sum(is_changed.to(tl.int32), 0)
        num_twins += tl.sum((is_changed & (ranks > 0) & (word == step_0)).to(tl.int32), 0)
        first_step = tl.minimum(first_step, tl.min(tl.where(is_out, ranks, num_ranks), 0))
        num_steps += tl.sum(is_out.to(tl.int32), 0)
    overflowed = tl.load(num_overflowed).to(tl.int64)
    step = tl.load(step)
    if tl.load(first_fault) == 0:
        if (num_changed > 0) & ((num_changed < num_ranks) | (num_twins > 0)):
            _store_fault(first_fault, 5, first_changed, 0, 0, num_changed, step)
        elif num_steps > 0:
            first_word = tl.load(words + first_step.to(tl.int64) * words_stride + 1)
            _store_fault(first_fault, 3, first_step, first_word, step_0, num_steps, step_0)
        elif num_labels > 0:
            label = tl.load(labels + first_label)
            _store_fault(first_fault, 1, first_label // max_batch, first_label % max_batch, label, num_labels, step)
        elif num_infinite > 0:
            label = tl.load(labels + first_infinite)
            place = first_infinite % max_batch
            _store_fault(first_fault, 2, first_infinite // max_batch, place, label, num_infinite, step)
        elif overflowed > 0:
            _store_fault(first_fault, 4, 0, 0, 0, overflowed, step)


@triton.jit
def _store_fault(first_fault, kind, rank, position, value, count, step):
    tl.store(first_fault, kind)
    tl.store(first_fault + 1, rank)
    tl.store(first_fault + 2, position)
    tl.store(first_fault + 3, value)
    tl.store(first_fault + 4, count)
    tl.store(first_fault + 5, step)


@triton.jit
def finish_losses(
    masses,  # (G,) float64, over all ranks
    cosines,  # (G,) float64, over all ranks
    is_image,
    numbers,  # (4,) float64: scale, margin, cos(margin), sin(margin)
    num_total,  # () float64: images of the whole step
    first_fault,
    mass_slopes,  # (G,) float64, out: d loss / d mass, 1 / softmax denominator
    slopes,  # (G,) float64, out
    loss,  # () float32, out
    num_images,
    KIND: tl.constexpr,  # "cosine": scale * (cos - margin); "angle": ArcFace; "straight-through"
    BLOCK: tl.constexpr,
):
    """step.finish_losses with the derivative written out. One program: the losses add up in the same order always."""
    lanes = tl.arange(0, BLOCK)
    scale = tl.load(numbers)
    margin = tl.load(numbers + 1)
    cos_margin = tl.load(numbers + 2)
    sin_margin = tl.load(numbers + 3)
    totals = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_images, BLOCK):
        images = start + lanes
        inside = images < num_images
        counts = tl.load(is_image + images, mask=inside, other=0) != 0
        mass = tl.load(masses + images, mask=inside, other=1.0)
        cosine = tl.load(cosines + images, mask=inside, other=0.0)
        cosine = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
        if KIND == "cosine":
            logit = scale * (cosine - margin)
            slope = scale + cosine * 0
        else:
            square = 1 - cosine * cosine
            sine = tl.sqrt(tl.maximum(square, 1e-300))
            is_past_pi = cosine <= tl.where(margin > 0, -cos_margin, -2.0)
            shifted = cosine * cos_margin - sine * sin_margin
            logit = scale * tl.where(is_past_pi, cosine - margin * sin_margin, shifted)
            slope = scale * tl.where(
                is_past_pi, 1.0, cos_margin + tl.where(square > 0, cosine / sine, 0.0) * sin_margin
            )
            if KIND == "straight-through":
                # As InsightFace trains: the plain cos(theta + margin), its derivative taken as 1.
                logit = scale * shifted
                slope = scale + cosine * 0
        log_mass = tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)), float("-inf"))
        # A NaN mass (embeddings that are not finite) must stay one.
        log_mass = tl.where(mass == mass, log_mass, mass)
        top = tl.maximum(log_mass, logit)
        log_total = top + tl.log(tl.exp(log_mass - top) + tl.exp(logit - top))
        slope = -slope * tl.exp(log_mass - log_total)
        totals += tl.where(counts, log_total - logit, 0.0)
        tl.store(mass_slopes + images, tl.exp(-tl.where(counts & (mass > 0), log_total, float("inf"))), mask=inside)
        tl.store(slopes + images, tl.where(counts, slope, 0.0), mask=inside)
    mean = tl.sum(totals, 0) / tl.maximum(tl.load(num_total), 1.0)
    tl.store(loss, tl.where(tl.load(first_fault) != 0, float("nan"), mean).to(tl.float32))


@triton.jit
def weigh_images(
    units,  # (G, D) float32
    targets,  # (G, D) float32
    sums,  # (G, WIDTH) float32: exponentials times centres
    mass_slopes,
    slopes,
    is_image,
    upstream,  # () d total / d loss
    num_total,
    negatives,  # (G,) float64, out: factor of the negatives' gradient
    pulls,  # (G,) float32, out: factor of the target's gradient
    weights,  # (G,) float64, out: d total / d loss of the image
    weighted,  # (G, WIDTH), out: images times their factor, the operand of the centres' gradient
    grads,  # (G, D) float32, out: gradient of the unit embeddings from this rank's classes
    factor,  # of the exponentials: scale, and the shift taken back
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    WANTS_GRAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    g = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    row = g.to(tl.int64)
    weight = tl.load(upstream).to(tl.float64) / tl.maximum(tl.load(num_total), 1.0)
    weight = tl.where(tl.load(is_image + g) != 0, weight, 0.0)
    negative = weight * tl.load(mass_slopes + g)
    pull = (weight * tl.load(slopes + g)).to(tl.float32)
    tl.store(weights + g, weight)
    tl.store(negatives + g, negative)
    tl.store(pulls + g, pull)
    scaled = (negative * factor).to(tl.float32)
    unit = tl.load(units + row * D + columns, mask=inside, other=0.0)
    tl.store(weighted + row * WIDTH + columns, (unit * scaled).to(weighted.dtype.element_ty), mask=columns < WIDTH)
    if WANTS_GRAD:
        grad = tl.load(sums + row * WIDTH + columns, mask=inside, other=0.0) * scaled
        grad += tl.load(targets + row * D + columns, mask=inside, other=0.0) * pull
        tl.store(grads + row * D + columns, grad, mask=inside)


@triton.jit
def embedding_gradients(
    grads,  # (max_batch, D) float32: of this rank's unit embeddings, from all ranks' classes
    units,  # from this rank's first image on, like norms, weights and norm_slopes
    norms,
    weights,
    norm_slopes,  # (G,) float64
    out,  # (B, D)
    factor,
    D: tl.constexpr,
    HAS_NORM_SLOPES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Through the normalisation; an embedding of length zero has no direction and gets no gradient."""
    image = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    cells = image.to(tl.int64) * D + columns
    grad = tl.load(grads + cells, mask=inside, other=0.0)
    unit = tl.load(units + cells, mask=inside, other=0.0)
    norm = tl.load(norms + image).to(tl.float32)
    grad = (grad - unit * tl.sum(unit * grad, 0)) * tl.where(norm > 0, 1 / norm, 0.0)
    if HAS_NORM_SLOPES:
        grad += unit * (tl.load(weights + image) * tl.load(norm_slopes + image)).to(tl.float32)
    tl.store(out + cells, (grad * factor).to(out.dtype.element_ty), mask=inside)


# Key of an image whose class is on another rank. It is larger than all others, so it comes last.
NO_PULL = tl.constexpr(2**63 - 1)


@triton.jit
def key_pulls(
    slots,  # (P,) int64: place of the image's class among those that take part, -1 if on another rank
    target_rows,  # (P,) int64: its row; the sub-centre is the remainder
    keys,  # (P,) int64, out: row among those that take part, then image
    num_pulls,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys by which the images of a row are neighbours once they are sorted, in the order of the batch."""
    images = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_image = images < num_pulls
    slot = tl.load(slots + images, mask=is_image, other=-1)
    row = slot * M + tl.load(target_rows + images, mask=is_image, other=0) % M
    key = tl.where(slot >= 0, (row << 32) | images.to(tl.int64), NO_PULL)
    tl.store(keys + images, key, mask=is_image)


@triton.jit
def link_pulls(
    keys,  # (P,) int64, ascending
    heads,  # (S * M,) int32 zeros, out: 1 + the first image of each row
    links,  # (P,) int32, out: 1 + the next image of the same row, 0 at the last
    num_pulls,
    BLOCK: tl.constexpr,
):
    """Lists of the images of each row, in the order of the batch, from the sorted keys of key_pulls."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + places, mask=places < num_pulls, other=NO_PULL)
    before = tl.load(keys + places - 1, mask=(places > 0) & (places < num_pulls), other=-1)
    after = tl.load(keys + places + 1, mask=places + 1 < num_pulls, other=NO_PULL)
    is_pull = key != NO_PULL
    row, image = key >> 32, key & 0xFFFFFFFF
    link = tl.where(after >> 32 == row, (after & 0xFFFFFFFF) + 1, 0)
    tl.store(links + image, link.to(tl.int32), mask=is_pull)
    tl.store(heads + row, (image + 1).to(tl.int32), mask=is_pull & (before >> 32 != row))
