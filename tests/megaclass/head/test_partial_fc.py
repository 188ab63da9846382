"""The head against a dense float64 classifier: plain F.cross_entropy on the full matrix, torch.optim for the centres."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from megaclass import ArcFace, CosFace, CurricularFace, PartialFC, RowAdagrad, RowAdamW, RowSGD, UserError
from megaclass.head.sampling import is_drawn
from megaclass.head.settings import default_stored_bytes

WIDTH = 12


def batches(num_steps: int, num_classes: int, size: int = 9) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, WIDTH, dtype=torch.float64, generator=generator),
            torch.randint(num_classes, (size,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def my_part(tensor: Tensor, parts: list[int] | None = None) -> Tensor:
    """This rank's rows; uneven by default: rank r of 3 gets 9 -> 2, 3, 4."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if parts is None:
        edges = [round(len(tensor) * (r / size) ** 1.3) for r in range(size + 1)]
        parts = [b - a for a, b in itertools.pairwise(edges)]
    return tensor.split(parts)[rank]


class DenseArcFace:
    """The truth: all classes in one matrix, every formula in the open."""

    def __init__(self, centres_CD: Tensor, scale: float = 16.0, margin: float = 0.4) -> None:
        self.centres_CD = centres_CD.clone().requires_grad_()
        self.scale, self.margin = scale, margin

    def loss(self, embeddings_GD: Tensor, labels_G: Tensor, classes: Tensor | None = None) -> Tensor:
        centres = self.centres_CD if classes is None else self.centres_CD[classes]
        places_G = labels_G if classes is None else torch.searchsorted(classes, labels_G)
        cosines = F.normalize(embeddings_GD) @ F.normalize(centres).T
        target = cosines.gather(1, places_G[:, None])
        shifted = torch.cos(torch.acos(target) + self.margin)
        shifted = torch.where(target > -math.cos(self.margin), shifted, target - self.margin * math.sin(self.margin))
        return F.cross_entropy(self.scale * cosines.scatter(1, places_G[:, None], shifted), places_G)


def new_head(num_classes: int, **options: Any) -> PartialFC:
    defaults = {
        "margin": ArcFace(scale=16, margin=0.4),
        "optimizer": RowSGD(momentum=0.9, weight_decay=5e-4),
        "storage": "float64",
        "seed": 3,
    }
    return PartialFC(WIDTH, num_classes, **{**defaults, **options})


