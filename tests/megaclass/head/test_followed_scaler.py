"""fp16 in a loop of one's own: the head follows the loss scale and the verdict of GradScaler, Lightning and Accelerate."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megaclass import ArcFace, PartialFC
from megaclass.errors import HeadError, NotFiniteError

WIDTH, NUM_CLASSES, LR = 8, 12, 0.1


def _parts() -> tuple[nn.Linear, PartialFC, torch.optim.SGD, Tensor, Tensor]:
    torch.manual_seed(0)
    backbone = nn.Linear(WIDTH, WIDTH)
    head = PartialFC(WIDTH, NUM_CLASSES, margin=ArcFace(8, 0.2), device="cpu")
    optimizer = torch.optim.SGD(backbone.parameters(), lr=LR, momentum=0.9)
    return backbone, head, optimizer, torch.randn(6, WIDTH), torch.arange(6)


def _state(backbone: nn.Module, head: PartialFC) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*backbone.parameters(), *head.rows().values())]


def _are_equal(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def _unscaled_steps(weights: list[float]) -> list[Tensor]:
    backbone, head, optimizer, inputs, labels = _parts()
    for weight in weights:
        optimizer.zero_grad()
        (head(backbone(inputs), labels) * weight).backward()
        optimizer.step()
        head.step(lr=LR)
    return _state(backbone, head)


@pytest.mark.parametrize("is_update_first", [False, True])
def test_steps_under_a_scaler_are_those_without_one_and_weights_of_the_loss_still_count(is_update_first):
    weights = [1.0, 0.5, 3.0]
    backbone, head, optimizer, inputs, labels = _parts()
    # Grows after every second step: update() in between changes the scale that step() must not use yet.
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    head.follow_scaler(scaler)
    for weight in weights:
        optimizer.zero_grad()
        scaler.scale(head(backbone(inputs), labels) * weight).backward()
        scaler.step(optimizer)
        if is_update_first:
            scaler.update()
        head.step(lr=LR)
        if not is_update_first:
            scaler.update()
    assert scaler.get_scale() == 2**17
    for ours, truth in zip(_state(backbone, head), _unscaled_steps(weights), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_update_first", [False, True])
@pytest.mark.parametrize("fault", ["gradient", "embedding"])
def test_the_head_skips_exactly_the_steps_that_the_scaler_skips(is_update_first, fault):
    backbone, head, optimizer, inputs, labels = _parts()
    scaler = torch.amp.GradScaler("cpu")
    head.follow_scaler(scaler)
    are_skipped = []
    for step in range(4):
        before = _state(backbone, head)
        optimizer.zero_grad()
        batch = inputs.clone()
        if fault == "embedding" and step in (1, 2):
            batch[3, 3] = torch.inf
        scaler.scale(head(backbone(batch), labels)).backward()
        if fault == "gradient" and step in (1, 2):
            assert backbone.weight.grad is not None
            backbone.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        if is_update_first:
            scaler.update()
        head.step(lr=LR)
        if not is_update_first:
            scaler.update()
        unchanged = _are_equal(before, _state(backbone, head))
        assert all(unchanged) or not any(unchanged)
        are_skipped.append(all(unchanged))
    assert are_skipped == [False, True, True, False]
    assert head.step_count == 4 and scaler.get_scale() == 2**14


def test_a_scaled_loss_without_a_scaler_is_refused_and_moves_nothing():
    backbone, head, _, inputs, labels = _parts()
    before = _state(backbone, head)
    (head(backbone(inputs), labels) * 65536).backward()
    with pytest.raises(HeadError, match=r"multiplied by 65536 .* head.follow_scaler\(scaler\)"):
        head.step(lr=LR)
    assert all(_are_equal(before, _state(backbone, head)))
    head.step(lr=LR, loss_scale=65536.0)
    assert not torch.equal(before[-1], _state(backbone, head)[-1])


def test_a_step_before_the_scaler_has_judged_is_refused():
    backbone, head, _, inputs, labels = _parts()
    scaler = torch.amp.GradScaler("cpu")
    head.follow_scaler(scaler)
    scaler.scale(head(backbone(inputs), labels)).backward()
    with pytest.raises(HeadError, match=r"scaler.step\(optimizer\) first"):
        head.step(lr=LR)


def test_without_a_scaler_an_embedding_that_is_not_finite_is_an_error():
    _, head, _, inputs, labels = _parts()
    head.follow_scaler(torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(NotFiniteError, match="No centre was updated"):
        head(inputs * torch.inf, labels)


@pytest.mark.parametrize(("is_scaled", "expected"), [(False, 0.0), (True, torch.nan)])
def test_after_a_fault_the_gradient_of_the_embeddings_is_zero_or_nan_for_a_scaler(is_scaled, expected):
    _, head, _, inputs, labels = _parts()
    embeddings = inputs.requires_grad_()
    loss = head(embeddings, labels)
    # As on a GPU, where the fault of an earlier forward has not been raised yet.
    head._engine.faults.first_fault[0], head._engine.faults.is_scaled = 1, is_scaled
    loss.backward()
    torch.testing.assert_close(embeddings.grad, torch.full_like(inputs, expected), equal_nan=True)


def _overflow_in_step_2(backbone: nn.Linear) -> list[int]:
    """Makes the gradient of the second backward infinite, as fp16 does; returns a list with the number of backwards."""
    calls = [0]

    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient * torch.inf if calls[0] == 2 else gradient

    backbone.bias.register_hook(hook)
    return calls


def test_under_lightning_16_mixed_the_head_moves_as_without_scaling_and_skips_with_the_backbone(tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    moves: list[list[bool]] = []
    largest: list[float] = []

    class Recogniser(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head, _, self.inputs, self.labels = _parts()
            _overflow_in_step_2(self.backbone)

        def configure_model(self) -> None:
            self.head.follow_scaler(getattr(self.trainer.precision_plugin, "scaler", None))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.head(self.backbone(batch[0]), batch[1])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.backbone.parameters(), lr=LR)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            before = _state(self.backbone, self.head)
            optimizer.step(closure=optimizer_closure)
            self.head.step(lr=LR)
            after = _state(self.backbone, self.head)
            moves.append(_are_equal(before, after))
            largest.append(float((after[2] - before[2]).abs().max()))

    _, _, _, inputs, labels = _parts()
    # The first scale of 65,536 overflows in fp16 here, and the first step would be skipped, too.
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, plugins=[plugin],
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(Recogniser(), DataLoader(TensorDataset(inputs, labels), batch_size=6))
    assert [all(move) for move in moves] == [False, True, False] and not any(moves[0]) and not any(moves[2])
    assert 0 < max(largest) < 100  # the loss scale would make it 1,024 times larger


def test_under_accelerate_with_a_scaler_the_head_skips_with_the_backbone():
    accelerate = pytest.importorskip("accelerate")
    backbone, head, optimizer, inputs, labels = _parts()
    _overflow_in_step_2(backbone)
    accelerator = accelerate.Accelerator(cpu=True)
    # Accelerate refuses mixed_precision="fp16" on a CPU; this is the attribute that it sets.
    accelerator.scaler = torch.amp.GradScaler("cpu")
    head.follow_scaler(accelerator.scaler)
    model, optimizer = accelerator.prepare(backbone, optimizer)
    moves = []
    for _ in range(3):
        before = _state(backbone, head)
        optimizer.zero_grad()
        accelerator.backward(head(model(inputs), labels))
        optimizer.step()
        head.step(lr=LR)
        after = _state(backbone, head)
        moves.append(_are_equal(before, after))
        assert (after[2] - before[2]).abs().max() < 100  # the loss scale would make it 65,536 times larger
    assert [all(move) for move in moves] == [False, True, False] and not any(moves[0]) and not any(moves[2])
