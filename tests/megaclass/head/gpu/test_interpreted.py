"""`triton_fused` and the programs around it, run by Triton's interpreter on the CPU, against a float64 head.

tests/megaclass/test_triton_interpreter.py starts these tests.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.triton_interpreter import IS_INTERPRETED, interpreted, outside
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")


WIDTH = 24
# Three tiles of classes, the last one in part. The interpreter's time grows with the number of tiles, and of images.
NUM_CLASSES = 70
NUM_IMAGES = 5


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles and chunks so small that tiny problems have several of each; every other test with descriptors."""
    if IS_INTERPRETED:
        from megaclass.head.gpu import kernel as triton_fused
        from megaclass.head.gpu import tiling

        tiles = tiling.Tiles(16, 32, 16, warps=4, stages=2, parts=2)
        monkeypatch.setattr(triton_fused, "FLOAT32_TILES", tiles)
        monkeypatch.setattr(triton_fused, "SUBCENTRE_TILES", tiling.Tiles(16, 32, 16, warps=4, stages=2))
        monkeypatch.setattr(triton_fused, "tiles_for", _tiny(triton_fused, tiles))
        monkeypatch.setattr(tiling, "_CHUNK_BYTES", 1 << 11)
        monkeypatch.setattr(triton_fused, "GRADIENT_BYTES", 1 << 14)
        capability = (9, 0) if len(request.node.name) % 2 else (8, 0)
        monkeypatch.setattr(triton_fused, "_device_facts", lambda device: (capability, 3))
    yield


def _tiny(triton_fused: Any, tiles: Any) -> Any:
    def tiles_for(capability: Any, dtype: Any, num_subcentres: int, **_: Any) -> Any:
        return tiles if num_subcentres == 1 else triton_fused.SUBCENTRE_TILES

    return tiles_for


