"""One step: forward and backward over the parts of a batch, then one update, or none if a value is not finite."""

from contextlib import nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from megaclass.config.schema import Config
from megaclass.data.loader import Batch
from megaclass.errors import NotFiniteError
from megaclass.head.step import HeadStats
from megaclass.training.metrics import StepClock, StepResult
from megaclass.training.model.build import Model, generator_states, restore_generators

# Keeps the division by a gradient norm of zero finite.
_TINY = 1e-12
# Learning rate of centres that Adagrad moves, whose steps do not depend on the size of the gradients.
_ADAGRAD_LR = 0.2


def training_step(
    model: Model,
    batch: Batch,
    config: Config,
    *,
    lr: float,
    step: int,
    device: torch.device,
    is_measured: bool = False,
    clock: StepClock | None = None,
) -> StepResult:
    """Collective. Trains on the global batch, of which every rank passes its own part. clock: told about every phase."""
    clock = clock or StepClock(device)
    # Batch norm changes its running statistics in the forward, before it is known whether the step counts.
    model.statistics.keep()
    try:
        loss = _forward_backward(model, batch, config, step, device, clock)
    except NotFiniteError:
        # Raised on every rank in the same step. On a GPU nothing is raised here: a flag on the device masks the update.
        was_skipped = torch.ones((), dtype=torch.bool, device=device)
        model.statistics.put_back(was_skipped)
        if config.train.on_nan == "stop":
            raise
        # The other ranks abandon the same step, so their heads stay in step with this one.
        model.head.abandon_step()
        return StepResult(torch.full((), torch.nan, device=device), was_skipped)
    clock.begin("update")
    was_skipped, head_stats = _update(model, config, lr, is_measured)
    return StepResult(loss, was_skipped, head_stats)


def compile_programs(
    model: Model, batch: Batch, config: Config, *, step: int, device: torch.device, num_threads: int
) -> None:
    """Collective. Compiles the Triton programs of a step, several at a time, so the first step does not wait for each.

    Takes two steps in which programs are compiled and not run, one of them measured, because that one has programs of its own.
    Weights, statistics, counters and random generators are the same afterwards.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return
    from megaclass.triton_launch import compiling_only

    generators, step_count = generator_states(device), model.head.step_count
    was_skipped = torch.ones((), dtype=torch.bool, device=device)
    loss_scale = model.loss_scale.scale if model.loss_scale.is_dynamic else 1.0
    with compiling_only(num_threads):
        for is_measured in (False, True):
            model.statistics.keep()
            _forward_backward(model, batch, config, step, device, StepClock(device))
            model.head.step(lr=0.0, skip=was_skipped, loss_scale=loss_scale, is_measured=is_measured)
            model.statistics.put_back(was_skipped)
    # The embeddings were whatever was in memory, which may be a fault.
    model.head.forgive_fault()
    model.head.step_count = step_count
    restore_generators(generators, device)


def _forward_backward(
    model: Model, batch: Batch, config: Config, step: int, device: torch.device, clock: StepClock
) -> Tensor:
    clock.begin("forward")
    labels = batch.labels.to(device, non_blocking=True)
    indices = batch.indices_on(device) if model.dropouts else None
    model.zero_grad()
    num_parts = config.train.accumulate
    if num_parts > 1:
        # All labels first: the sampled classes, and the number of images in the mean, are those of the whole step.
        model.head.begin_step(labels)
    losses = []
    for part, rows in enumerate(torch.arange(len(labels)).tensor_split(num_parts)):
        here = slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
        for dropout in model.dropouts:
            assert indices is not None
            dropout.expect(indices[here], step)
        # DDP exchanges gradients once per step, in the backward of the last part.
        with nullcontext() if part == num_parts - 1 else model.parallel.no_sync():
            clock.begin("forward")
            inputs = batch.inputs(device, here)
            with model.precision.autocast(device):
                embeddings = model.parallel(*inputs)
            loss = model.head(embeddings, labels[here])
            total = loss
            if model.distiller is not None:
                total = loss + model.distiller.loss(inputs, batch.indices[here], embeddings, len(labels))
            clock.begin("backward")
            (total * model.loss_scale.scale).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _update(model: Model, config: Config, lr: float, is_measured: bool) -> tuple[Tensor, HeadStats | None]:
    """Updates backbone and centres; returns whether the step was skipped, and the head's statistics. The same on every rank.

    The backbone's gradients are averaged over the ranks by now, so every rank computes the same norm and decision.
    """
    scale = model.loss_scale.scale
    if model.sharded is not None:
        model.sharded.take_gradients()
    parameters = [parameter for group in model.optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # The gradients still contain the loss scale; the norm must not.
    norm = nn.utils.get_total_norm(gradients)
    if model.sharded is not None:
        norm = model.sharded.norm_over_ranks(norm)
    norm = norm / scale
    is_bad = ~torch.isfinite(norm) | model.head.found_inf.bool()
    # One multiplication removes the loss scale and clips. Nothing here waits for the device.
    factor = 1 / scale
    if config.optimizer.clip_norm:
        factor = factor * (config.optimizer.clip_norm / norm.clamp_min(_TINY)).clamp_max(1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor)
    for group in model.optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    if is_bad.device.type == "cuda":
        model.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]  # read by fused optimizers
        model.optimizer.step()
    # On a CPU reading the flag costs nothing.
    elif not is_bad:
        model.optimizer.step()
    # The centres follow the schedule of the backbone, scaled to their own peak.
    head_lr = config.optimizer.head_lr or (_ADAGRAD_LR if config.head.optimizer == "adagrad" else config.optimizer.lr)
    head_stats = model.head.step(
        lr=lr * (head_lr / config.optimizer.lr),
        skip=is_bad,
        loss_scale=scale if model.loss_scale.is_dynamic else 1.0,
        is_measured=is_measured,
    )
    # The head has recorded the fault on the device and would raise it a few steps later.
    if is_bad.device.type == "cuda" and config.train.on_nan == "skip":
        model.head.forgive_fault()
    model.loss_scale.follow(is_bad)
    if model.ema is not None:
        model.ema.follow(is_bad)
    model.statistics.put_back(is_bad)
    return is_bad, head_stats