def all_centres(head: PartialFC) -> Tensor:
    return head.centres(torch.arange(head.num_classes))


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_training_equals_the_dense_classifier(rate):
    head = new_head(40, sample_rate=rate)
    dense = DenseArcFace(all_centres(head))
    momentum = torch.zeros_like(dense.centres_CD)
    for step, (x, y) in enumerate(batches(6, 40)):
        x, x_dense = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss = head(x, y)
        loss.backward()
        head.step(lr=0.05)

        taking_part = is_drawn(0, 40, rate, 3, step, torch.device("cpu"))
        taking_part[y] = True
        classes = taking_part.nonzero().flatten()
        truth = dense.loss(x_dense, y, classes)
        dense.centres_CD.grad = None
        truth.backward()
        with torch.no_grad():  # torch.optim.SGD, on the rows that take part
            grad = dense.centres_CD.grad + 5e-4 * dense.centres_CD
            momentum[classes] = 0.9 * momentum[classes] + grad[classes]
            dense.centres_CD[classes] -= 0.05 * momentum[classes]

        assert abs(loss.item() - truth.item()) < 1e-10
        torch.testing.assert_close(x.grad, x_dense.grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(all_centres(head), dense.centres_CD.detach(), rtol=0, atol=1e-10)


def _train(num_classes: int, options: dict[str, Any], num_steps: int = 20) -> tuple[list[float], Tensor]:
    head = new_head(num_classes, **options)
    losses = []
    for x, y in batches(num_steps, num_classes):
        loss = head(my_part(x).clone().requires_grad_(), my_part(y))
        loss.backward()
        head.step(lr=0.05)
        losses.append(loss.item())
    return losses, all_centres(head)


@pytest.mark.parametrize(
    "options",
    [
        {"sample_rate": 1.0},
        {"sample_rate": 0.2},
        {"sample_rate": 0.0},
        {"sample_rate": 0.7, "sample_positives": True},
        {"sample_rate": [(0, 0.2), (10, 1.0)], "max_batch": 9},
        {"sample_rate": 0.2, "optimizer": RowAdamW()},
        {"sample_rate": 0.2, "optimizer": RowAdagrad(), "num_subcentres": 2},
        {"sample_rate": 0.2, "margin": CurricularFace(scale=16), "correct_sampling": True},
    ],
    ids=[
        "all",
        "a fifth",
        "positives only",
        "positives counted",
        "schedule",
        "adamw",
        "adagrad, sub-centres",
        "curricular, corrected",
    ],
)
def test_the_same_model_on_any_number_of_ranks(run_ranks, options):
    """13 classes cut over 1, 2, 3 and 4 ranks, uneven batches: one loss curve, one set of centres."""
    ((losses, centres),) = run_ranks(1, _train, 13, options)
    for size in (2, 3, 4):
        for other_losses, other_centres in run_ranks(size, _train, 13, options):
            torch.testing.assert_close(torch.tensor(other_losses), torch.tensor(losses), rtol=0, atol=1e-10)
            torch.testing.assert_close(other_centres, centres, rtol=0, atol=1e-10)


def test_one_class_a_rank_is_enough(run_ranks):
    ((losses, centres),) = run_ranks(1, _train, 3, {})
    for other_losses, other_centres in run_ranks(3, _train, 3, {}):
        torch.testing.assert_close(torch.tensor(other_losses), torch.tensor(losses), rtol=0, atol=1e-10)
        torch.testing.assert_close(other_centres, centres, rtol=0, atol=1e-10)


def _train_backbone(gradient_scale: str, parts: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    backbone = nn.Linear(WIDTH, WIDTH).double()
    model = DistributedDataParallel(backbone) if gradient_scale == "mean" else backbone
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.05, momentum=0.9)
    head = new_head(13, gradient_scale=gradient_scale, max_batch=9)
    for x, y in batches(8, 13):
        loss = head(model(my_part(x, parts)), my_part(y, parts))
        optimizer.zero_grad()
        loss.backward()
        if gradient_scale == "sum":
            for parameter in backbone.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        head.step(lr=0.05)
    return backbone.weight.detach(), all_centres(head)


@pytest.mark.parametrize("gradient_scale", ["mean", "sum"])
@pytest.mark.parametrize("parts", [[4, 5], [2, 3, 4], [0, 4, 1, 4]], ids=["2 ranks", "3 ranks", "4 ranks, one empty"])
def test_a_data_parallel_backbone_gets_the_gradient_of_the_whole_batch(run_ranks, gradient_scale, parts):
    ((weight, centres),) = run_ranks(1, _train_backbone, gradient_scale, [9])
    for other_weight, other_centres in run_ranks(len(parts), _train_backbone, gradient_scale, parts):
        torch.testing.assert_close(other_weight, weight, rtol=0, atol=1e-10)
        torch.testing.assert_close(other_centres, centres, rtol=0, atol=1e-10)


class ByteCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes handed to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for t in torch.utils._pytree.tree_leaves(args[:2]) if isinstance(t, Tensor)]
            name = func.__name__.split(".")[0]
            self.bytes[name] = self.bytes.get(name, 0) + max(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def _count(margin: Any, max_batch: int | None, phase: str) -> tuple[dict[str, int], dict[str, int]]:
    head = new_head(13, margin=margin, max_batch=max_batch, storage="float32", sample_rate=0.5)
    x, y = batches(1, 13, size=6)[0]
    x = my_part(x.float(), [3, 3]).clone().requires_grad_()
    counts = CommDebugMode()
    sizes = ByteCounter()
    with counts, sizes:
        loss = head(x, my_part(y, [3, 3]))
        if phase != "forward":
            loss.backward()
        if phase == "step":
            head.step(lr=0.1)
    return {str(op).split(".")[-1]: n for op, n in counts.get_comm_counts().items()}, sizes.bytes


def test_a_step_costs_three_exchanges_of_known_size(run_ranks):
    counts, sizes = run_ranks(2, _count, CosFace(scale=16), 3, "step")[0]
    assert sum(counts.values()) == 3
    gather, reduce, scatter = (
        next(sizes[name] for name in sizes if key in name) for key in ("allgather", "allreduce", "reduce_scatter")
    )
    assert gather == 2 * (16 + 3 * (8 + WIDTH * 4))
    assert reduce == 8 * (2 * 6 + 1)
    assert scatter == 4 * 6 * WIDTH


def test_forward_costs_two_exchanges_and_the_update_none(run_ranks):
    forward, _ = run_ranks(2, _count, CosFace(scale=16), 3, "forward")[0]
    backward, _ = run_ranks(2, _count, CosFace(scale=16), 3, "backward")[0]
    assert sum(forward.values()) == 2
    assert sum(backward.values()) == 3


def test_negatives_that_depend_on_the_target_cost_a_fourth_small_exchange(run_ranks):
    counts, sizes = run_ranks(2, _count, CurricularFace(scale=16), 3, "step")[0]
    assert sum(counts.values()) == 4
    assert next(sizes[name] for name in sizes if "allreduce" in name) == 8 * 6 + 8 * (6 + 1)


def test_without_max_batch_the_sizes_cost_one_more(run_ranks):
    counts, _ = run_ranks(2, _count, CosFace(scale=16), None, "step")[0]
    assert sum(counts.values()) == 4


def _accumulate(margin: Any, num_parts: int, rate: float) -> tuple[list[float], Tensor, list[Tensor]]:
    head = new_head(13, margin=margin, sample_rate=rate)
    losses, grads = [], []
    for x, y in batches(4, 13, size=8):
        x, y = my_part(x).clone().requires_grad_(), my_part(y)
        if num_parts == 1:
            loss = head(x, y)
            loss.backward()
            losses.append(loss.item())
        else:
            head.begin_step(y)
            total = 0.0
            for part_x, part_y in zip(x.tensor_split(num_parts), y.tensor_split(num_parts), strict=True):
                loss = head(part_x, part_y)
                loss.backward()
                total += loss.item()
            losses.append(total)
        head.step(lr=0.05)
        grads.append(x.grad)
    return losses, all_centres(head), grads


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("name", ["ArcFace", "AdaFace", "CurricularFace", "ElasticFace"])
def test_accumulating_parts_gives_what_one_big_batch_gives(run_ranks, name, rate):
    import megaclass

    margin = getattr(megaclass, name)(scale=16)
    whole = run_ranks(2, _accumulate, margin, 1, rate)
    parts = run_ranks(2, _accumulate, margin, 3, rate)
    for (losses, centres, grads), (other_losses, other_centres, other_grads) in zip(whole, parts, strict=True):
        torch.testing.assert_close(torch.tensor(other_losses), torch.tensor(losses), rtol=0, atol=1e-10)
        torch.testing.assert_close(other_centres, centres, rtol=0, atol=1e-10)
        torch.testing.assert_close(other_grads, grads, rtol=0, atol=1e-10)


def test_a_second_backward_without_begin_step_is_refused():
    head = new_head(13)
    (x, y), (x2, y2) = batches(2, 13)
    first, second = head(x.requires_grad_(), y), head(x2.requires_grad_(), y2)
    first.backward()
    with pytest.raises(UserError, match="begin_step"):
        second.backward()


def _labels_that_were_not_announced() -> str:
    head = new_head(13, sample_rate=0.3)
    x, y = batches(1, 13, size=8)[0]
    x, y = my_part(x).clone().requires_grad_(), my_part(y)
    head.begin_step(torch.zeros_like(y))
    try:
        head(x, y)
    except UserError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("size", [1, 3])
def test_labels_that_begin_step_was_not_given_are_refused_on_every_rank(run_ranks, size):
    for message in run_ranks(size, _labels_that_were_not_announced):
        assert "Give begin_step() all labels of the step" in message


def _step_without_images(options: dict[str, Any]) -> tuple[float, bool]:
    head = new_head(13, optimizer=RowSGD(), **options)
    before = head.rows()["weight"].clone()
    loss = head(torch.zeros(0, head.embedding_dim, requires_grad=True), torch.zeros(0, dtype=torch.int64))
    loss.backward()
    head.step(lr=0.1)
    return loss.item(), torch.equal(head.rows()["weight"], before)


@pytest.mark.parametrize("options", [{}, {"max_labels": 3, "sample_rate": 0.3}], ids=["one label", "several labels"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_step_without_an_image_on_any_rank_moves_nothing(run_ranks, size, options):
    assert run_ranks(size, _step_without_images, options) == [(0.0, True)] * size


def test_a_step_without_backward_is_refused():
    with pytest.raises(UserError, match="without a forward and a backward"):
        new_head(13).step(lr=0.1)


def test_loss_without_gradient_leaves_no_trace():
    head = new_head(13)
    (x, y), (x2, y2) = batches(2, 13)
    with torch.no_grad():
        head(x, y)
    head.eval()
    head(x.requires_grad_(), y)
    head.train()
    head(x2.requires_grad_(), y2).backward()
    head.step(lr=0.1)


def test_frozen_embeddings_still_train_the_centres():
    head = new_head(13)
    x, y = batches(1, 13)[0]
    before = head(x, y)
    before.backward()
    head.step(lr=0.05)
    assert head(x, y) < before


def _skip(skip: Any) -> tuple[bool, int]:
    head = new_head(13, sample_rate=0.3, margin=CurricularFace(scale=16))
    x, y = batches(1, 13)[0]
    head(my_part(x).clone().requires_grad_(), my_part(y)).backward()
    before = {name: value.clone() for name, value in head.state_dict().items() if name != "_extra_state"}
    head.step(lr=0.1, skip=skip)
    return all(torch.equal(before[name], head.state_dict()[name]) for name in before), head.step_count


@pytest.mark.parametrize("skip", [True, torch.tensor(True), torch.tensor(1.0)])
def test_a_skipped_step_moves_nothing_and_counts(run_ranks, skip):
    assert run_ranks(2, _skip, skip) == [(True, 1)] * 2


def test_a_scaled_loss_moves_the_centres_alike():
    x, y = batches(1, 13)[0]
    heads = [new_head(13), new_head(13)]
    for head, scale in zip(heads, (1.0, 1024.0), strict=True):
        (head(x.requires_grad_(), y) * scale).backward()
        head.step(lr=0.1, loss_scale=scale)
    torch.testing.assert_close(all_centres(heads[0]), all_centres(heads[1]), rtol=1e-12, atol=0)


def test_zero_embeddings_have_a_loss_and_no_gradient():
    head = new_head(13)
    x = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = head(x, torch.tensor([1, 2]))
    loss.backward()
    head.step(lr=0.1)
    # All cosines are 0: twelve negatives at logit 0, the target at 16 cos(pi/2 + 0.4).
    target = 16 * math.cos(math.pi / 2 + 0.4)
    assert loss.item() == pytest.approx(math.log(12 + math.exp(target)) - target, abs=1e-12)
    assert x.grad.abs().max() == 0
    assert all_centres(head).isfinite().all()


@pytest.mark.parametrize("sign", [1, -1], ids=["cos = 1", "cos = -1, beyond pi"])
def test_an_embedding_on_its_own_centre_or_opposite_has_a_finite_gradient(sign):
    head = new_head(13)
    x = (sign * 3 * all_centres(head)[4:5]).requires_grad_()
    loss = head(x, torch.tensor([4]))
    loss.backward()
    head.step(lr=0.1)
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert all_centres(head).isfinite().all()


def test_large_scales_do_not_overflow_float32():
    """At scale 200 exp(logit) reaches e^200, far beyond float32: the rows are shifted by their maximum."""
    x, y = batches(1, 13)[0]
    results = []
    for storage in ("float64", "float32"):
        head = new_head(13, margin=ArcFace(scale=200, margin=0.4), storage=storage)
        leaf = x.detach().to(head.store.work_dtype, copy=True).requires_grad_()
        loss = head(leaf, y)
        loss.backward()
        results.append((loss.double(), leaf.grad.double()))
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)
    dense = DenseArcFace(all_centres(new_head(13)), scale=200, margin=0.4)
    assert results[0][0].item() == pytest.approx(dense.loss(x, y).item(), abs=1e-10)


def test_float32_is_as_exact_as_the_plain_float32_classifier():
    head64 = new_head(500)
    head = new_head(500, storage="float32")
    with torch.no_grad():
        head64.store.weight_RD.copy_(head.store.weight_RD)
    x, y = batches(1, 500, size=64)[0]
    truth_x = x.clone().requires_grad_()
    truth = DenseArcFace(all_centres(head64))
    truth_loss = truth.loss(truth_x, y)
    truth_loss.backward()
    plain_x, ours_x = x.float().requires_grad_(), x.float().requires_grad_()
    plain = DenseArcFace(all_centres(head))
    plain.loss(plain_x, y).backward()
    head(ours_x, y).backward()
    plain_error = (plain_x.grad.double() - truth_x.grad).abs().max()
    assert (ours_x.grad.double() - truth_x.grad).abs().max() <= 2 * plain_error


def test_by_default_an_eighth_of_the_gpu_is_for_what_is_stored(monkeypatch):
    gib, gpu = 1 << 30, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * gib)
    for free, expected in ((100, 10), (30, 10), (4, 3)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * gib, 80 * gib))
        assert default_stored_bytes(gpu) == expected * gib
    assert default_stored_bytes(torch.device("cpu")) == 4 * gib


