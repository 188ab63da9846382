"""Margins by class, several labels, weights, other losses, inner products: against one dense matrix in float64.

The reference is written out here: all similarities at once, the papers' formulas, autograd for both gradients, plain SGD.
Every case runs on 1 to 4 ranks with uneven batches and shards.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaclass import (
    ArcFace,
    CosFace,
    DynamicArcFace,
    InterTopK,
    NormalisedSoftmax,
    PartialFC,
    RowSGD,
    SphereFace2,
    UniFace,
)
from megaclass.head.sampling import is_drawn, rates_by_frequency

C, D, G, SEED, LR, NUM_STEPS = 17, 6, 9, 3, 0.05, 3
COUNTS = torch.tensor([1.0, 40, 3, 7, 2, 90, 5, 5, 1, 12, 30, 4, 2, 8, 6, 1, 25])


def cos_plus(cosines: Tensor, margin: Tensor | float) -> Tensor:
    """cos(theta + margin), below the border by the continuation of ArcFace's authors."""
    margin = torch.as_tensor(margin, dtype=torch.float64)
    shifted = torch.cos(torch.acos(cosines) + margin)
    return torch.where(cosines > -torch.cos(margin), shifted, cosines - margin * torch.sin(margin))


@dataclass
class Case:
    options: dict[str, Any]
    own: Callable[[Tensor, Tensor, dict[str, Any]], Tensor]
    """Logits of the own classes, from similarities, class ids and {step, bias}."""
    other: Callable[[Tensor, dict[str, Any]], Tensor]
    """Logits of the other classes; similarities are -inf where a class is the image's own or takes no part."""
    loss: str = "softmax"
    factors: tuple[float, float] = (1.0, 1.0)
    max_labels: int = 1
    weights: str = "none"
    """none, images or labels."""
    smoothing: float = 0.0
    bias: float | None = None
    """The learned bias at the start."""
    extra: dict[str, Any] = field(default_factory=dict)


def scaled(scale: float) -> Callable[[Tensor, dict[str, Any]], Tensor]:
    return lambda cosines, now: scale * cosines


def arc(scale: float = 16.0, margin: float = 0.4) -> dict[str, Any]:
    return {
        "options": {"margin": ArcFace(scale=scale, margin=margin)},
        "own": lambda cosines, classes, now: scale * cos_plus(cosines, margin),
        "other": scaled(scale),
    }


def plain(scale: float = 16.0, **options: Any) -> dict[str, Any]:
    return {
        "options": {"margin": NormalisedSoftmax(scale=scale), **options},
        "own": lambda cosines, classes, now: scale * cosines,
        "other": scaled(scale),
    }


def hard_negatives(cosines: Tensor, now: dict[str, Any]) -> Tensor:
    border = cosines.topk(4, dim=1).values[:, -1:]
    closer = torch.cos(torch.acos(cosines.clamp(-1, 1)) - 0.1)
    return 16 * torch.where((cosines >= border) & (cosines > -2), closer, cosines)


def share_of_step(now: dict[str, Any]) -> float:
    """[(0, 0.0), (2, 1.0), (3, 2.0)], linear in between."""
    return {0: 0.0, 1: 0.5, 2: 1.0, 3: 2.0}[now["step"]]


def g(cosines: Tensor) -> Tensor:
    return 2 * ((cosines + 1) / 2) ** 3 - 1


