"""The training loop. Read this first.

A step on every rank:

    batch       this rank's part of the global batch, decoded ahead of time
    forward     backbone: images -> embeddings; head: embeddings of all ranks -> one loss, the same on every rank
    backward    head: gradient of the embeddings; DDP: gradients of the backbone, averaged over ranks
    update      backbone by its optimizer, the centres that took part by the head
"""

import time
from dataclasses import dataclass

import torch
from torch import nn

from megaclass.checkpoint.save import save_checkpoint
from megaclass.config import Config, to_toml
from megaclass.data.decode import normalise
from megaclass.data.loader import BatchLoader
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.train.build import Model
from megaclass.train.progress import no_bar, progress_bar
from megaclass.train.run_folder import RunFolder
from megaclass.train.schedule import learning_rate
from megaclass.world import World


@dataclass(frozen=True)
class Outcome:
    """What the run amounted to; the same on every rank."""

    num_steps: int
    final_loss: float
    images_per_second: float


def train(
    config: Config,
    model: Model,
    loader: BatchLoader,
    run: RunFolder,
    world: World,
    device: torch.device,
    first_step: int,
) -> Outcome:
    """Trains from `first_step` to the end, saving checkpoints on the way. Every rank calls it."""
    num_steps = max(1, round(config.train.epochs * loader.steps_per_epoch))
    checkpoint_steps = max(1, round(config.train.checkpoint_epochs * loader.steps_per_epoch))
    meter = Meter(config.train.global_batch)
    bar_of = progress_bar("training", num_steps, start=first_step) if world.is_main else no_bar()
    model.parallel.train()
    with bar_of as bar:
        epoch, step_in_epoch = divmod(first_step, loader.steps_per_epoch)
        for step, batch in enumerate(
            loader.batches(epoch, step_in_epoch, num_steps=num_steps - first_step), start=first_step
        ):
            lr = learning_rate(config.optimizer, step, num_steps, loader.steps_per_epoch)
            images = normalise(batch.images.to(device, non_blocking=True)).to(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                embeddings = model.parallel(images)
            loss = model.head(embeddings, batch.labels.to(device, non_blocking=True))
            model.optimizer.zero_grad()
            loss.backward()
            update(model, config, lr)
            meter.add(loss)

            done = step + 1
            if done % config.train.report_steps == 0 or done == num_steps:
                row = {"step": done, "epoch": done / loader.steps_per_epoch, "learning_rate": lr, **meter.read()}
                if world.is_main:
                    run.append_metrics(row)
                bar.advance_to(done, f"loss {row['loss']:.3f}  {row['images_per_second']:,.0f} images/s  lr {lr:.3g}")
            else:
                bar.advance_to(done)
            if done % checkpoint_steps == 0 or done == num_steps:
                save(config, model, run, done, device)
    return Outcome(num_steps, meter.last_loss, meter.images_per_second())


def update(model: Model, config: Config, lr: float) -> None:
    """Moves the backbone and the centres; every rank has the same gradients of the backbone, so clips them alike."""
    if config.optimizer.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.backbone.parameters(), config.optimizer.clip_norm)
    for group in model.optimizer.param_groups:
        group["lr"] = lr
    model.optimizer.step()
    head_factor = 1.0 if config.optimizer.head_lr is None else config.optimizer.head_lr / config.optimizer.lr
    model.head.step(lr=lr * head_factor)


def save(config: Config, model: Model, run: RunFolder, step: int, device: torch.device) -> None:
    """Collective. After it the batch statistics are the same on every rank."""
    average_buffers_(model.backbone)
    save_checkpoint(
        run.checkpoints,
        step=step,
        shared=model.shared_state(),
        head_rows=model.head.rows(),
        class_start=model.head.classes.start,
        class_stop=model.head.classes.stop,
        num_classes=model.head.num_classes,
        config=to_toml(config),
        keep=config.train.keep_checkpoints,
        device=device,
    )


class Meter:
    """Mean loss and speed between two reports; reads the device only when asked."""

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._begun = self._last = time.monotonic()
        self._losses: list[torch.Tensor] = []
        self._num_steps = 0
        self.last_loss = float("nan")

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())
        self._num_steps += 1

    def read(self) -> dict[str, float]:
        self.last_loss = float(torch.stack(self._losses).mean())
        now = time.monotonic()
        speed = len(self._losses) * self._global_batch / (now - self._last)
        self._last, self._losses = now, []
        return {"loss": self.last_loss, "images_per_second": speed, "elapsed_s": now - self._begun}

    def images_per_second(self) -> float:
        """Over the whole run, checkpoints included."""
        return self._num_steps * self._global_batch / (time.monotonic() - self._begun)