@pytest.mark.parametrize("stored_bytes", [0, 40_000], ids=["recompute", "some"])
def test_what_is_stored_changes_memory_not_results(monkeypatch, stored_bytes):
    from megaclass.head import chunked

    monkeypatch.setattr(chunked, "_CHUNK_BYTES", {"cpu": 1 << 12})
    monkeypatch.setattr(chunked, "_MIN_CHUNK", 16)
    x, y = batches(1, 1000)[0]
    outcomes = []
    for head in (new_head(1000, stored_bytes=1 << 30), new_head(1000, stored_bytes=stored_bytes)):
        leaf = x.clone().requires_grad_()
        loss = head(leaf, y)
        loss.backward()
        head.step(lr=0.05)
        outcomes.append((loss.detach(), leaf.grad, all_centres(head)))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=1e-10)


def test_bf16_centres_learn_as_float32_ones_do():
    curves = {}
    for storage in ("float32", "bf16"):
        torch.manual_seed(0)
        backbone = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(backbone.parameters(), lr=0.05, momentum=0.9)
        head = new_head(50, storage=storage, optimizer=RowSGD(momentum=0.9))
        generator = torch.Generator().manual_seed(0)
        prototypes = torch.randn(50, WIDTH, generator=generator)
        curve = []
        for _ in range(150):
            y = torch.randint(50, (32,), generator=generator)
            x = prototypes[y] + 0.3 * torch.randn(32, WIDTH, generator=generator)
            loss = head(backbone(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            head.step(lr=0.02)
            curve.append(loss.item())
        curves[storage] = torch.tensor(curve)
    tail32, tail16 = curves["float32"][-30:].mean(), curves["bf16"][-30:].mean()
    assert tail32 < 0.6 * curves["float32"][:5].mean()
    assert abs(tail16 - tail32) < 0.05 * tail32


def _inspect() -> tuple[Tensor, Tensor, Tensor]:
    head = new_head(13)
    ids, cosines = (found[0, 1:] for found in head.predict(head.centres(torch.tensor([5])), k=7))
    return head.centres(torch.tensor([0, 12, 5])), ids, cosines


@pytest.mark.parametrize("size", [1, 2, 4])
def test_centres_and_nearest_classes_are_known_to_every_rank(run_ranks, size):
    whole = F.normalize(all_centres(new_head(13)))
    cosines = whole @ whole[5]
    cosines[5] = -2
    expected = cosines.topk(6)
    for rows, ids, values in run_ranks(size, _inspect):
        torch.testing.assert_close(F.normalize(rows), whole[[0, 12, 5]])
        assert ids.tolist() == expected.indices.tolist()
        torch.testing.assert_close(values, expected.values)


def test_the_state_dict_carries_the_class_range_and_restores_everything():
    head, other = new_head(13, margin=CurricularFace(scale=16)), new_head(13, margin=CurricularFace(scale=16))
    for x, y in batches(3, 13):
        head(x.requires_grad_(), y).backward()
        head.step(lr=0.1)
    other.load_state_dict(head.state_dict())
    x, y = batches(1, 13)[0]
    assert head.step_count == other.step_count == 3
    assert torch.equal(head(x, y), other(x, y))
    with pytest.raises(UserError, match=r"classes \[0, 13\) of 13.*\[0, 14\) of 14"):
        new_head(14, margin=CurricularFace(scale=16)).set_extra_state(head.get_extra_state())


def _shards(world: None = None) -> tuple[int, dict[str, Tensor]]:
    head = new_head(13, optimizer=RowAdamW(), num_subcentres=2)
    for x, y in batches(3, 13):
        head(my_part(x).clone().requires_grad_(), my_part(y)).backward()
        head.step(lr=0.1)
    return head.classes.start, {name: tensor.clone() for name, tensor in head.rows().items()}


def _load(shards: list[tuple[int, dict[str, Tensor]]]) -> tuple[Tensor, Tensor]:
    head = new_head(13, optimizer=RowAdamW(), num_subcentres=2, seed=99)
    for first_class, tensors in shards:
        head.load_rows(first_class, tensors)
    return all_centres(head), head.rows()["count"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_saved_by_three_ranks_load_on_any_number(run_ranks, size):
    shards = run_ranks(3, _shards)
    saved = torch.cat([tensors["weight"] for _, tensors in shards]).unflatten(0, (13, 2))
    counts = torch.cat([tensors["count"] for _, tensors in shards])
    loaded = run_ranks(size, _load, shards)
    for centres, _ in loaded:
        assert torch.equal(centres, saved)
    assert torch.equal(torch.cat([count for _, count in loaded]), counts)


# ---- bad input --------------------------------------------------------------------------------------------------


def _bad_label() -> tuple[str, bool]:
    head = new_head(13, max_batch=5)
    before = head.store.weight_RD.clone()
    x, y = batches(1, 13, size=6)[0]
    y[4] = 13
    try:
        head(my_part(x, [2, 2, 2]).clone().requires_grad_(), my_part(y, [2, 2, 2]))
    except UserError as error:
        return str(error), torch.equal(before, head.store.weight_RD)
    return "no error", False


def test_a_label_out_of_range_names_rank_position_and_value_on_every_rank(run_ranks):
    for message, unchanged in run_ranks(3, _bad_label):
        assert "Label 13 at position 0 of the batch of rank 2 is outside [0, 13)" in message
        assert unchanged


def _nan() -> str:
    head = new_head(13)
    x, y = batches(1, 13, size=6)[0]
    x[3, 1] = math.nan
    x[4, 0] = math.inf
    try:
        head(my_part(x, [2, 4]).clone().requires_grad_(), my_part(y, [2, 4]))
    except UserError as error:
        return str(error)
    return "no error"


def test_embeddings_that_are_not_finite_name_the_rank_and_the_count_on_every_rank(run_ranks):
    for message in run_ranks(2, _nan):
        assert "2 embedding(s)" in message
        assert "position 1 of rank 1" in message


def _out_of_step() -> str:
    head = new_head(13)
    (x, y), (x2, y2) = batches(2, 13, size=6)
    head(my_part(x).clone().requires_grad_(), my_part(y)).backward()
    if dist.get_rank() == 1:
        head.step(lr=0.1)
    try:
        head(my_part(x2).clone().requires_grad_(), my_part(y2))
    except UserError as error:
        return str(error)
    return "no error"


def test_ranks_that_stepped_unequally_are_told(run_ranks):
    for message in run_ranks(2, _out_of_step):
        assert "Rank 1 is at step 1 of the head while rank 0 is at step 0" in message


def _disagree() -> str:
    try:
        new_head(13, seed=dist.get_rank())
    except UserError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_settings_are_shown_both_sides(run_ranks):
    for message in run_ranks(2, _disagree):
        assert "seed is 0 on rank 0 but 1 on rank 1" in message


def _too_few_classes() -> str:
    try:
        new_head(2)
    except UserError as error:
        return str(error)
    return "no error"


def test_fewer_classes_than_ranks_are_refused(run_ranks):
    for message in run_ranks(3, _too_few_classes):
        assert "2 classes cannot be cut over 3 ranks" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_rate": 1.5}, r"sample_rate is 1.5.*\[0, 1\]"),
        ({"sample_rate": [(5, 0.1)]}, "begins at step 0"),
        ({"kernel": "warp"}, "Unknown kernel 'warp'.*chunked"),
        ({"storage": "int8"}, "storage is 'int8'.*float32"),
        ({"sample_rate": 0.0, "correct_sampling": True}, "correct_sampling is True"),
        ({"sample_positives": True, "correct_sampling": True}, "sample_positives is True"),
        ({"filter_above": 2.0}, "filter_above is 2.0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"gradient_scale": "max"}, "gradient_scale is 'max'"),
    ],
)
def test_settings_out_of_range_say_what_is_allowed(options, message):
    with pytest.raises(UserError, match=message):
        new_head(13, **options)


def test_batches_of_the_wrong_shape_are_refused():
    head = new_head(13, max_batch=4)
    with pytest.raises(UserError, match=r"\(3, 7\).*\(batch, 12\)"):
        head(torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UserError, match="one integer per embedding"):
        head(torch.zeros(3, WIDTH), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UserError, match=r"labels on meta and embeddings on cpu.*labels\.to\(embeddings\.device\)"):
        head(torch.zeros(3, WIDTH), torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(UserError, match="5 images, more than max_batch=4"):
        head(torch.zeros(5, WIDTH), torch.zeros(5, dtype=torch.int64))