CASES: dict[str, Case] = {
    "dynamic margins": Case(
        {"margin": DynamicArcFace(scale=16, factor=0.4, exponent=0.3, offset=0.1), "class_counts": COUNTS},
        lambda cosines, classes, now: 16 * cos_plus(cosines, 0.4 * COUNTS.double()[classes] ** -0.3 + 0.1),
        scaled(16),
    ),
    "margin schedule": Case(
        {"margin": ArcFace(scale=16, margin=0.3), "margin_schedule": [(0, 0.0), (2, 1.0), (3, 2.0)]},
        lambda cosines, classes, now: 16 * cos_plus(cosines, 0.3 * share_of_step(now)),
        scaled(16),
    ),
    "inter-topk": Case(
        {"margin": InterTopK(scale=16, margin=0.2, extra=0.1, k=4)},
        lambda cosines, classes, now: 16 * cos_plus(cosines, 0.2),
        hard_negatives,
    ),
    "uniface": Case(
        {"margin": UniFace(scale=16, margin=0.2)},
        lambda cosines, classes, now: 16 * (cosines - 0.2) + now["bias"],
        lambda cosines, now: 16 * cosines + now["bias"],
        loss="sigmoid",
        bias=-math.log(10 * C),
    ),
    "sphereface2": Case(
        {"margin": SphereFace2(scale=16, margin=0.2, balance=0.6, bias=-2.5, bias_rate=0.3)},
        lambda cosines, classes, now: 16 * (g(cosines) - 0.2) + now["bias"],
        lambda cosines, now: 16 * (g(cosines) + 0.2) + now["bias"],
        loss="sigmoid",
        factors=(0.6 / 16, 0.4 / 16),
        bias=-2.5,
    ),
    "several labels": Case(**arc(), max_labels=3),
    "several labels, decoupled": Case(**arc(), loss="decoupled", max_labels=3),
    "several labels, sigmoid": Case(**arc(4.0), loss="sigmoid", max_labels=3),
    "soft labels": Case(**arc(), max_labels=3, weights="labels"),
    "soft labels, decoupled": Case(**arc(), loss="decoupled", max_labels=3, weights="labels"),
    "weights, sigmoid with a bias": Case(
        {"margin": UniFace(scale=8, margin=0.1, bias=-1.0)},
        lambda cosines, classes, now: 8 * (cosines - 0.1) + now["bias"],
        lambda cosines, now: 8 * cosines + now["bias"],
        loss="sigmoid",
        max_labels=2,
        weights="images",
        bias=-1.0,
    ),
    "weights": Case(**arc(), weights="images"),
    "weights, several labels": Case(**arc(), max_labels=3, weights="images"),
    "label smoothing": Case(**arc(), smoothing=0.1),
    "label smoothing, several labels, weights": Case(**arc(), smoothing=0.2, max_labels=3, weights="labels"),
    "label smoothing, large scale": Case(**arc(200.0), smoothing=0.2),
    "inner products": Case(**plain(2.0, similarity="inner")),
    "inner products with a bias, several labels": Case(**plain(2.0, similarity="inner", bias=True), max_labels=3),
    "inner products, large": Case(**plain(90.0, similarity="inner", bias=True)),
    "inner products, additive margin": Case(
        {"margin": CosFace(scale=2, margin=0.3), "similarity": "inner"},
        lambda values, classes, now: 2 * (values - 0.3),
        scaled(2),
    ),
    "several labels, cosface": Case(
        {"margin": CosFace(scale=16, margin=0.2)},
        lambda cosines, classes, now: 16 * (cosines - 0.2),
        scaled(16),
        max_labels=2,
    ),
}
for _name, _settings in {
    "sampled": {"sample_rate": 0.4},
    "corrected": {"sample_rate": 0.4, "correct_sampling": True},
    "sub-centres": {"num_subcentres": 2},
    "by frequency": {"sample_rate": 0.4, "negatives": "frequencies", "class_counts": COUNTS},
    "in-batch": {"sample_rate": 0.2, "negatives": "in-batch", "class_counts": COUNTS},
}.items():
    CASES[f"several labels, {_name}"] = Case(**arc(), max_labels=3, extra=_settings)
    CASES[f"inner products, {_name}"] = Case(**plain(2.0, similarity="inner"), extra=_settings)
    CASES[f"label smoothing, {_name}"] = Case(**arc(), smoothing=0.2, extra=_settings)
    CASES[f"inter-topk, {_name}"] = Case(
        **{key: getattr(CASES["inter-topk"], key) for key in ("options", "own", "other")}, extra=_settings
    )
    CASES[f"uniface, {_name}"] = Case(
        **{key: getattr(CASES["uniface"], key) for key in ("options", "own", "other", "loss", "bias")}, extra=_settings
    )