def batches(num_steps: int, num_classes: int, size: int = NUM_IMAGES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(num_steps):
        y = torch.randint(num_classes, (size,), generator=generator)
        y[1] = y[0]  # two images of one class pull the same row
        result.append((torch.randn(size, WIDTH, dtype=torch.float64, generator=generator), y))
    return result


def new_head(kernel: str, num_classes: int = NUM_CLASSES, **options: Any) -> Any:
    from megaclass import ArcFace, PartialFC, RowSGD

    storage = options.pop("storage", "float64" if kernel == "chunked" else "float32")
    defaults = {
        "margin": ArcFace(scale=16, margin=0.4),
        "optimizer": RowSGD(weight_decay=5e-4),
        "max_batch": NUM_IMAGES + 2,
    }
    return PartialFC(WIDTH, num_classes, kernel=kernel, storage=storage, seed=3, **{**defaults, **options})


def train(head: Any, dtype: torch.dtype, num_steps: int = 2) -> list[Tensor]:
    """Losses, embedding gradients, and at last the centres."""
    outcome = []
    for x, y in batches(num_steps, head.num_classes):
        leaf = x.to(dtype).requires_grad_()
        settings, weights = head.settings, None
        if settings.max_labels > 1:
            # Two labels, or one: the last image's second one is padding.
            y = torch.stack([y, (y + 7) % head.num_classes], 1)
            y[-1, 1] = -1
        if settings.is_weighted:
            weights = torch.linspace(0.5, 2.0, y.numel()).double().view(y.shape)
        loss = head(leaf, y, weights)
        loss.backward()
        head.step(lr=0.05)
        outcome += [loss.detach().double(), leaf.grad.double()]
    return [*outcome, head.centres(torch.arange(head.num_classes)).double()]


def assert_close(ours: list[Tensor], truth: list[Tensor], limit: float) -> None:
    for a, b in zip(ours, truth, strict=True):
        assert (a - b).norm() <= limit * b.norm()


def _margins() -> dict[str, Any]:
    import megaclass as m

    class TargetOnly(m.Margin):
        """A user's own: touches only the target."""

        scale = 16.0

        def target_logits(self, targets: Any) -> Tensor:
            return self.scale * (targets.cosines_G - 0.1 * targets.cosines_G**2)

    return {
        "arcface": m.ArcFace(scale=16),
        "straight-through": m.ArcFace(scale=16, gradient="straight-through"),
        "wide angle": m.ArcFace(scale=16, margin=1.5),
        "wide angle, straight-through": m.ArcFace(scale=16, margin=1.5, gradient="straight-through"),
        "cosface": m.CosFace(scale=16),
        "softmax": m.NormalisedSoftmax(scale=16),
        "combined": m.CombinedMargin(scale=16, angle=0.3, cosine=0.2),
        "combined, straight-through": m.CombinedMargin(
            scale=16, multiplier=1.35, angle=0.2, cosine=0.1, gradient="straight-through"
        ),
        "adaface": m.AdaFace(scale=16),
        "magface": m.MagFace(scale=16),
        "curricular": m.CurricularFace(scale=16),
        "curricular, shifted": m.CurricularFace(scale=64),
        "elastic": m.ElasticFace(scale=16),
        "shifted": m.CosFace(scale=100),
        "user's own": TargetOnly(),
    }


MARGINS = [
    "arcface", "straight-through", "wide angle", "wide angle, straight-through", "cosface", "softmax", "combined",
    "combined, straight-through", "adaface", "magface", "curricular", "curricular, shifted", "elastic", "shifted", "user's own",
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", MARGINS)
def test_every_margin_trains_as_a_float64_head_does(name):
    options = {"margin": _margins()[name], "sample_rate": 0.5}
    # Two steps where the margin of the second depends on the first.
    num_steps = 2 if name in ("adaface", "curricular", "curricular, shifted") else 1
    truth = train(new_head("chunked", **options), torch.float64, num_steps)
    assert_close(train(new_head("triton_fused", **options), torch.float32, num_steps), truth, 3e-6)


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        "all classes",
        "a third",
        "positives only",
        "positives counted",
        "corrected",
        "filtered",
        "sub-centres",
        "recompute",
        "some stored",
        "margin schedule",
        "dynamic margins",
        "several labels",
        "several labels, some drawn",
        "several labels, sub-centres, weights",
        "several labels, recompute",
        "decoupled",
        "weighted",
        "weighted, a third",
        "adaface, several labels",
        "inner products",
        "inner products, in-batch, several labels",
        "by frequency",
        "in-batch",
    ],
)
def test_every_option_trains_as_a_float64_head_does(name):
    from megaclass import AdaFace, DynamicArcFace, NormalisedSoftmax

    counts = torch.arange(1, NUM_CLASSES + 1)
    inner = {"similarity": "inner", "bias": True, "margin": NormalisedSoftmax(scale=8.0)}
    in_batch = {"sample_rate": 0.3, "negatives": "in-batch", "class_counts": counts}
    options: dict[str, Any] = {
        "all classes": {},
        "a third": {"sample_rate": 0.3},
        "positives only": {"sample_rate": 0.0},
        "positives counted": {"sample_rate": 0.5, "sample_positives": True},
        "corrected": {"sample_rate": 0.3, "correct_sampling": True},
        "filtered": {"filter_above": 0.1, "sample_rate": 0.5},
        "sub-centres": {"num_subcentres": 3, "sample_rate": 0.5},
        "recompute": {"stored_bytes": 0},
        "some stored": {"num_classes": 100, "stored_bytes": 2000},  # one chunk of two
        "margin schedule": {"margin_schedule": [(0, 0.0), (2, 1.0)]},
        "dynamic margins": {"margin": DynamicArcFace(scale=16), "class_counts": counts},
        "several labels": {"max_labels": 2},
        "several labels, some drawn": {"max_labels": 3, "sample_rate": 0.4},
        "several labels, sub-centres, weights": {"max_labels": 2, "num_subcentres": 2, "weighted": True},
        "several labels, recompute": {"max_labels": 2, "stored_bytes": 0, "num_classes": 100},
        "decoupled": {"max_labels": 2, "loss": "decoupled", "sample_rate": 0.5, "correct_sampling": True},
        "weighted": {"weighted": True},
        "weighted, a third": {"weighted": True, "sample_rate": 0.3},
        "adaface, several labels": {"max_labels": 2, "margin": AdaFace(scale=16)},
        "inner products": inner,
        "inner products, in-batch, several labels": {**inner, **in_batch, "max_labels": 2},
        "by frequency": {"sample_rate": 0.3, "negatives": "frequencies", "class_counts": counts},
        "in-batch": in_batch,
    }[name]
    truth = train(new_head("chunked", **options), torch.float64)
    assert_close(train(new_head("triton_fused", **options), torch.float32), truth, 3e-6)


@interpreted
@pytest.mark.parametrize("options", [{}, {"weighted": True}], ids=["plain", "weighted"])
def test_a_step_without_images_moves_nothing(options):
    head = new_head("triton_fused", max_batch=None, sample_rate=0.0, **options)
    before = head.rows()["weight"].clone()
    loss = head(torch.zeros(0, WIDTH, requires_grad=True), torch.zeros(0, dtype=torch.int64))
    loss.backward()
    head.step(lr=0.1)
    assert loss == 0 and torch.equal(head.rows()["weight"], before)


