"""Plain PyTorch on any device, class chunk by class chunk: memory is bounded by the chunk and by what may be stored.

Chunks run over classes, not over the batch: there are far more of them, and a chunk's centres are read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaclass.head.problem import SAFE_LOGIT, CentreGradient, Problem, Stored, take_rows, unit_rows

# Exponentials of one chunk: on a CPU a matrix that stays near its cores, on a GPU one large enough to fill it.
_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
_MIN_CHUNK = 256


@dataclass(slots=True)
class _StoredChunks(Stored):
    """Chunks without their centres, which are cheap to form again, by (start, stop)."""

    chunks: dict[tuple[int, int], tuple[Tensor | None, ...]] = field(default_factory=dict)
    """Exponentials, the shift of their logits, the winning sub-centres, and the derivatives of the second sum."""


class _Chunk:
    """Weighted, differentiated exponentials of one chunk: what both gradients are products of."""

    __slots__ = ("centres_RD", "exp_GS", "second_GS", "shift_G", "start", "stop", "winners_GS")

    def __init__(self, problem: Problem, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.exp_GS: Tensor
        self.shift_G: Tensor | None = None
        self.winners_GS: Tensor | None = None
        self.second_GS: Tensor | None = None
        rows = take_rows(problem.weight_RD, problem.rows_of(start, stop))
        self.centres_RD = unit_rows(rows, problem.work_dtype, is_cosine=problem.is_cosine)[0].to(problem.unit_GD.dtype)


def mass(problem: Problem) -> Tensor:
    shape = (len(problem.unit_GD),) if problem.second is None else (2, len(problem.unit_GD))
    mass_G = torch.zeros(shape, dtype=torch.float64, device=problem.unit_GD.device)
    left = problem.stored_bytes
    problem.stored = stored = _StoredChunks()
    for start, stop in _chunks(problem):
        chunk, sums_G = _exponentials(problem, start, stop)
        mass_G += sums_G.double() if chunk.shift_G is None else _unshifted(sums_G.double(), chunk.shift_G)
        # The first chunks are kept until the limit is reached; later ones are computed again in both gradients.
        left -= sum(one.nbytes for one in (chunk.exp_GS, chunk.winners_GS, chunk.second_GS) if one is not None)
        if left >= 0:
            stored.chunks[start, stop] = (chunk.exp_GS, chunk.shift_G, chunk.winners_GS, chunk.second_GS)
    return mass_G


def grad_images(problem: Problem, coefficients_G: Tensor) -> Tensor:
    grad_GD = problem.unit_GD.new_zeros(problem.unit_GD.shape, dtype=problem.work_dtype)
    for start, stop in _chunks(problem):
        chunk = _recall(problem, start, stop)
        weights_G = _weigh(problem, chunk, coefficients_G)
        # The coefficient is a factor of the row, so it meets the small product instead of the large matrix.
        grad_GD += _product(_by_row(problem, chunk), chunk.centres_RD.to(problem.exp_dtype)) * weights_G[:, None]
    return grad_GD


def grad_centres(problems: list[Problem], coefficients: list[Tensor]) -> Iterator[CentreGradient]:
    # Chunks outside, parts inside: the gradient of one chunk of centres exists at a time, and the update consumes it.
    for start, stop in _chunks(problems[0]):
        grad_RD: Tensor | None = None
        won_R: Tensor | None = None
        for problem, coefficients_G in zip(problems, coefficients, strict=True):
            chunk = _recall(problem, start, stop)
            weights_G = _weigh(problem, chunk, coefficients_G)
            images_GD = (problem.unit_GD * weights_G[:, None]).to(problem.exp_dtype)
            part_RD = _product(_by_row(problem, chunk).T, images_GD)
            grad_RD = part_RD if grad_RD is None else grad_RD.add_(part_RD)
            if chunk.winners_GS is not None:
                won = _won(problem, chunk.winners_GS)
                won_R = won if won_R is None else won_R | won
        assert grad_RD is not None, "at least one problem"
        yield CentreGradient(start, stop, grad_RD, won_R)


def _chunks(problem: Problem) -> Iterator[tuple[int, int]]:
    # Cut by bytes of a class's column of float32 logits, one per image and sub-centre.
    row_bytes = max(1, len(problem.unit_GD)) * problem.num_subcentres * 4
    size = max(_MIN_CHUNK, _CHUNK_BYTES.get(problem.unit_GD.device.type, 8 << 20) // row_bytes)
    for start in range(0, problem.num_classes, size):
        yield start, min(start + size, problem.num_classes)


def _recall(problem: Problem, start: int, stop: int) -> _Chunk:
    assert isinstance(problem.stored, _StoredChunks), "mass() comes before the gradients"
    stored = problem.stored.chunks.get((start, stop))
    if stored is None:  # too large to keep, or stored in chunks of another size: a part with fewer images
        return _exponentials(problem, start, stop)[0]
    chunk = _Chunk(problem, start, stop)
    exp_GS, chunk.shift_G, chunk.winners_GS, chunk.second_GS = stored
    assert exp_GS is not None
    chunk.exp_GS = exp_GS
    return chunk


def hardest(problem: Problem, k: int) -> Tensor:
    """Returns the k largest cosines of each image with negatives, (G, k) in the work dtype; -inf behind the last one."""
    top_Gk = problem.unit_GD.new_full((len(problem.unit_GD), k), -torch.inf, dtype=problem.work_dtype)
    for start, stop in _chunks(problem):
        values_GS = _similarities(problem, _Chunk(problem, start, stop))
        if problem.filter_above is not None:
            values_GS.masked_fill_(values_GS > problem.filter_above, 0)
        if problem.class_weight_S is not None:
            # Padding of the list of drawn classes.
            values_GS.masked_fill_(problem.class_weight_S[start:stop] == 0, -torch.inf)
        _clear_targets_(problem, values_GS, start, -torch.inf)
        top_Gk = torch.cat([top_Gk, values_GS], 1).topk(k, dim=1).values
    return top_Gk


def _similarities(problem: Problem, chunk: _Chunk) -> Tensor:
    """Returns (G, S) cosines, of the closest sub-centre, or inner products."""
    values_GS = _product(problem.unit_GD, chunk.centres_RD.T)
    if problem.num_subcentres > 1:
        values_GS, winners_GS = values_GS.unflatten(1, (-1, problem.num_subcentres)).max(2)
        chunk.winners_GS = winners_GS.to(torch.uint8)
    return values_GS


def _exponentials(problem: Problem, start: int, stop: int) -> tuple[_Chunk, Tensor]:
    """The chunk, and the sum of its exponentials over classes (before they are differentiated); (2, G) with a second sum."""
    chunk = _Chunk(problem, start, stop)
    values_GS = _similarities(problem, chunk)
    filtered_GS = None
    if problem.filter_above is not None:
        # A filtered negative counts as cosine 0 in the mass, and its gradient is cleared at the end.
        filtered_GS = values_GS > problem.filter_above
        values_GS.masked_fill_(filtered_GS, 0)
    slopes_GS = None
    if problem.negative_logits is None:
        values_GS *= problem.scale
    else:
        values_GS, slopes_GS = _logits_and_slopes(problem, values_GS)
    if problem.is_sigmoid:
        return _softplus(problem, chunk, values_GS, slopes_GS, filtered_GS)
    second_GS = None if problem.second is None else values_GS.clone()
    if problem.logit_bound > SAFE_LOGIT:
        # Logits beyond SAFE_LOGIT would overflow exp in float32; the shift is undone in float64, in the mass and coefficients.
        chunk.shift_G = values_GS.amax(1)
        values_GS -= chunk.shift_G[:, None]
    values_GS.exp_()
    if problem.class_weight_S is not None:
        values_GS *= problem.class_weight_S[start:stop].to(values_GS.dtype)
    # After the exponential: a logit of -inf before it would be NaN if the shift is also -inf.
    _clear_targets_(problem, values_GS, start)
    # The mass needs the plain exponentials, the gradients those times d logit / d cosine, which replaces them in place.
    sums_G = values_GS.sum(1)
    chunk.exp_GS = _differentiated(problem, values_GS, slopes_GS, filtered_GS)
    if second_GS is None:
        return chunk, sums_G
    weights_GS = torch.ones_like(second_GS)
    if problem.class_weight_S is not None:
        weights_GS *= problem.class_weight_S[start:stop].to(weights_GS.dtype)
    _clear_targets_(problem, weights_GS, start)
    sums_G = torch.stack([sums_G, (second_GS * weights_GS).sum(1)])
    chunk.second_GS = _differentiated(problem, weights_GS, slopes_GS, filtered_GS)
    return chunk, sums_G


def _softplus(
    problem: Problem, chunk: _Chunk, logits_GS: Tensor, slopes_GS: Tensor | None, filtered_GS: Tensor | None
) -> tuple[_Chunk, Tensor]:
    """Likewise with log(1 + exp(z)) in place of exp(z)."""
    # Not F.softplus, which is linear from z = 20 on: 2e-9 off.
    values_GS, slopes_of_value_GS = -F.logsigmoid(-logits_GS), torch.sigmoid(logits_GS)
    for matrix_GS in (values_GS, slopes_of_value_GS):
        if problem.class_weight_S is not None:
            matrix_GS *= problem.class_weight_S[chunk.start : chunk.stop].to(matrix_GS.dtype)
        _clear_targets_(problem, matrix_GS, chunk.start)
    sums = [values_GS.sum(1), slopes_of_value_GS.sum(1)]
    chunk.exp_GS = _differentiated(problem, slopes_of_value_GS, slopes_GS, filtered_GS)
    return chunk, sums[0] if problem.second is None else torch.stack(sums)


def _differentiated(
    problem: Problem, values_GS: Tensor, slopes_GS: Tensor | None, filtered_GS: Tensor | None
) -> Tensor:
    """Multiplies by d logit / d cosine, in place; filtered negatives have none."""
    if slopes_GS is None:
        values_GS *= problem.scale
    else:
        values_GS *= slopes_GS
    if filtered_GS is not None:
        values_GS.masked_fill_(filtered_GS, 0)
    return values_GS.to(problem.exp_dtype)


def _logits_and_slopes(problem: Problem, cosines_GS: Tensor) -> tuple[Tensor, Tensor]:
    assert problem.negative_logits is not None
    with torch.enable_grad():
        cosines_GS.requires_grad_()
        logits_GS = problem.negative_logits(cosines_GS)
        slopes_GS = torch.autograd.grad(logits_GS.sum(), cosines_GS)[0]
    return logits_GS.detach(), slopes_GS


def _clear_targets_(problem: Problem, values_GS: Tensor, start: int, value: float = 0) -> None:
    """Writes `value` where a column is a class of the image. Without asking the device how many there are."""
    # One label after the other: labels of another chunk write back what is in column 0, which may just have been cleared.
    for slots_G in (problem.target_slots_N - start).view(len(values_GS), problem.max_labels).unbind(1):
        is_here_G = (slots_G >= 0) & (slots_G < values_GS.shape[1])
        places_G1 = torch.where(is_here_G, slots_G, 0)[:, None]
        values_GS.scatter_(1, places_G1, torch.where(is_here_G[:, None], value, values_GS.gather(1, places_G1)))


def _by_row(problem: Problem, chunk: _Chunk) -> Tensor:
    """exp_GS with each class's value in the column of the sub-centre that won."""
    if chunk.winners_GS is None:
        return chunk.exp_GS
    spread = chunk.exp_GS.new_zeros((*chunk.exp_GS.shape, problem.num_subcentres))
    return spread.scatter_(2, chunk.winners_GS.long()[:, :, None], chunk.exp_GS[:, :, None]).flatten(1)


