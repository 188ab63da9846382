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
    CurricularFace,
    DynamicArcFace,
    InterTopK,
    NormalisedSoftmax,
    PartialFC,
    RowSGD,
    SphereFace2,
    UniFace,
    UserError,
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
    "inter-topk, filtered": Case(
        {"margin": InterTopK(scale=16, margin=0.2, extra=0.1, k=4), "filter_above": 0.3},
        lambda cosines, classes, now: 16 * cos_plus(cosines, 0.2),
        # The closest are those that count.
        lambda cosines, now: hard_negatives(torch.where(cosines > 0.3, 0.0, cosines), now),
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


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "name", ["several labels", "weights", "uniface", "inter-topk", "label smoothing", "margin schedule"]
)
def test_accumulated_parts_of_a_variant_are_one_big_batch(run_ranks, name, size):
    ranks = run_ranks(size, train, name, 3)
    truth = dense_train(name, torch.cat([rank["start"] for rank in ranks]))
    for rank in ranks:
        assert rank["losses"] == pytest.approx(truth["losses"], rel=1e-10, abs=1e-10)
    torch.testing.assert_close(torch.cat([rank["rows"] for rank in ranks]), truth["rows"], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("stored_bytes", [0, 900, 1 << 20], ids=["recompute", "some", "all"])
@pytest.mark.parametrize("name", CASES)
def test_a_variant_does_not_depend_on_chunks_and_on_what_is_stored(monkeypatch, name, stored_bytes):
    from megaclass.head import chunked

    whole = train(name)
    monkeypatch.setattr(chunked, "_CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(chunked, "_MIN_CHUNK", 5)
    monkeypatch.setitem(CASES[name].extra, "stored_bytes", stored_bytes)
    parts = train(name)
    assert parts["losses"] == pytest.approx(whole["losses"], abs=1e-10)
    torch.testing.assert_close(parts["grads"], whole["grads"], rtol=0, atol=1e-10)
    torch.testing.assert_close(parts["rows"], whole["rows"], rtol=0, atol=1e-10)


def test_the_bias_of_sphereface2_starts_where_own_and_other_classes_pull_equally():
    margin, num_classes = SphereFace2(), 1000
    bias = margin.state_for(num_classes)["bias"]
    g_0 = 2 * 0.5**margin.t - 1  # at a right angle
    own, other = (margin.scale * (g_0 + sign * margin.margin) + bias for sign in (-1, 1))
    of_own = margin.balance * torch.sigmoid(torch.tensor(-own, dtype=torch.float64))
    of_other = (1 - margin.balance) * torch.sigmoid(torch.tensor(other, dtype=torch.float64))
    assert of_own.item() == pytest.approx((num_classes - 1) * of_other.item(), rel=1e-9)


def _state_and_continuation(name: str, state: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], list[float]]:
    """The whole state after two steps, or the losses of two more steps from a given state."""
    case, losses = CASES[name], []
    head = new_head(case, seed=SEED if state is None else 77, optimizer=RowSGD(momentum=0.9))
    if state is not None:
        head.load_state_dict(state)
        # The numbers drawn in later steps depend on the seed, the centres on the state alone.
    for step in range(2):
        x, labels, weights = batch_of(case, step)
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        loss = head(
            x[mine].clone().requires_grad_(),
            labels[mine] if case.max_labels > 1 else torch.tensor(labels)[mine],
            None if weights is None else weights[mine],
        )
        loss.backward()
        head.step(lr=LR)
        losses.append(loss.item())
    return head.whole_state_dict(), losses


@pytest.mark.parametrize("name", ["uniface", "inner products with a bias, several labels", "margin schedule"])
def test_a_variant_s_state_loads_on_another_number_of_ranks(run_ranks, name):
    ((state, _),) = run_ranks(1, _state_and_continuation, name, None)
    ((_, expected),) = run_ranks(1, _state_and_continuation, name, state)
    for _, losses in run_ranks(3, _state_and_continuation, name, state):
        assert losses == pytest.approx(expected, abs=1e-10)


# ---- sampled negatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("negatives", ["uniform", "frequencies", "in-batch"])
def test_the_mean_of_sampled_gradients_over_10000_draws_approaches_the_full_one(negatives):
    """The gradient of image 0. With in-batch negatives the other labels of the batch are drawn by frequency, too."""
    num_classes, rate, num_draws = 1000, 0.4, 10_000
    generator = torch.Generator().manual_seed(0)
    counts = torch.rand(num_classes, generator=generator) ** 2 + 0.05
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    options = {"margin": NormalisedSoftmax(scale=2), "storage": "float64", "seed": 5, "class_counts": counts}
    options["weighted"] = True

    def of_image_0(head: PartialFC, labels: Tensor) -> Tensor:
        """The loss and the gradient: the other images have weight 0."""
        leaf = x.clone().requires_grad_()
        loss = head(leaf, labels, torch.tensor([4.0, 0, 0, 0]))
        loss.backward()
        head.abandon_step()
        return torch.cat([loss.detach()[None], leaf.grad[0]])

    labels = torch.tensor([7, 3, 150, 60])
    full = of_image_0(PartialFC(3, num_classes, **options), labels)
    corrected = {"negatives": negatives} if negatives != "uniform" else {"correct_sampling": True}
    head = PartialFC(3, num_classes, sample_rate=rate, **corrected, **options)
    others = torch.multinomial(counts, num_draws * 3, replacement=True, generator=generator).view(-1, 3)
    total = torch.zeros(4, dtype=torch.float64)
    for row in others:
        total += of_image_0(head, torch.cat([labels[:1], row]) if negatives == "in-batch" else labels)
    mean = total / num_draws
    assert (mean[1:] - full[1:]).norm() / full[1:].norm() < 0.01
    assert abs(mean[0] - full[0]) < 0.01
    # Without the correction the loss lacks the logarithm of the rate.
    head = PartialFC(3, num_classes, sample_rate=rate, **options)
    plain = torch.stack([of_image_0(head, labels) for _ in range(100)]).mean(0)
    assert plain[0] < full[0] - 0.5


@pytest.mark.parametrize("max_batch", [None, 4])
def test_a_single_image_with_no_negative_but_the_labels_of_others_moves_nothing(max_batch):
    head = PartialFC(D, C, sample_rate=0.0, negatives="in-batch", class_counts=COUNTS, max_batch=max_batch, seed=SEED)
    before = head.rows()["weight"].clone()
    loss = head(torch.ones(1, D, requires_grad=True), torch.tensor([5]))
    loss.backward()
    head.step(lr=1.0)
    assert loss == 0 and torch.equal(head.rows()["weight"], before)


def test_classes_are_drawn_in_proportion_to_their_frequency():
    counts = torch.tensor([0.0, 1, 2, 3, 4, 1000])
    rates = rates_by_frequency(counts, 0.5)
    # Three of six classes on average: the largest with certainty, the others share two.
    torch.testing.assert_close(
        rates, torch.tensor([0, 0.2, 0.4, 0.6, 0.8, 1.0], dtype=torch.float64), rtol=1e-12, atol=0
    )
    drawn = torch.stack([is_drawn(0, 6, rates, SEED, step, torch.device("cpu")) for step in range(4000)]).double()
    torch.testing.assert_close(drawn.mean(0), rates, rtol=0, atol=0.03)
    assert rates_by_frequency(counts, 0.99).tolist() == [0, 1, 1, 1, 1, 1]


# ---- inner products -------------------------------------------------------------------------------------------------


def _questions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = PartialFC(D, C, similarity="inner", bias=True, temperature=0.5, storage="float64", seed=SEED)
    head.rows()["weight"].mul_(40).add_(0.1)
    head.accept_rows()
    x = torch.randn(5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids, scores = head.predict(x, 3)
    return head.centres(torch.arange(C)), ids, scores, head.logits(x)


@pytest.mark.parametrize("size", [1, 3])
def test_predictions_by_inner_products_are_those_of_the_dense_matrix(run_ranks, size):
    x = torch.randn(5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for centres, ids, scores, logits in run_ranks(size, _questions):
        values = x @ centres[:, :-1].T + centres[:, -1]
        torch.testing.assert_close(logits, 2 * values)
        assert ids.tolist() == values.topk(3).indices.tolist()
        torch.testing.assert_close(scores, values.topk(3).values)


def test_the_biases_start_at_zero():
    head = PartialFC(D, C, similarity="inner", bias=True)
    assert (head.rows()["weight"][:, -1] == 0).all()
    assert head.rows()["weight"].shape == (C, D + 1)


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "sofmax"}, "loss is 'sofmax'; it must be one of softmax, decoupled, sigmoid"),
        ({"max_labels": 0}, r"max_labels is 0; it must be in \[1, 4096\]"),
        ({"max_labels": 2.5}, "max_labels is 2.5; it must be a whole number"),
        ({"label_smoothing": 1.0}, r"label_smoothing is 1.0; it must be in \[0, 1\)"),
        ({"label_smoothing": 0.1, "loss": "sigmoid"}, "label_smoothing with the loss sigmoid"),
        ({"similarity": "dot"}, "similarity is 'dot'; it must be one of cosine, inner"),
        ({"similarity": "inner", "margin": ArcFace()}, "similarity='inner' with ArcFace.*, which needs cosines"),
        ({"similarity": "inner", "filter_above": 0.5}, "filter_above, which is a cosine"),
        ({"bias": True}, "bias is True; it must be False unless similarity is 'inner'"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"negatives": "popular"}, "negatives is 'popular'; it must be one of uniform, frequencies, in-batch"),
        ({"negatives": "frequencies"}, "'frequencies' without class_counts"),
        ({"negatives": "frequencies", "class_counts": COUNTS, "sample_rate": 0.0}, "the sample rate 0"),
        ({"margin": DynamicArcFace()}, "without class_counts"),
        (
            {"class_counts": COUNTS[:-1]},
            r"class_counts has shape \(16,\); expected one number of 0 or more for each of the 17",
        ),
        ({"class_counts": -COUNTS}, "expected one number of 0 or more"),
        ({"class_counts": 0 * COUNTS}, "not all of them 0"),
        ({"class_counts": COUNTS.tolist()}, "class_counts are an object of builtins.list; they must be a tensor"),
        ({"margin": CurricularFace(), "max_labels": 2}, "whose negatives depend on the one label"),
        ({"margin": UniFace(), "loss": "softmax"}, "which learns a bias"),
        ({"margin_schedule": [(5, 0.0)]}, r"begins at step 0 and rises, for example \[\(0, 0.0\), \(2000, 1.0\)\]"),
        ({"margin_schedule": [(0, 0.0), (9, 9.0)]}, r"ArcFace.margin is 4.5; it must lie in \[0, 1.571\]"),
        ({"margin_schedule": [(0, 1.0)], "margin": NormalisedSoftmax()}, "which has no size"),
        ({"kernel": "triton_fused", "max_labels": 2}, "cannot run here: "),
    ],
)
def test_settings_that_do_not_fit_say_what_is_allowed(options, words):
    with pytest.raises(UserError, match=words):
        PartialFC(D, C, **options)