@interpreted
def test_labels_that_outweigh_all_negatives_take_none_of_their_sum_away():
    """Subtracting exp(45) from the sum would leave nothing of the negatives."""
    losses, gradients = [], []
    for kernel, dtype in (("chunked", torch.float64), ("triton_fused", torch.float32)):
        head = new_head(kernel, max_labels=2, margin="cosface")
        x = torch.nn.functional.normalize(new_head("chunked").centres(torch.tensor([3, 40])), dim=1).sum(
            0, keepdim=True
        )
        leaf = x.to(dtype).requires_grad_()
        loss = head(leaf, torch.tensor([[3, 40]]))
        loss.backward()
        losses.append(loss.item())
        gradients.append(leaf.grad.double())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_close(gradients[1:], gradients[:1], 1e-4)


@interpreted
@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"max_labels": 2, "filter_above": 0.5}, "it takes filter_above with one label per image only"),
        ({"loss": "sigmoid", "margin": "arcface"}, "it does not know the loss sigmoid"),
        ({"label_smoothing": 0.1}, "it does not know label_smoothing"),
    ],
)
def test_variants_that_the_programs_do_not_know_are_named(options, obstacle):
    from megaclass import UserError

    with pytest.raises(UserError, match=f"cannot run here: {obstacle}.*Use kernel='auto'"):
        new_head("triton_fused", **options)


@interpreted
@pytest.mark.parametrize("name", ["plain sgd", "nesterov, clipped", "adamw", "adagrad, clipped rows"])
def test_every_optimizer_moves_the_rows_as_a_float64_head_does(name):
    from megaclass import RowAdagrad, RowAdamW, RowSGD

    optimizer = {
        "plain sgd": RowSGD(momentum=0.0),
        "nesterov, clipped": RowSGD(nesterov=True, clip_value=0.1, weight_decay=1e-3),
        "adamw": RowAdamW(),
        "adagrad, clipped rows": RowAdagrad(weight_decay=1e-3, clip_row_norm=0.2),
    }[name]
    options = {"optimizer": optimizer, "sample_rate": 0.3, "num_subcentres": 2}
    exact, fused = new_head("chunked", **options), new_head("triton_fused", **options)
    untouched = fused.rows()["weight"].clone()
    truth = train(exact, torch.float64)
    assert_close(train(fused, torch.float32), truth, 3e-5)
    still = (exact.rows()["weight"] == new_head("chunked", **options).rows()["weight"]).all(1)
    assert still.any() and torch.equal(fused.rows()["weight"][still], untouched[still])


@interpreted
def test_float16_embeddings_lose_what_float16_loses():
    truth = train(new_head("chunked"), torch.float64)
    assert_close(train(new_head("triton_fused"), torch.float16), truth, 2e-2)


@interpreted
@pytest.mark.parametrize("storage", ["bf16"])
def test_stochastic_rounding_is_keyed_as_in_plain_pytorch(storage):
    heads = [new_head(kernel, storage=storage, sample_rate=0.5) for kernel in ("chunked", "triton_fused")]
    for head in heads:
        train(head, torch.float32, num_steps=2)
    for name in ("weight", "momentum"):
        plain, fused = (head.rows()[name].float() for head in heads)
        # The same bits decide; only if the last digit of the float32 result differs can the rounding.
        assert (plain != fused).float().mean() < 0.01
        torch.testing.assert_close(fused, plain, rtol=2**-7, atol=1e-6)


@interpreted
def test_drawn_classes_are_those_of_plain_pytorch():
    from megaclass.head.gpu import rows as fused_rows
    from megaclass.head.sampling import rate_of_negatives, sample_classes

    labels = torch.tensor([5, 9_999, 30_000, -1, 12_345, 12_345])
    counted = rate_of_negatives(labels, 10_005, 0.1)
    for rate, capacity in ((0.0, 8), (0.1, 1300), (0.9, 9500), (counted, 1300), (torch.zeros_like(counted), 8)):
        truth = sample_classes(labels, 5, 10_000, rate, seed=7, step=3)
        drawn = fused_rows.draw(labels, range(5, 10_005), rate, 7, torch.tensor([3]), capacity, 10.0)
        classes, weights, count = drawn.classes_S, drawn.class_weight_S, len(truth.classes_S)
        assert int(drawn.num_drawn) == count and not drawn.overflowed
        assert torch.equal(classes[:count], truth.classes_S) and (classes[count:] == 10_000).all()
        assert weights is not None and (weights[count:] == 0).all()
        assert torch.equal(weights[:count], torch.where(truth.is_positive_S, 1.0, 10.0))
    assert fused_rows.draw(labels, range(5, 10_005), 0.1, 7, torch.tensor([3]), 500, 1.0).overflowed == 1


