"""The definition: the whole matrix at once, gradients by autograd. Slow, plain, and what the others are tested against."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megaclass.head.problem import CentreGradient, Problem, take_rows, unit_rows


def mass(problem: Problem) -> Tensor:
    return _mass(problem, problem.unit_GD.to(problem.work_dtype), _unit_centres(problem))[0].double()


def grad_images(problem: Problem, coefficients_G: Tensor) -> Tensor:
    images_GD = problem.unit_GD.to(problem.work_dtype).requires_grad_()
    return _gradient(problem, images_GD, _unit_centres(problem), coefficients_G, images_GD)[0]


def grad_centres(problems: list[Problem], coefficients: list[Tensor]) -> Iterator[CentreGradient]:
    centres_RD = _unit_centres(problems[0]).requires_grad_()
    parts = [
        _gradient(problem, problem.unit_GD.to(problem.work_dtype), centres_RD, coefficients_G, centres_RD)
        for problem, coefficients_G in zip(problems, coefficients, strict=True)
    ]
    won_R = torch.stack([won for _, won in parts]).any(0) if problems[0].num_subcentres > 1 else None
    yield CentreGradient(0, problems[0].num_classes, torch.stack([grad for grad, _ in parts]).sum(0), won_R)


def _unit_centres(problem: Problem) -> Tensor:
    return unit_rows(take_rows(problem.weight_RD, problem.rows_of(0, problem.num_classes)), problem.work_dtype)[0]


def _mass(problem: Problem, images_GD: Tensor, centres_RD: Tensor) -> tuple[Tensor, Tensor]:
    cosines_GSM = (images_GD @ centres_RD.T).unflatten(1, (problem.num_classes, problem.num_subcentres))
    cosines_GS, winners_GS = cosines_GSM.max(2)
    if problem.filter_above is not None:
        cosines_GS = cosines_GS.masked_fill(cosines_GS > problem.filter_above, 0)
    logits_GS = problem.negative_logits(cosines_GS) if problem.negative_logits else problem.scale * cosines_GS
    slots_S = torch.arange(problem.num_classes, device=images_GD.device)
    weights_GS = (slots_S != problem.target_slot_G[:, None]).to(logits_GS.dtype)
    if problem.class_weight_S is not None:
        weights_GS = weights_GS * problem.class_weight_S
    won_GSM = torch.nn.functional.one_hot(winners_GS, problem.num_subcentres).bool()
    won_R = (won_GSM & problem.has_direction_G[:, None, None]).any(0).flatten()
    return (logits_GS.double().exp() * weights_GS).sum(1), won_R


def _gradient(
    problem: Problem, images_GD: Tensor, centres_RD: Tensor, coefficients_G: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        mass_G, won_R = _mass(problem, images_GD, centres_RD)
        return torch.autograd.grad(mass_G @ coefficients_G, wanted)[0], won_R