def batch_of(case: Case, step: int) -> tuple[Tensor, list[list[int]], Tensor | None]:
    """Embeddings, lists of labels, and weights: (G,) or (G, max_labels)."""
    generator = torch.Generator().manual_seed(step)
    embeddings_GD = torch.randn(G, D, dtype=torch.float64, generator=generator)
    labels = []
    for _ in range(G):
        count = int(torch.randint(1, case.max_labels + 1, (1,), generator=generator))
        labels.append(torch.randperm(C, generator=generator)[:count].tolist())
    labels[1] = labels[0]
    weights = None
    if case.weights == "images":
        weights = torch.rand(G, dtype=torch.float64, generator=generator)
    if case.weights == "labels":
        weights = torch.rand(G, case.max_labels, dtype=torch.float64, generator=generator)
    return embeddings_GD, labels, weights


def dense_loss(
    case: Case,
    centres_CMD: Tensor,
    embeddings_GD: Tensor,
    labels: list[list[int]],
    weights: Tensor | None,
    now: dict[str, Any],
    class_weights_C: Tensor,
) -> Tensor:
    """class_weights_C: 0 for classes that take no part."""
    if case.options.get("similarity") == "inner":
        if case.options.get("bias"):
            embeddings_GD = F.pad(embeddings_GD, (0, 1), value=1.0)
        values_GC = torch.einsum("gd,cmd->gcm", embeddings_GD, centres_CMD).amax(2)
    else:
        values_GC = torch.einsum("gd,cmd->gcm", F.normalize(embeddings_GD), F.normalize(centres_CMD, dim=2)).amax(2)
    is_own_GC = torch.zeros(values_GC.shape, dtype=torch.bool)
    for row, own in enumerate(labels):
        is_own_GC[row, own] = True
    takes_part_GC = (class_weights_C > 0) & ~is_own_GC
    others_GC = case.other(torch.where(takes_part_GC, values_GC, -10.0), now)
    losses = []
    for row, own in enumerate(labels):
        z_own = case.own(values_GC[row, own], torch.tensor(own), now)
        z_other, w_other = others_GC[row][takes_part_GC[row]], class_weights_C[takes_part_GC[row]]
        if case.weights == "labels":
            w = weights[row, : len(own)]
        elif case.weights == "images":
            w = weights[row].repeat(len(own)) / (1 if case.loss == "sigmoid" else len(own))
        else:
            w = torch.ones(len(own)).double() / (1 if case.loss == "sigmoid" else len(own))
        weighted = z_other + w_other.log()
        if case.loss == "sigmoid":
            of_own = -(w * F.logsigmoid(z_own)).sum()
            of_others = w.mean() * -(w_other * F.logsigmoid(-z_other)).sum()
            losses.append(case.factors[0] * of_own + case.factors[1] * of_others)
        elif case.loss == "decoupled":
            losses.append(
                sum(w[p] * (torch.cat([weighted, z_own[p : p + 1]]).logsumexp(0) - z_own[p]) for p in range(len(own)))
            )
        else:
            log_z = torch.cat([weighted, z_own]).logsumexp(0)
            loss = (w * (log_z - z_own)).sum()
            if case.smoothing:
                mean = ((w_other * z_other).sum() + z_own.sum()) / now["sum_of_class_weights"]
                loss = (1 - case.smoothing) * loss + case.smoothing * w.sum() * (log_z - mean)
            losses.append(loss)
    return torch.stack(losses).sum() / len(labels)


def class_weights(case: Case, labels: list[list[int]], step: int) -> Tensor:
    """(C,): 0 for a class that takes no part, otherwise its weight as a negative."""
    settings = case.extra
    rate, mode = settings.get("sample_rate", 1.0), settings.get("negatives", "uniform")
    if rate == 1:
        return torch.ones(C).double()
    flat = torch.tensor(list(itertools.chain(*labels)))
    is_positive_C = torch.zeros(C, dtype=torch.bool)
    is_positive_C[flat] = True
    rates_C = torch.full((C,), rate, dtype=torch.float64)
    if mode == "frequencies":
        rates_C = rates_by_frequency(COUNTS, rate)
    drawn_C = is_drawn(0, C, rates_C, SEED, step, torch.device("cpu"))
    if mode == "in-batch":
        shares_C = COUNTS.double() / COUNTS.sum()
        inverse_C = 1 / (1 - (1 - rate) * (1 - shares_C) ** (len(flat) - 1))
        return torch.where(is_positive_C | drawn_C, inverse_C, 0)
    is_corrected = mode == "frequencies" or settings.get("correct_sampling", False)
    weight_C = 1 / rates_C if is_corrected else torch.ones(C).double()
    return torch.where(is_positive_C, 1.0, torch.where(drawn_C, weight_C, 0))


