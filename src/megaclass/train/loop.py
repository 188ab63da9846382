"""The training loop. Read this first.

A step on every rank (train/step.py):

    batch       this rank's part of the global batch, decoded ahead of time
    forward     backbone: images -> embeddings; head: embeddings of all ranks -> one loss, the same on every rank
    backward    head: gradient of the embeddings; DDP: gradients of the backbone, averaged over ranks
    update      backbone by its optimizer, the centres that took part by the head; nothing where something is not finite
"""

from dataclasses import dataclass
from functools import partial

import torch

from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.config import Config
from megaclass.data.loader import BatchLoader
from megaclass.distributed.agreement import on_main_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.train.build import Model
from megaclass.train.evaluation import evaluate_between_steps
from megaclass.train.generators import generator_states
from megaclass.train.meters import Meter, check_finite
from megaclass.train.progress import no_bar, progress_bar
from megaclass.train.run_folder import RunFolder
from megaclass.train.schedule import learning_rate
from megaclass.train.sinks import no_sinks, open_sinks
from megaclass.train.step import training_step
from megaclass.train.stop_signals import StopSignals
from megaclass.world import World


@dataclass(frozen=True)
class Outcome:
    """What the run amounted to; the same on every rank."""

    num_steps: int
    """Steps done in all."""
    final_loss: float
    images_per_second: float
    was_interrupted: bool
    """A signal asked to stop before the last step; the checkpoint says how far it came."""


def train(
    config: Config,
    model: Model,
    loader: BatchLoader,
    run: RunFolder,
    world: World,
    device: torch.device,
    first_step: int,
    writer: CheckpointWriter,
) -> Outcome:
    """Trains from `first_step` to the end, saving checkpoints on the way. Every rank calls it."""
    num_steps = max(1, round(config.train.epochs * loader.steps_per_epoch))
    checkpoint_steps = max(1, round(config.train.checkpoint_epochs * loader.steps_per_epoch))
    evaluate_steps = round(config.train.evaluate_epochs * loader.steps_per_epoch)
    accuracies: dict[str, float] = {}
    meter = Meter(config.train.global_batch, run.read_metrics(), device)
    signals = StopSignals()
    epoch, step_in_epoch = divmod(first_step, loader.steps_per_epoch)
    batches = loader.batches(epoch, step_in_epoch, num_steps=num_steps - first_step)
    done, is_asked_to_stop = first_step, False
    model.parallel.train()
    bar_of = progress_bar("training", num_steps, start=first_step) if world.is_main else no_bar()
    rows_of = open_sinks(config, run) if world.is_main else no_sinks()
    with signals.heard(), bar_of as bar, rows_of as send_row:
        for step, batch in enumerate(meter.batches(batches), start=first_step):
            lr = learning_rate(config.optimizer, step, num_steps, loader.steps_per_epoch)
            done = step + 1
            is_evaluated = evaluate_steps > 0 and done % evaluate_steps == 0 and done < num_steps
            is_reported = done % config.train.report_steps == 0 or done == num_steps or is_evaluated
            meter.add(training_step(model, batch, config, lr=lr, step=step, device=device, is_measured=is_reported))

            detail = ""
            if is_evaluated:
                accuracies = evaluate_between_steps(config, model, loader.image_size[0], device)
            if is_reported:
                row = {"step": done, "epoch": done / loader.steps_per_epoch, "learning_rate": lr, **meter.read()}
                row |= accuracies if is_evaluated else {}
                check_finite(row, done, config.train.on_nan, model.loss_scale.is_dynamic)
                on_main_rank(partial(send_row, row), device)
                detail = describe_row(row)
                is_asked_to_stop = done < num_steps and signals.any_rank_was_asked(device)
            bar.advance_to(done, detail)
            if done % checkpoint_steps == 0 or done == num_steps or is_asked_to_stop:
                save(model, writer, done, {"loss": meter.last_loss, **accuracies}, device)
            if is_asked_to_stop:
                break
    return Outcome(done, meter.last_loss, meter.images_per_second(), is_asked_to_stop)


def describe_row(row: dict[str, float]) -> str:
    """What stands behind the bar."""
    parts = [
        f"loss {row['loss']:.3f}",
        f"{row['images_per_second']:,.0f} images/s",
        f"lr {row['learning_rate']:.3g}",
    ]
    # Said when it matters: all of it fits a terminal of 80 columns otherwise.
    if row["data_wait_share"] >= 0.05:
        parts.append(f"waiting for data {row['data_wait_share']:.0%}")
    if "gpu_memory_gib" in row:
        parts.append(f"{row['gpu_memory_gib']:.1f} GiB")
    return "  ".join(parts)


def save(model: Model, writer: CheckpointWriter, step: int, metrics: dict[str, float], device: torch.device) -> None:
    """Collective. After it the batch statistics are the same on every rank; the writing goes on beside the next steps."""
    average_buffers_(model.backbone)
    writer.save(
        Snapshot(
            step=step,
            shared=model.shared_state(),
            head_rows=model.head.rows(),
            class_start=model.head.classes.start,
            class_stop=model.head.classes.stop,
            num_classes=model.head.num_classes,
            rank_state=generator_states(device),
            metrics=metrics,
        )
    )