ONES = torch.ones(3, D)


@pytest.mark.parametrize(
    ("options", "labels", "weights", "words"),
    [
        ({}, [[1, 2]], None, "The head's labels are an object of builtins.list; they must be a tensor"),
        ({}, torch.ones(3, 2, dtype=torch.int64), None, r"labels of shape \(3, 2\).*several need max_labels"),
        (
            {"max_labels": 2},
            torch.ones(3, 3, dtype=torch.int64),
            None,
            "one integer per embedding, or up to max_labels=2",
        ),
        ({"max_labels": 2}, [[1], [1, 2, 3], [4]], None, r"labels of image 1 are \[1, 2, 3\]; .* at most max_labels=2"),
        ({"max_labels": 2}, [[1], [2]], None, "2 lists of labels for 3 embeddings"),
        ({"max_labels": 2}, [[1], [], [4]], None, "image at position 1 of the batch of rank 0 has no label"),
        (
            {"max_labels": 2},
            [[1], [2], [4, 4]],
            None,
            "position 2 of the batch of rank 0 has no label, or the same one twice",
        ),
        (
            {"max_labels": 2},
            [[1], [2, 17], [4]],
            None,
            r"Label 17 at position 1 of the batch of rank 0 is outside \[0, 17\)",
        ),
        (
            {"max_labels": 2},
            [[1], [2, -3], [4]],
            None,
            r"Label -3 at position 1 of the batch of rank 0 is outside \[0, 17\)",
        ),
        ({}, torch.tensor([1, 2, 3]), torch.ones(3), "built without weighted=True"),
        (
            {"weighted": True},
            torch.tensor([1, 2, 3]),
            torch.tensor([1.0, -1, 1]),
            "weight of the image at position 1 of",
        ),
        ({"weighted": True}, torch.tensor([1, 2, 3]), torch.tensor([1.0, 1, math.inf]), "negative or not finite"),
        (
            {"weighted": True, "max_labels": 2},
            torch.tensor([[1, 2], [3, 4], [5, -1]]),
            torch.ones(3, 1),
            "A weight of the image at position 0 of the batch of rank 0 is missing.*2 such image",
        ),
        (
            {"weighted": True, "max_labels": 2},
            [[1], [3, 4], [5]],
            [[1.0], [1.0], [1.0]],
            "image at position 1 .* is missing",
        ),
        ({"weighted": True}, torch.tensor([1, 2, 3]), torch.ones(2), r"weights of shape \(2,\)"),
        (
            {"weighted": True},
            torch.tensor([1, 2, 3]),
            torch.ones(3, dtype=torch.int64),
            "weights of shape .* torch.int64",
        ),
        (
            {"negatives": "in-batch", "class_counts": torch.cat([torch.zeros(3), torch.ones(14)])},
            torch.tensor([5, 2, 3]),
            None,
            "Class 2, of the image at position 1 of the batch of rank 0, has the class count 0",
        ),
        (
            {"similarity": "inner", "temperature": 2e-3},
            torch.tensor([1, 2, 3]),
            None,
            "too large for exp.*raise the temp",
        ),
    ],
)
def test_bad_batches_name_the_image_and_say_what_is_allowed(options, labels, weights, words):
    head = PartialFC(D, C, **options)
    if options.get("similarity") == "inner":
        head.rows()["weight"].add_(10)
        head.accept_rows()
    with pytest.raises(UserError, match=words):
        head(ONES, labels, weights)