def new_head(case: Case, **others: Any) -> PartialFC:
    options = {
        "optimizer": RowSGD(momentum=0.0),
        "seed": SEED,
        "storage": "float64",
        "gradient_scale": "sum",
        "max_labels": case.max_labels,
        "weighted": case.weights != "none",
        "label_smoothing": case.smoothing,
        "loss": case.loss,
        **case.options,
        **case.extra,
        **others,
    }
    return PartialFC(D, C, **options)


def train(name: str, num_parts: int = 1) -> dict[str, Any]:
    """Losses, gradients of this rank's images, its centres, biases."""
    case = CASES[name]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    head = new_head(case)
    if case.options.get("similarity") == "inner":
        # Initial centres of length 0.02 would hide an error of the gradient.
        head.rows()["weight"].mul_(50)
        head.accept_rows()
    result: dict[str, Any] = {"losses": [], "grads": [], "biases": [], "start": head.rows()["weight"].clone()}
    for step in range(NUM_STEPS):
        x, labels, weights = batch_of(case, step)
        cuts = torch.randint(G + 1, (size - 1,), generator=torch.Generator().manual_seed(step)).sort().values.tolist()
        mine = slice([0, *cuts][rank], [*cuts, G][rank])
        leaf, labels = x[mine].clone().requires_grad_(), labels[mine]
        weights = None if weights is None else weights[mine]
        # As a padded tensor in every other step, as lists in the others.
        rows = [[*one, *[-1] * (case.max_labels - len(one))] for one in labels]
        given: Any = torch.tensor(rows, dtype=torch.int64).view(len(rows), case.max_labels)
        if case.max_labels > 1 and step % 2:
            given = labels
        total = 0.0
        parts = torch.arange(len(labels)).tensor_split(num_parts)
        if num_parts > 1:
            head.begin_step(given)
        for part in parts:
            here = slice(int(part[0]), int(part[-1]) + 1) if len(part) else slice(0, 0)
            loss = head(leaf[here], given[here], None if weights is None else weights[here])
            loss.backward()
            total += loss.item()
        head.step(lr=LR)
        result["losses"].append(total)
        result["grads"].append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        result["biases"].append(head.margin_state["bias"].item() if case.bias is not None else None)
    return {**result, "rows": head.rows()["weight"]}


def dense_train(name: str, start_RD: Tensor) -> dict[str, Any]:
    case = CASES[name]
    margin, bias = case.options["margin"], case.bias
    centres_RD, result = start_RD.clone(), {"losses": [], "grads": [], "biases": []}
    for step in range(NUM_STEPS):
        x, labels, weights = batch_of(case, step)
        x, leaf_RD = x.clone().requires_grad_(), centres_RD.clone().requires_grad_()
        weights_C = class_weights(case, labels, step)
        now: dict[str, Any] = {"step": step, "sum_of_class_weights": weights_C.sum()}
        if bias is not None:
            now["bias"] = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
        loss = dense_loss(case, leaf_RD.unflatten(0, (C, -1)), x, labels, weights, now, weights_C)
        loss.backward()
        centres_RD = centres_RD - LR * leaf_RD.grad
        if bias is not None:
            bias = (now["bias"] - margin.bias_rate * now["bias"].grad).item()
        result["losses"].append(loss.item())
        result["grads"].append(x.grad)
        result["biases"].append(bias)
    return {**result, "rows": centres_RD}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_variant_is_the_dense_classifier_on_any_number_of_ranks(run_ranks, name, size):
    ranks = run_ranks(size, train, name)
    truth = dense_train(name, torch.cat([rank["start"] for rank in ranks]))
    for rank in ranks:
        assert rank["losses"] == pytest.approx(truth["losses"], rel=1e-10, abs=1e-10)
        for bias, expected in zip(rank["biases"], truth["biases"], strict=True):
            assert bias is None or bias == pytest.approx(expected, abs=1e-10)
    for step, grad_GD in enumerate(truth["grads"]):
        torch.testing.assert_close(torch.cat([rank["grads"][step] for rank in ranks]), grad_GD, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(torch.cat([rank["rows"] for rank in ranks]), truth["rows"], rtol=1e-9, atol=1e-10)
