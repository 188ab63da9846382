"""Training with everything that may come between two steps that are replayed as CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaclass.errors import UserError

Batches = Callable[[int], tuple[Tensor, Tensor]]
"""Number of a step -> embeddings and labels, on the head's device."""
NUM_REPLAYED_FORWARDS = 20
"""Of 24 steps all but the first three, those of begin_step() and of frozen embeddings, and one while another forward is
open; and three forwards whose steps are not taken."""
NUM_REPLAYED_UPDATES = 14
"""Without the measured step, the one that the host skips, and the one with two backwards."""


def train_with_interruptions(head: Any, batch_of: Batches) -> list[list[Tensor]]:
    """Returns copies of the loss, the embeddings' gradient and all rows for each of 24 steps."""
    device, outcome = head.device, []
    saved = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    kept: list[Tensor] = []  # a loop may keep its losses, and losses that it never uses
    for number in range(24):
        x, y = batch_of(number)
        leaf = x.detach().clone().requires_grad_(number not in (16, 17))
        lr: float | Tensor = 0.05 / (1 + number)
        if number == 6:
            leaf, y = x[:3].detach().clone().requires_grad_(), y[:3]
        if number == 10:
            with torch.no_grad():
                kept.append(head(x, y))
            head.eval()
            kept.append(head(leaf, y).detach())
            head.train()
        if number == 12:
            kept.append(head(x.flip(1).requires_grad_(), y))  # no backward will come, and the head cannot know
        if number == 13:
            kept.clear()
            head.load_state_dict(saved)
        if number == 14:
            head(x.flip(1).requires_grad_(), y).backward()
            head.abandon_step()
        if number == 15:
            _bring_a_wrong_label(head, x, y)
        if number == 18:
            head.rows()["weight"].mul_(0.5)
            head.accept_rows()
        if number == 11:
            head.begin_step(y)
            losses = []
            for part_x, part_y in zip(leaf.tensor_split(2), y.tensor_split(2), strict=True):
                losses.append(head(part_x, part_y))
                losses[-1].backward()
            loss = torch.stack(losses).sum()
        elif number == 19:
            loss = head(leaf, y)
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            loss = head(leaf, y)
            (loss * 2).backward()
        kept.append(loss)
        options: dict[str, Any] = {"loss_scale": 2.0}
        if number in (7, 22):
            lr = torch.tensor(lr, device=device)
            options = {
                "loss_scale": torch.tensor(2.0, device=device),
                "skip": torch.zeros((), dtype=torch.bool, device=device),
            }
        if number == 8:
            options["skip"] = torch.ones((), dtype=torch.bool, device=device)
        if number == 9:
            options["skip"] = True
        stats = head.step(lr=lr, is_measured=number == 5, **options)
        measured = [] if stats is None else [stats.target_cosine, stats.gradient_norm, stats.sampled_share]
        grads = [] if leaf.grad is None else [leaf.grad]
        tensors = [loss.detach(), *grads, *measured, *head.rows().values()]
        outcome.append([tensor.clone() for tensor in tensors])
    assert [float(loss.detach()) for loss in kept[-4:]] == [float(tensors[0]) for tensors in outcome[-4:]]
    return outcome


def _bring_a_wrong_label(head: Any, x: Tensor, y: Tensor) -> None:
    """Takes a step that must not count. A CPU raises in forward, a GPU when it is asked."""
    before = head.step_count
    wrong = torch.where(torch.arange(len(y), device=y.device) == 2, head.num_classes, y)
    try:
        head(x.detach().requires_grad_(), wrong).backward()
        head.step(lr=0.1)
        head.check()
    except UserError as error:
        assert f"Label {head.num_classes} at position 2" in str(error), error
        assert f"of step {before}, counted from 0" in str(error), error
    else:
        raise AssertionError("the wrong label was accepted")
    if head.step_count == before:
        head.abandon_step()


def assert_same_bits(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(one, other), f"step {number}, tensor {place}: {one} {other}"