def _labels_padded_on_one_rank() -> str:
    head = PartialFC(D, C, max_labels=2)
    try:
        head(ONES, [[1], [2], [] if dist.get_rank() == 1 else [3]])
    except UserError as error:
        return str(error)
    return "no error"


def test_every_rank_is_told_which_image_has_no_label(run_ranks):
    for message in run_ranks(3, _labels_padded_on_one_rank):
        assert "image at position 2 of the batch of rank 1 has no label" in message


def _different_counts() -> str:
    try:
        PartialFC(D, C, negatives="in-batch", class_counts=COUNTS + dist.get_rank())
    except UserError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_class_counts_are_refused(run_ranks):
    for message in run_ranks(2, _different_counts):
        assert "Ranks disagree about the head: class_counts" in message


# ---- sub-centres ----------------------------------------------------------------------------------------------------


def _minor() -> Any:
    head = PartialFC(4, 5, num_subcentres=2, storage="float64", seed=SEED)
    # Class c: sub-centres along +e_c' and -e_c'.
    axes = torch.eye(4).double()[torch.arange(5) % 4]
    centres = torch.stack([axes, -axes], 1)[head.classes.start : head.classes.stop].flatten(0, 1)
    head.rows()["weight"].copy_(centres)
    head.accept_rows()
    labels = torch.tensor([0, 0, 0, 1, 4, 4, 4, 4])
    signs = torch.tensor([1.0, 1, -1, -1, 1, -1, -1, 1]).double()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    head((axes[labels] * signs[:, None])[mine].requires_grad_(), labels[mine]).backward()
    head.step(lr=0.0)
    return head.minor_subcentres(3)


@pytest.mark.parametrize("size", [1, 3])
def test_images_in_minor_subcentres_are_counted_over_all_ranks(run_ranks, size):
    for found in run_ranks(size, _minor):
        assert found == (8, 3, [(4, 4, 2), (0, 3, 1)])
