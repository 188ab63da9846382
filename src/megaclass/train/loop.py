"""The training loop. Read this first.

A step on every rank (train/step.py):

    batch       this rank's part of the global batch, decoded ahead of time
    forward     backbone: images -> embeddings; head: embeddings of all ranks -> one loss, the same on every rank
    backward    head: gradient of the embeddings; DDP: gradients of the backbone, averaged over ranks
    update      backbone by its optimizer, the centres that took part by the head; nothing where something is not finite
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.config.schema import Config
from megaclass.data.loader import BatchLoader
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.evaluate.protocol import SetResult
from megaclass.progress import no_bar, progress_bar
from megaclass.train.build import Model
from megaclass.train.data_errors import DataErrors, batch_of_no_class
from megaclass.train.evaluation import accuracies, evaluate_between_steps
from megaclass.train.metrics import Meter, check_finite
from megaclass.train.run.folder import RunFolder
from megaclass.train.run.generators import generator_states
from megaclass.train.run.signals import Stop, StopSignals
from megaclass.train.run.sinks import Sink, no_sinks, open_sinks
from megaclass.train.schedule import learning_rate
from megaclass.train.step import training_step
from megaclass.world import World


@dataclass(frozen=True)
class Outcome:
    """What the run amounted to; the same on every rank."""

    num_steps: int
    """Steps done in all."""
    final_loss: float
    images_per_second: float
    stop: Stop
    """A signal asked to stop; the checkpoint says how far the run came."""
    results: list[SetResult] | None
    """Of the last step, where the loop came to it and evaluated."""


def train(
    config: Config,
    model: Model,
    loader: BatchLoader,
    run: RunFolder,
    world: World,
    device: torch.device,
    first_step: int,
    writer: CheckpointWriter,
    signals: StopSignals,
) -> Outcome:
    """Trains from `first_step` to the end, or until a signal asks to stop, saving checkpoints. Every rank calls it."""
    num_steps = max(1, round(config.train.epochs * loader.steps_per_epoch))
    checkpoint_steps = max(1, round(config.train.checkpoint_epochs * loader.steps_per_epoch))
    evaluate_steps = max(1, round(config.train.evaluate_epochs * loader.steps_per_epoch))
    meter = Meter(config.train.global_batch, run.read_metrics(), device)
    epoch, step_in_epoch = divmod(first_step, loader.steps_per_epoch)
    batches = loader.batches(epoch, step_in_epoch, num_steps=num_steps - first_step)
    data_errors = DataErrors()
    refused = batch_of_no_class(-(-config.train.global_batch // world.size), loader.image_size)
    done, stop = first_step, Stop.NO
    results: list[SetResult] | None = None
    errors_told: set[str] = set()
    model.parallel.train()
    bar_of = progress_bar("training", num_steps, start=first_step) if world.is_main else no_bar()
    rows_of = open_sinks(config, run, is_new=first_step == 0) if world.is_main else no_sinks()
    with ExitStack() as held, bar_of as bar:
        send_row = on_every_rank(partial(held.enter_context, rows_of), device)
        for step, batch in enumerate(meter.batches(data_errors.kept(batches, refused)), start=first_step):
            lr = learning_rate(config.optimizer, step, num_steps, loader.steps_per_epoch)
            done = step + 1
            is_last = done == num_steps
            is_saved = done % checkpoint_steps == 0 or is_last
            is_evaluated = config.train.evaluate_epochs > 0 and (done % evaluate_steps == 0 or is_last)
            is_reported = done % config.train.report_steps == 0 or is_saved or is_evaluated
            with data_errors.heard_by_all(device):
                meter.add(training_step(model, batch, config, lr=lr, step=step, device=device, is_measured=is_reported))

            detail, numbers = "", {}
            if is_evaluated:
                with meter.paused():
                    results = evaluate_between_steps(config, model, loader.image_size, device, errors_told)
                numbers = accuracies(results)
            if is_reported:
                row = {"step": done, "epoch": done / loader.steps_per_epoch, "learning_rate": lr, **meter.read()}
                numbers |= {"loss": row["loss"]}
                on_every_rank(partial(report, row | numbers, config, model, data_errors, send_row), device)
                detail = describe_row(row)
                stop = Stop.NO if is_last else signals.of_any_rank(device)
            bar.advance_to(done, detail)
            if is_saved or stop:
                # Numbers of this very step, or none: the best checkpoint is chosen by them.
                save(model, writer, done, numbers, device)
            if stop:
                break
    speed = meter.images_per_second()
    return Outcome(done, meter.last_loss, speed, stop, None if stop else results)


def report(row: dict[str, float], config: Config, model: Model, data_errors: DataErrors, send_row: Sink) -> None:
    """On every rank: what is wrong here, or nothing; rank 0 writes the row."""
    data_errors.check()
    check_finite(row, int(row["step"]), config.train.on_nan, model.loss_scale.is_dynamic)
    send_row(row)


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
