"""Every kernel on a GPU against a float64 head on the CPU. Run with `make test-gpu`."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megaclass import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    NormalisedSoftmax,
    PartialFC,
    RowAdagrad,
    RowAdamW,
    RowSGD,
    UserError,
)

fused = pytest.importorskip("megaclass.head.gpu.kernel", reason="Triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]

WIDTH, NUM_CLASSES, BATCH, NUM_STEPS = 512, 3000, 192, 3
KERNELS = ("chunked", "triton_fused")
CASES: dict[str, dict[str, Any]] = {
    "arcface": {},
    "straight-through": {"margin": ArcFace(gradient="straight-through")},
    "combined, straight-through": {
        "margin": CombinedMargin(multiplier=1.35, angle=0.2, cosine=0.1, gradient="straight-through")
    },
    "sampled": {"sample_rate": 0.3},
    "sampled, corrected": {"sample_rate": 0.3, "correct_sampling": True},
    "positives only": {"sample_rate": 0.0},
    "adamw": {"optimizer": RowAdamW(), "sample_rate": 0.3},
    "adagrad, clipped": {"optimizer": RowAdagrad(weight_decay=1e-3, clip_row_norm=0.01)},
    "nesterov, recompute": {"optimizer": RowSGD(nesterov=True, clip_value=1e-3), "stored_bytes": 0},
    "sub-centres": {"num_subcentres": 3, "sample_rate": 0.3},
    "filtered": {"filter_above": 0.05},
    "curricular": {"margin": CurricularFace()},
    "adaface": {"margin": AdaFace(), "sample_rate": 0.3},
    "cosface, scale 100": {"margin": CosFace(scale=100.0)},
    "several labels": {"max_labels": 4},
    "several labels, sampled": {"max_labels": 4, "sample_rate": 0.3},
    "inner products": {"similarity": "inner", "bias": True, "margin": NormalisedSoftmax(scale=1.0)},
    "in-batch": {"sample_rate": 0.3, "negatives": "in-batch", "class_counts": torch.arange(1.0, NUM_CLASSES + 1)},
}
IN_EVERY_DTYPE = ("arcface", "sampled", "sub-centres", "curricular")
# Relative errors of loss, embedding gradient, step statistics and movement of the centres. Products of bfloat16 numbers,
# and their exponentials stored as bfloat16, have a relative error of about 2e-3.
LIMITS = {
    torch.float32: (1e-5, 1e-4, 1e-5, 1e-4),
    torch.float16: (1e-4, 1e-2, 1e-3, 2e-2),
    torch.bfloat16: (3e-4, 2e-2, 5e-3, 2e-2),
}


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(NUM_STEPS):
        labels_B = torch.randint(NUM_CLASSES, (BATCH,), generator=generator)
        labels_B[1] = labels_B[0]
        result.append((torch.randn(BATCH, WIDTH, generator=generator).to(dtype), labels_B))
    return result


@contextmanager
def host_must_not_wait(is_checked: bool) -> Iterator[None]:
    """Makes torch raise when something within synchronises the device with the host."""
    torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(device: str, dtype: torch.dtype, *, may_wait: bool, **options: Any) -> list[Tensor]:
    """Loss, embedding gradient and statistics of each step, and then how far the centres moved."""
    head = PartialFC(WIDTH, NUM_CLASSES, seed=3, max_batch=BATCH + 8, device=device, **{"margin": ArcFace(), **options})
    before = head.centres(torch.arange(NUM_CLASSES)).double().cpu()
    outcome: list[Tensor] = []
    for number, (x, y) in enumerate(batches(dtype)):
        leaf = x.to(device, torch.float64 if head.store.work_dtype == torch.float64 else dtype).requires_grad_()
        y = y.to(device)
        if head.settings.max_labels > 1:
            y = (y[:, None] + 700 * torch.arange(4, device=device)) % NUM_CLASSES
        # Once per head, in its first step, the host asks whether the loss carries a loss scale that nobody told the head.
        with host_must_not_wait(not may_wait and number > 0):
            loss = head(leaf, y)
            loss.backward()
            measures = head.step(lr=1e-4 if isinstance(head.optimizer, RowAdamW) else 1.0, is_measured=True)
        assert leaf.grad is not None and measures is not None
        measured = torch.stack([measures.target_cosine, measures.gradient_norm, measures.sampled_share])
        outcome += [loss.detach().double().cpu(), leaf.grad.double().cpu(), measured.cpu()]
    head.check()
    return [*outcome, head.centres(torch.arange(NUM_CLASSES)).double().cpu() - before]


@functools.cache
def truth(case: str, dtype: torch.dtype) -> list[Tensor]:
    return train("cpu", dtype, may_wait=True, kernel="chunked", **{**CASES[case], "storage": "float64"})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case}-{str(dtype)[6:]}")
        for case in CASES
        for dtype in LIMITS
        if dtype == torch.bfloat16 or case in IN_EVERY_DTYPE
    ],
)
def test_a_kernel_agrees_with_the_float64_head_and_never_waits(
    case: str, dtype: torch.dtype, kernel: str, record_property: Any
) -> None:
    expected = truth(case, dtype)
    for may_wait in (True, False):  # the first run compiles the programs, and may wait
        ours = train("cuda", dtype, may_wait=may_wait, kernel=kernel, **CASES[case])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True)]
    # Each statistic is compared separately: one may be near 0, and none may hide behind the norm of all three.
    statistics = [
        float(((a - b).abs() / b.abs().clamp_min(1)).max()) for a, b in zip(ours[2:-1:3], expected[2:-1:3], strict=True)
    ]
    worst = max(errors[:-1:3]), max(errors[1:-1:3]), max(statistics), errors[-1]
    limits = list(LIMITS[dtype])
    if isinstance(CASES[case].get("optimizer"), RowAdamW):
        limits[3] = 0.1  # its first steps are the signs of the gradient, which rounding flips where it is near 0
    print(f"{kernel:12} {str(dtype)[6:]:9} {case:26} {'  '.join(f'{error:.1e}' for error in worst)}")
    record_property("errors", worst)
    assert all(error <= limit for error, limit in zip(worst, limits, strict=True)), (worst, limits)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_measured_step_moves_the_rows_as_an_unmeasured_one(kernel: str) -> None:
    """Where the gradient's norm is asked for another program runs; it must move the rows to the same bits.

    `chunked` adds up the pulls with atomics, in any order: two of its steps are equal up to rounding only.
    """
    rows = []
    for is_measured in (False, True):
        head = PartialFC(WIDTH, NUM_CLASSES, max_batch=BATCH, device="cuda", kernel=kernel, sample_rate=0.3)
        x, y = batches(torch.bfloat16)[0]
        head(x.cuda().requires_grad_(), y.cuda()).backward()
        head.step(lr=1.0, is_measured=is_measured)
        rows.append(head.rows()["weight"].clone())
    tolerance = 0.0 if kernel == "triton_fused" else 1e-5
    torch.testing.assert_close(*rows, rtol=0, atol=tolerance * float(rows[0].abs().max()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_skipped_and_faulty_steps_move_nothing(kernel: str) -> None:
    head = PartialFC(WIDTH, NUM_CLASSES, max_batch=BATCH, device="cuda", kernel=kernel, sample_rate=0.3)
    (x, y), (x2, y2), _ = ((x.cuda(), y.cuda()) for x, y in batches(torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in head.rows().items()}

    def is_unmoved() -> bool:
        return all(torch.equal(before[name], tensor) for name, tensor in head.rows().items())

    for skip in (True, torch.tensor(True, device="cuda"), torch.tensor(1.0, device="cuda")):
        head(x.clone().requires_grad_(), y).backward()
        head.step(lr=0.1, skip=skip)
        assert is_unmoved()
    y2[5] = NUM_CLASSES
    head(x2.clone().requires_grad_(), y2).backward()
    head.step(lr=0.1)
    head(x.clone().requires_grad_(), y).backward()  # a good batch after the bad one: the fault still holds
    head.step(lr=0.1)
    assert is_unmoved() and bool(head.found_inf)
    with pytest.raises(UserError) as error:
        head.check()
    assert f"Label {NUM_CLASSES} at position 5" in str(error.value) and "of step 3, counted from 0" in str(error.value)
    head(x.clone().requires_grad_(), y).backward()
    head.step(lr=0.1)
    assert not is_unmoved()


def test_a_head_built_on_the_cpu_and_moved_trains_as_one_built_on_the_gpu() -> None:
    options: dict[str, Any] = {"seed": 3, "max_batch": BATCH + 8, "margin": CurricularFace()}
    moved = PartialFC(WIDTH, NUM_CLASSES, device="cpu", **options)
    built = PartialFC(WIDTH, NUM_CLASSES, device="cuda", **options)
    built.load_state_dict(moved.state_dict())
    moved.to("cuda")
    assert moved.kernel is built.kernel and moved.device.type == "cuda"
    for x, y in batches(torch.bfloat16):
        for head in (moved, built):
            head(x.cuda().requires_grad_(), y.cuda()).backward()
            head.step(lr=1.0)
    assert torch.equal(moved.rows()["weight"], built.rows()["weight"])
    before = moved.rows()["weight"].cpu()
    moved.cpu()
    assert torch.equal(moved.rows()["weight"], before)
    x, y = batches(torch.float32)[0]
    assert moved(x, y).isfinite()


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_rank_may_write_to_its_own_rows(kernel: str) -> None:
    head = PartialFC(WIDTH, NUM_CLASSES, max_batch=BATCH, device="cuda", kernel=kernel)
    x, y = batches(torch.float32)[0]
    head(x.cuda(), y.cuda())
    head.rows()["weight"].normal_()
    assert head(x.cuda(), y.cuda()).isfinite()
    head.check()


@pytest.mark.parametrize("optimizer", [RowSGD(), RowAdamW(), RowAdagrad()], ids=["sgd", "adamw", "adagrad"])
def test_steps_give_the_same_bits_every_time(optimizer: Any) -> None:
    """Programs that read a number of their row and write it again must not let one warp see what another has written."""
    outcomes = []
    for _ in range(8):
        head = PartialFC(
            WIDTH, 20 * NUM_CLASSES, max_batch=BATCH, device="cuda", kernel="triton_fused", seed=1, optimizer=optimizer
        )
        for x, y in batches(torch.bfloat16):
            head(x.cuda().requires_grad_(), y.cuda()).backward()
            head.step(lr=0.01)
        outcomes.append({name: tensor.clone() for name, tensor in head.rows().items()})
    for outcome in outcomes[1:]:
        for name, tensor in outcome.items():
            assert torch.equal(tensor, outcomes[0][name]), name