@interpreted
@pytest.mark.parametrize("num_images", [1, 300, 40_000])
def test_the_images_of_a_row_are_listed_in_the_order_of_the_batch(num_images):
    """The largest batch takes a second; comparing all pairs of its images took minutes."""
    from megaclass.head.gpu import rows as fused_rows

    generator = torch.Generator().manual_seed(num_images)
    slots = torch.randint(-1, 200, (num_images,), generator=generator)
    rows = torch.randint(0, 1000, (num_images,), generator=generator)
    pulls = fused_rows.link_pulls(slots, rows, torch.zeros(num_images, 1), torch.zeros(num_images), 600, 3)
    truth: dict[int, list[int]] = {}
    for image, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
        if slot >= 0:
            truth.setdefault(slot * 3 + row % 3, []).append(image)
    heads, links = pulls.heads_R.tolist(), pulls.links_P.tolist()
    for row, head in enumerate(heads):
        listed = []
        while head:
            listed.append(head - 1)
            head = links[head - 1]
        assert listed == truth.get(row, [])


@interpreted
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_accumulated_parts_give_what_one_big_batch_gives(rate):
    outcomes = []
    for num_parts in (1, 3):
        head = new_head("triton_fused", sample_rate=rate)
        x, y = batches(1, NUM_CLASSES)[0]
        x = x.float().requires_grad_()
        head.begin_step(y)
        for part_x, part_y in zip(x.tensor_split(num_parts), y.tensor_split(num_parts), strict=True):
            head(part_x, part_y).backward()
        head.step(lr=0.05)
        outcomes.append([x.grad.double(), head.rows()["weight"].double()])
    assert_close(outcomes[1], outcomes[0], 3e-6)


