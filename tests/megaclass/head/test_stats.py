"""What a measured step says of itself, against a dense float64 classifier and autograd."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from megaclass import CosFace, PartialFC, RowSGD
from megaclass.head.sampling import is_drawn

WIDTH, NUM_CLASSES, SCALE, MARGIN = 12, 13, 16.0, 0.3


def batch(step: int, size: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
    labels[1] = labels[0]
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=generator), labels


def new_head(**options: Any) -> PartialFC:
    # Clipped and decayed: the gradient's norm is that before either.
    optimizer = RowSGD(weight_decay=0.1, clip_row_norm=1e-3)
    defaults = {"margin": CosFace(scale=SCALE, margin=MARGIN), "optimizer": optimizer, "storage": "float64", "seed": 3}
    return PartialFC(WIDTH, NUM_CLASSES, **{**defaults, **options})


def dense_measures(centres_CMD: Tensor, step: int, rate: float) -> tuple[float, float, float]:
    embeddings_GD, labels_G = batch(step)
    takes_part_C = is_drawn(0, NUM_CLASSES, rate, 3, step, torch.device("cpu"))
    takes_part_C[labels_G] = True
    centres_CMD = centres_CMD.clone().requires_grad_()
    cosines_GCM = torch.einsum("gd,cmd->gcm", F.normalize(embeddings_GD), F.normalize(centres_CMD, dim=2))
    cosines_GC = cosines_GCM.amax(2)
    target_G1 = cosines_GC.gather(1, labels_G[:, None])
    logits_GC = SCALE * cosines_GC.scatter(1, labels_G[:, None], target_G1 - MARGIN)
    F.cross_entropy(logits_GC.masked_fill(~takes_part_C, -torch.inf), labels_G).backward()
    assert centres_CMD.grad is not None
    return target_G1.mean().item(), centres_CMD.grad.norm().item(), takes_part_C.double().mean().item()


def _measured(options: dict[str, Any], num_parts: int, loss_scale: float = 1.0) -> list[tuple[Any, Any]]:
    """(measures, the truth about the same centres) of three steps; the second is not measured."""
    head = new_head(**options)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcome = []
    for step in range(3):
        centres = head.centres(torch.arange(NUM_CLASSES)).reshape(NUM_CLASSES, -1, WIDTH).double()
        truth = dense_measures(centres, step, options.get("sample_rate", 1.0))
        x, y = (tensor.tensor_split(size + 1) for tensor in batch(step))
        # Uneven: the last rank brings two shares.
        x, y = ([*parts[: size - 1], torch.cat(parts[size - 1 :])][rank] for parts in (x, y))
        x = x.to(head.store.work_dtype).requires_grad_()
        if num_parts > 1:
            head.begin_step(y)
        for part_x, part_y in zip(x.tensor_split(num_parts), y.tensor_split(num_parts), strict=True):
            (head(part_x, part_y) * loss_scale).backward()
        measures = head.step(lr=0.5, loss_scale=loss_scale, is_measured=step != 1)
        if step == 1:
            assert measures is None
            continue
        assert measures is not None
        outcome.append(
            ([measures.target_cosine.item(), measures.gradient_norm.item(), measures.sampled_share.item()], truth)
        )
    return outcome


@pytest.mark.parametrize("num_parts", [1, 2], ids=["whole", "accumulated"])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_cosine_norm_and_share_are_those_of_a_dense_classifier_on_any_number_of_ranks(run_ranks, rate, num_parts):
    for size in (1, 2, 3, 4):
        for outcome in run_ranks(size, _measured, {"sample_rate": rate}, num_parts):
            for measures, truth in outcome:
                assert measures == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"num_subcentres": 3, "sample_rate": 0.3}, 1e-10),
        ({"sample_rate": 0.0}, 1e-10),
        ({"kernel": "chunked", "storage": "float32", "sample_rate": 0.3}, 3e-6),
        ({"kernel": "chunked", "storage": "bf16", "sample_rate": 0.3}, 3e-6),
    ],
    ids=["sub-centres", "positives only", "float32", "bf16"],
)
def test_every_kind_of_head_measures_the_same(run_ranks, options, limit):
    for outcome in run_ranks(3, _measured, options, 2, 1024.0):
        for measures, truth in outcome:
            assert measures == pytest.approx(truth, rel=limit)


def test_a_step_that_is_skipped_has_no_measures_and_one_that_has_them_moves_the_same():
    x, y = batch(0)
    heads = [new_head() for _ in range(2)]
    for head, is_measured in zip(heads, (True, False), strict=True):
        head(x.clone().requires_grad_(), y).backward()
        head.step(lr=0.5, is_measured=is_measured)
    assert torch.equal(heads[0].rows()["weight"], heads[1].rows()["weight"])
    heads[0](x.clone().requires_grad_(), y).backward()
    assert heads[0].step(lr=0.5, skip=True, is_measured=True) is None


def _count_collectives(is_measured: bool) -> int:
    head = new_head(max_batch=11)
    x, y = batch(0)
    head(x.clone().requires_grad_(), y).backward()
    with CommDebugMode() as traffic:
        head.step(lr=0.5, is_measured=is_measured)
    return int(traffic.get_total_counts())


def test_measures_cost_one_collective_and_a_step_without_them_none(run_ranks):
    assert run_ranks(2, _count_collectives, True) == [1, 1]
    assert run_ranks(2, _count_collectives, False) == [0, 0]