def _won(problem: Problem, winners_GS: Tensor) -> Tensor:
    """(R,) rows of the chunk that some image is closest to."""
    num_classes, num_subcentres = winners_GS.shape[1], problem.num_subcentres
    # Rows without a direction (padding) are close to none: their win goes to a scratch column.
    winners_SG = torch.where(problem.has_direction_G, winners_GS.T.long(), num_subcentres)
    won = torch.zeros((num_classes, num_subcentres + 1), dtype=torch.bool, device=winners_GS.device)
    return won.scatter_(1, winners_SG, True)[:, :-1].flatten()


def _unshifted(values_G: Tensor, shift_G: Tensor) -> Tensor:
    """Takes back the shift of the logits; a second sum has none."""
    if values_G.ndim == 1:
        return values_G * shift_G.double().exp()
    return torch.stack([values_G[0] * shift_G.double().exp(), values_G[1]])


def _weigh(problem: Problem, chunk: _Chunk, coefficients_G: Tensor) -> Tensor:
    """Returns the factor of each row of exp_GS; two factors are multiplied in, and the derivatives of both sums added up."""
    if chunk.shift_G is not None:
        coefficients_G = _unshifted(coefficients_G, chunk.shift_G)
    weights_G = coefficients_G.to(problem.work_dtype)
    if weights_G.ndim == 1:
        return weights_G
    assert chunk.second_GS is not None
    both_GS = chunk.exp_GS * weights_G[0][:, None] + chunk.second_GS * weights_G[1][:, None]
    # Not in place: the chunk may be stored, and is weighed twice.
    chunk.exp_GS = both_GS.to(problem.exp_dtype)
    return torch.ones_like(weights_G[0])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b accumulated and returned in float32 (float64 for float64), whatever the operands."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        # Tensor cores take half precision and accumulate in float32; the result is not rounded back.
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