def new_head_on_ranks(kernel: str, options: dict[str, Any]) -> Any:
    """A head of 13 classes, with room for one image more than a rank gets."""
    import torch.distributed as dist

    return new_head(kernel, 13, **{"max_batch": -(-NUM_IMAGES // dist.get_world_size()) + 1, **options})


def _numbers(measures: Any) -> list[float]:
    return [float(getattr(measures, name)) for name in type(measures).__slots__]


def _train_on_ranks(kernel: str, options: dict[str, Any]) -> tuple[list[float], list[Tensor], Tensor]:
    """Losses of two steps and the measures of the second; gradients of the images; centres."""
    import torch.distributed as dist

    head = new_head_on_ranks(kernel, options)
    rank, size = dist.get_rank(), dist.get_world_size()
    edges = [round(NUM_IMAGES * (r / size) ** 1.3) for r in range(size + 1)]  # uneven
    numbers, grads = [], []
    for step, (x, y) in enumerate(batches(2, 13)):
        leaf = x[edges[rank] : edges[rank + 1]].to(head.store.work_dtype).requires_grad_()
        loss = head(leaf, y[edges[rank] : edges[rank + 1]])
        loss.backward()
        measures = head.step(lr=0.05, is_measured=step == 1)
        numbers += [loss.item(), *(_numbers(measures) if step == 1 else [])]
        grads.append(leaf.grad.double() / size)
    return numbers, grads, head.centres(torch.arange(13)).double()


@interpreted
@pytest.mark.parametrize("name", ["all classes", "half", "curricular, sizes unknown", "sub-centres", "inner products"])
def test_the_same_model_and_measures_on_any_number_of_ranks(run_ranks, name):
    """The measures of a float64 head are compared with a dense classifier in head/test_stats.py, for each number of ranks."""
    from megaclass import CurricularFace, NormalisedSoftmax

    options: dict[str, Any] = {
        "all classes": {},
        "half": {"sample_rate": 0.5},
        "curricular, sizes unknown": {"margin": CurricularFace(scale=16), "max_batch": None, "sample_rate": 0.5},
        "sub-centres": {"num_subcentres": 2},
        "inner products": {"similarity": "inner", "margin": NormalisedSoftmax(scale=8.0), "max_labels": 2},
    }[name]
    ((numbers, grads, centres),) = run_ranks(1, _train_on_ranks, "chunked", options)
    for size in (1, 3) if name == "half" else (3,):
        outcomes = run_ranks(size, _train_on_ranks, "triton_fused", options)
        for other_numbers, _, other_centres in outcomes:
            assert other_numbers == pytest.approx(numbers, rel=1e-5)
            assert_close([other_centres], [centres], 1e-5)
        whole = [torch.cat([grads[step] for _, grads, _ in outcomes]) for step in range(2)]
        assert_close(whole, grads, 1e-5)


def _measure_on_ranks(kernel: str, options: dict[str, Any], num_parts: int) -> list[list[float]]:
    import torch.distributed as dist

    head = new_head_on_ranks(kernel, options)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcome = []
    for x, y in batches(2, 13):
        leaf, mine = x.tensor_split(size)[rank].to(head.store.work_dtype).requires_grad_(), y.tensor_split(size)[rank]
        head.begin_step(mine)
        for part_x, part_y in zip(leaf.tensor_split(num_parts), mine.tensor_split(num_parts), strict=True):
            (head(part_x, part_y) * 8.0).backward()
        outcome.append(_numbers(head.step(lr=0.05, loss_scale=8.0, is_measured=True)))
    return outcome


@interpreted
@pytest.mark.parametrize(("name", "size"), [("all classes", 3), ("half", 2), ("sub-centres", 3)])
def test_the_same_measures_of_accumulated_parts_on_any_number_of_ranks(run_ranks, name, size):
    options = {"all classes": {}, "half": {"sample_rate": 0.5}, "sub-centres": {"num_subcentres": 2}}[name]
    (truth,) = run_ranks(1, _measure_on_ranks, "chunked", options, 1)
    for measures in run_ranks(size, _measure_on_ranks, "triton_fused", options, 2):
        for ours, true in zip(measures, truth, strict=True):
            assert ours == pytest.approx(true, rel=1e-5)


@interpreted
@pytest.mark.parametrize("bad", ["label", "nan", "infinite"])
def test_a_faulty_batch_moves_nothing_and_is_named(bad):
    from megaclass import UserError

    head = new_head("triton_fused", sample_rate=0.5)
    before = {name: tensor.clone() for name, tensor in head.rows().items()}
    x, y = batches(1, NUM_CLASSES)[0]
    expected = f"Label {NUM_CLASSES} at position 4 of the batch of rank 0"
    if bad == "label":
        y[4] = NUM_CLASSES
    else:
        x[2:4, 1] = math.nan if bad == "nan" else math.inf
        expected = "2 embedding.s. of the global batch are NaN or infinite, the first at position 2 of rank 0"
    # On a CPU a fault is raised at once, as in the plain kernels.
    with pytest.raises(UserError, match=expected):
        head(x.float().requires_grad_(), y)
    assert all(torch.equal(before[name], tensor) for name, tensor in head.rows().items())


@interpreted
@pytest.mark.parametrize("skip", [True, torch.tensor(True), torch.tensor(1.0)])
def test_a_skipped_step_moves_nothing(skip):
    head = new_head("triton_fused", sample_rate=0.5)
    before = {name: tensor.clone() for name, tensor in head.rows().items()}
    x, y = batches(1, NUM_CLASSES)[0]
    head(x.float().requires_grad_(), y).backward()
    head.step(lr=0.1, skip=skip)
    assert all(torch.equal(before[name], tensor) for name, tensor in head.rows().items())


@interpreted
def test_scaled_losses_tensor_rates_and_frozen_embeddings():
    x, y = batches(1, NUM_CLASSES)[0]
    rows = []
    for scale, lr, frozen in ((1.0, 0.1, False), (1024.0, torch.tensor(0.1), True), (torch.tensor(8.0), 0.1, False)):
        head = new_head("triton_fused")
        (head(x.float().requires_grad_(not frozen), y) * scale).backward()
        head.step(lr=lr, loss_scale=scale)
        rows.append(head.rows()["weight"].double())
    assert_close(rows[1:], [rows[0], rows[0]], 1e-6)


@interpreted
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_numbers_and_tensors_give_the_same_bits(optimizer):
    """The device reads both from the same place, and rounds by the number of the step, which changes."""
    heads = [new_head("triton_fused", storage="bf16", sample_rate=0.5, optimizer=optimizer) for _ in range(2)]
    for step, (x, y) in enumerate(batches(3, NUM_CLASSES)):
        lr, scale = 0.05 / (1 + step), 2.0**step
        for head in heads:
            (head(x.float().requires_grad_(), y) * scale).backward()
        heads[0].step(lr=lr, loss_scale=scale)
        skip = torch.tensor(False)
        heads[1].step(lr=torch.tensor(lr, dtype=torch.float64), loss_scale=torch.tensor([scale]), skip=skip)
    for name, tensor in heads[0].rows().items():
        assert torch.equal(tensor, heads[1].rows()[name])


@interpreted
def test_evaluation_and_an_empty_batch_leave_no_trace():
    head = new_head("triton_fused")
    x, y = batches(1, NUM_CLASSES)[0]
    with torch.no_grad():
        head(x.float(), y)
    loss = head(x[:0].float().requires_grad_(), y[:0])
    assert loss == 0
    loss.backward()
    before = head.rows()["weight"].clone()
    head.step(lr=0.0)
    assert torch.equal(head.rows()["weight"], before)


@interpreted
def test_the_fused_kernel_says_why_it_cannot_run():
    from megaclass import CurricularFace, Margin, UserError

    class Steeper(Margin):
        """Touches the negatives in a way no kernel was told about."""

        scale = 16.0
        touches_only_target = False

        def negative_logits(self, cosines_GS: Tensor, targets: Any) -> Tensor:
            return self.scale * cosines_GS**3

    with pytest.raises(UserError, match="Steeper changes the negatives"):
        new_head("triton_fused", margin=Steeper())
    with pytest.raises(UserError, match="logits up to 128"):
        new_head("triton_fused", margin=CurricularFace(scale=100))
    with pytest.raises(UserError, match="storage is 'float64'"):
        new_head("triton_fused", storage="float64")


@outside
def test_without_a_gpu_the_fused_kernel_is_refused_by_name_and_left_out_by_auto():
    from megaclass import UserError
    from megaclass.head import chunked

    with pytest.raises(UserError, match="needs a CUDA GPU, and the head is on cpu"):
        new_head("triton_fused")
    assert new_head("auto").kernel is chunked


def _overwrite(kind: str) -> str:
    import torch.distributed as dist

    from megaclass.errors import HeadError

    head = new_head("triton_fused", 99, max_batch=2)
    x, y = batches(1, 99, size=2)[0]
    head(x.float().requires_grad_(), y).backward()
    head.step(lr=0.05)
    weight = head.rows()["weight"]
    if kind == "broadcast":
        dist.broadcast(weight, 0)
    elif kind == "average":
        dist.all_reduce(weight)
    elif kind == "every rank its own":
        weight.normal_(generator=torch.Generator().manual_seed(dist.get_rank()))
    try:
        head(x.float().requires_grad_(), y).backward()
        head.step(lr=0.05)
        head(x.float(), y)
    except HeadError as error:
        return str(error)
    return "trained"


@interpreted
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("nothing", "trained"),
        ("every rank its own", "trained"),
        ("broadcast", "centres of 2 rank(s), the first of them rank 1, were written to"),
        ("average", "centres of 3 rank(s), the first of them rank 0, were written to"),
    ],
)
def test_a_write_by_something_else_is_raised_on_all_ranks(run_ranks, kind, outcome):
    for message in run_ranks(3, _overwrite, kind):
        assert outcome in message


@outside
def test_numbers_that_stay_the_same_are_written_once(monkeypatch):
    from megaclass.head.gpu.rows import StepNumbers

    numbers = StepNumbers(torch.device("cpu"))
    written: list[Any] = []
    fill = Tensor.fill_
    monkeypatch.setattr(Tensor, "fill_", lambda self, value: written.append(value) or fill(self, value))
    for step, lr in ((0, 0.1), (0, 0.1), (7, 0.1), (7, 0.2)):
        numbers.set_step(step)
        numbers.set_factors(lr, 1.0, None)
    assert written == [0.1, 1.0, 7, 0.2] and numbers.step.item() == 7
    # A tensor's value is not known to the host, so the number after it is written again.
    numbers.set_factors(torch.tensor(0.5, dtype=torch.float64), torch.tensor([4.0]), torch.tensor(True))
    assert numbers.factors.tolist() == [0.5, 4.0, 1.0] and len(written) == 4
    numbers.set_factors(0.2, 4.0, None)
    assert written[4:] == [0.2, 4.0, 0.0]
    numbers.set_step(3)
    assert numbers.step.item() == 3
    assert numbers.factors.tolist() == pytest.approx([0.2, 4.0, 0.0])
