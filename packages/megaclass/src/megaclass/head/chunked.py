"""Plain PyTorch on any device, class chunk by class chunk: memory is bounded by the chunk and by what may be stored.

Chunks run over classes, not over the batch: there are far more of them, and a chunk's centres are read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaclass.head.problem import SAFE_LOGIT, CentreGradient, Problem, Stored, take_rows, unit_rows

# Exponentials of one chunk: on a CPU a matrix that stays near its cores, on a GPU one large enough to fill it.
_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
_MIN_CHUNK = 256


@dataclass(slots=True)
class _StoredChunks(Stored):
    """Chunks without their centres, which are cheap to form again, by (start, stop)."""

    chunks: dict[tuple[int, int], tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=dict)
    """Exponentials, the shift of their logits, and the winning sub-centres."""


class _Chunk:
    """Weighted, differentiated exponentials of one chunk: what both gradients are products of."""

    __slots__ = ("centres_RD", "exp_GS", "shift_G", "start", "stop", "winners_GS")

    def __init__(self, problem: Problem, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.exp_GS: Tensor
        self.shift_G: Tensor | None = None
        self.winners_GS: Tensor | None = None
        rows = take_rows(problem.weight_RD, problem.rows_of(start, stop))
        self.centres_RD = unit_rows(rows, problem.work_dtype)[0].to(problem.unit_GD.dtype)


def mass(problem: Problem) -> Tensor:
    mass_G = torch.zeros(len(problem.unit_GD), dtype=torch.float64, device=problem.unit_GD.device)
    left = problem.stored_bytes
    problem.stored = stored = _StoredChunks()
    for start, stop in _chunks(problem):
        chunk, sums_G = _exponentials(problem, start, stop)
        mass_G += sums_G.double() if chunk.shift_G is None else sums_G.double() * chunk.shift_G.double().exp()
        # The first chunks are kept until the limit is reached; later ones are computed again in both gradients.
        left -= chunk.exp_GS.nbytes + (0 if chunk.winners_GS is None else chunk.winners_GS.nbytes)
        if left >= 0:
            stored.chunks[start, stop] = (chunk.exp_GS, chunk.shift_G, chunk.winners_GS)
    return mass_G


def grad_images(problem: Problem, coefficients_G: Tensor) -> Tensor:
    grad_GD = problem.unit_GD.new_zeros(problem.unit_GD.shape, dtype=problem.work_dtype)
    for start, stop in _chunks(problem):
        chunk = _recall(problem, start, stop)
        weights_G = _chunk_coefficients(chunk, coefficients_G).to(problem.work_dtype)
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
            weights_G = _chunk_coefficients(chunk, coefficients_G).to(problem.work_dtype)
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
    chunk.exp_GS, chunk.shift_G, chunk.winners_GS = stored
    return chunk


def _exponentials(problem: Problem, start: int, stop: int) -> tuple[_Chunk, Tensor]:
    """The chunk, and the sum of its exponentials over classes (before they are differentiated)."""
    chunk = _Chunk(problem, start, stop)
    values_GS = _product(problem.unit_GD, chunk.centres_RD.T)
    if problem.num_subcentres > 1:
        values_GS, winners_GS = values_GS.unflatten(1, (stop - start, problem.num_subcentres)).max(2)
        chunk.winners_GS = winners_GS.to(torch.uint8)
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
    if problem.logit_bound > SAFE_LOGIT:
        # Logits beyond SAFE_LOGIT would overflow exp in float32; the shift is undone in float64, in the mass and coefficients.
        chunk.shift_G = values_GS.amax(1)
        values_GS -= chunk.shift_G[:, None]
    values_GS.exp_()
    if problem.class_weight_S is not None:
        values_GS *= problem.class_weight_S[start:stop].to(values_GS.dtype)
    # After the exponential: a logit of -inf before it would be NaN if the shift is also -inf.
    _clear_targets_(values_GS, problem.target_slot_G - start)
    # The mass needs the plain exponentials, the gradients those times d logit / d cosine, which replaces them in place.
    sums_G = values_GS.sum(1)
    if slopes_GS is None:
        values_GS *= problem.scale
    else:
        values_GS *= slopes_GS
    if filtered_GS is not None:
        values_GS.masked_fill_(filtered_GS, 0)
    chunk.exp_GS = values_GS.to(problem.exp_dtype)
    return chunk, sums_G


def _logits_and_slopes(problem: Problem, cosines_GS: Tensor) -> tuple[Tensor, Tensor]:
    assert problem.negative_logits is not None
    with torch.enable_grad():
        cosines_GS.requires_grad_()
        logits_GS = problem.negative_logits(cosines_GS)
        slopes_GS = torch.autograd.grad(logits_GS.sum(), cosines_GS)[0]
    return logits_GS.detach(), slopes_GS


def _clear_targets_(values_GS: Tensor, slots_G: Tensor) -> None:
    """Zero if a column is the image's own class. Without asking the device how many there are."""
    is_here_G = (slots_G >= 0) & (slots_G < values_GS.shape[1])
    places_G1 = torch.where(is_here_G, slots_G, 0)[:, None]
    values_GS.scatter_(1, places_G1, torch.where(is_here_G[:, None], 0, values_GS.gather(1, places_G1)))


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


def _chunk_coefficients(chunk: _Chunk, coefficients_G: Tensor) -> Tensor:
    return coefficients_G if chunk.shift_G is None else coefficients_G * chunk.shift_G.double().exp()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b accumulated and returned in float32 (float64 for float64), whatever the operands."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        # Tensor cores take half precision and accumulate in float32; the result is not rounded back.
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
