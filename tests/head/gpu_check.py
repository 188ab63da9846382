"""Every kernel on a GPU against the float64 reference on the CPU. Run by hand: python tests/head/gpu_check.py

Prints relative errors of loss, embedding gradient, the head's measures and moved centres, and ends with status 1 where one
is too large, where a step made the host wait, or where a fault got through.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from megaclass import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    PartialFC,
    RowAdagrad,
    RowAdamW,
    RowSGD,
    UserError,
)

WIDTH, NUM_CLASSES, BATCH, NUM_STEPS = 512, 3000, 192, 3
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
}
# Relative; the products of bfloat16 numbers, and their exponentials kept as such, are good for 2e-3.
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


def train(device: str, dtype: torch.dtype, waits: bool, **options: Any) -> list[Tensor]:
    head = PartialFC(WIDTH, NUM_CLASSES, seed=3, max_batch=BATCH + 8, device=device, **{"margin": ArcFace(), **options})
    before = head.centres(torch.arange(NUM_CLASSES)).double().cpu()
    outcome: list[Tensor] = []
    for x, y in batches(dtype):
        leaf = x.to(device, torch.float64 if head.store.work_dtype == torch.float64 else dtype).requires_grad_()
        y = y.to(device)
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        loss = head(leaf, y)
        loss.backward()
        measures = head.step(lr=1e-4 if isinstance(head.optimizer, RowAdamW) else 1.0, is_measured=True)
        torch.cuda.set_sync_debug_mode("default")
        assert leaf.grad is not None and measures is not None
        measured = torch.stack([measures.target_cosine, measures.gradient_norm, measures.sampled_share])
        outcome += [loss.detach().double().cpu(), leaf.grad.double().cpu(), measured.cpu()]
    head.check()
    return [*outcome, head.centres(torch.arange(NUM_CLASSES)).double().cpu() - before]


def compare(name: str, kernel: str, dtype: torch.dtype, options: dict[str, Any], truth: list[Tensor]) -> bool:
    for waits in (True, False):  # the first run compiles, and may wait
        ours = train("cuda", dtype, waits, kernel=kernel, **options)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]
    # The cosine and the share by themselves: one may be near 0, and neither is to hide behind the norm.
    measures = [
        float(((a - b).abs() / b.abs().clamp_min(1)).max()) for a, b in zip(ours[2:-1:3], truth[2:-1:3], strict=True)
    ]
    worst = max(errors[:-1:3]), max(errors[1:-1:3]), max(measures), errors[-1]
    limits = list(LIMITS[dtype])
    if isinstance(options.get("optimizer"), RowAdamW):
        limits[3] = 0.1  # its first steps are the gradient's signs, which rounding flips where it is near 0
    is_good = all(error <= limit for error, limit in zip(worst, limits, strict=True))
    numbers = "  ".join(f"{error:.1e}" for error in worst)
    print(f"{'ok ' if is_good else 'BAD'} {kernel:12} {str(dtype)[6:]:9} {name:22} {numbers}", flush=True)
    return is_good


def check_measuring_moves_the_same(kernel: str) -> bool:
    """Another program runs where the gradient's norm is asked for; it must move the rows to the same bits.

    `chunked` adds up the pulls by atomics, in any order: two steps of it are alike to rounding only.
    """
    rows = []
    for is_measured in (False, True):
        head = PartialFC(WIDTH, NUM_CLASSES, max_batch=BATCH, device="cuda", kernel=kernel, sample_rate=0.3)
        x, y = batches(torch.bfloat16)[0]
        head(x.cuda().requires_grad_(), y.cuda()).backward()
        head.step(lr=1.0, is_measured=is_measured)
        rows.append(head.rows()["weight"].clone())
    tolerance = 0.0 if kernel == "triton_fused" else 1e-5
    is_good = torch.allclose(*rows, rtol=0, atol=tolerance * float(rows[0].abs().max()))
    print(f"{'ok ' if is_good else 'BAD'} {kernel:12} a measured step moves the same", flush=True)
    return is_good


def check_skip_and_faults(kernel: str) -> bool:
    head = PartialFC(WIDTH, NUM_CLASSES, max_batch=BATCH, device="cuda", kernel=kernel, sample_rate=0.3)
    (x, y), (x2, y2), _ = ((x.cuda(), y.cuda()) for x, y in batches(torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in head.rows().items()}

    def is_unmoved() -> bool:
        return all(torch.equal(before[name], tensor) for name, tensor in head.rows().items())

    for skip in (True, torch.tensor(True, device="cuda"), torch.tensor(1.0, device="cuda")):
        head(x.clone().requires_grad_(), y).backward()
        head.step(lr=0.1, skip=skip)
    is_good = is_unmoved()
    y2[5] = NUM_CLASSES
    head(x2.clone().requires_grad_(), y2).backward()
    head.step(lr=0.1)
    head(x.clone().requires_grad_(), y).backward()  # a good batch after the bad one: the fault still holds
    head.step(lr=0.1)
    is_good &= is_unmoved() and bool(head.found_inf)
    try:
        head.check()
        is_good = False
    except UserError as error:
        is_good &= f"Label {NUM_CLASSES} at position 5" in str(error) and "of step 3, counted from 0" in str(error)
    head(x.clone().requires_grad_(), y).backward()
    head.step(lr=0.1)
    is_good &= not is_unmoved()
    print(f"{'ok ' if is_good else 'BAD'} {kernel:12} skipped and faulty steps move nothing", flush=True)
    return is_good


def check_moving() -> bool:
    """A head built on the CPU and moved trains on as one built on the GPU, and back again."""
    options: dict[str, Any] = {"seed": 3, "max_batch": BATCH + 8, "margin": CurricularFace()}
    moved, built = (
        PartialFC(WIDTH, NUM_CLASSES, device="cpu", **options),
        PartialFC(WIDTH, NUM_CLASSES, device="cuda", **options),
    )
    built.load_state_dict(moved.state_dict())
    moved.to("cuda")
    is_good = moved.kernel is built.kernel and moved.device.type == "cuda"
    for x, y in batches(torch.bfloat16):
        for head in (moved, built):
            head(x.cuda().requires_grad_(), y.cuda()).backward()
            head.step(lr=1.0)
    is_good &= torch.equal(moved.rows()["weight"], built.rows()["weight"])
    before = moved.rows()["weight"].cpu()
    moved.cpu()
    is_good &= torch.equal(moved.rows()["weight"], before)
    x, y = batches(torch.float32)[0]
    is_good &= bool(moved(x, y).isfinite())
    # One rank may write to its own rows, and the next forward uses them.
    built.rows()["weight"].normal_()
    is_good &= bool(built(x.cuda(), y.cuda()).isfinite())
    built.check()
    print(f"{'ok ' if is_good else 'BAD'} moved from the CPU to the GPU and back", flush=True)
    return is_good


def main() -> int:
    warnings.simplefilter("ignore")
    print("relative errors: loss, embedding gradient, measures, movement of the centres")
    results = []
    for name, options in CASES.items():
        for dtype in LIMITS:
            if dtype != torch.bfloat16 and name not in ("arcface", "sampled", "sub-centres", "curricular"):
                continue
            truth = train("cpu", dtype, True, kernel="reference", **{**options, "storage": "float64"})
            results += [compare(name, kernel, dtype, options, truth) for kernel in ("chunked", "triton_fused")]
    results += [check_skip_and_faults(kernel) for kernel in ("chunked", "triton_fused")]
    results += [check_measuring_moves_the_same(kernel) for kernel in ("chunked", "triton_fused")]
    results.append(check_moving())
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
