"""The training loop. Read this first.

One step on every rank (train/step.py):

    batch       this rank's part of the global batch, decoded ahead of time
    forward     backbone: images -> embeddings; head: embeddings of all ranks -> one loss, the same on every rank
    backward    head: gradient of the embeddings; DDP: gradients of the backbone, averaged over ranks
    update      the optimizer updates the backbone, the head updates the sampled class centres; a step with a loss or
                gradient that is not finite updates nothing
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.config.schema import Config
from megaclass.data.loading.choose import available_cores
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.evaluate.protocol import SetResult
from megaclass.progress import no_bar, progress_bar
from megaclass.train.data_errors import DataErrors, batch_of_no_class
from megaclass.train.elastic.commits import Change, Commits
from megaclass.train.evaluation import accuracies, evaluate_between_steps
from megaclass.train.metrics import Meter, check_finite
from megaclass.train.model.build import Model, generator_states
from megaclass.train.observe.observer import Observer
from megaclass.train.observe.sinks import Sink, no_sinks, open_sinks
from megaclass.train.run.run import Run
from megaclass.train.run.signals import Stop, StopSignals
from megaclass.train.schedule import Schedule
from megaclass.train.step import compile_programs, training_step

_logger = logging.getLogger("megaclass.train")
# Share of the time spent waiting for data from which on the progress bar shows it.
_SHOWN_WAIT_SHARE = 0.05


@dataclass(frozen=True)
class TrainingResult:
    """How training ended; the same on every rank."""

    num_steps: int
    """Number of steps done since the start of the run, including those before a resume."""
    final_loss: float
    images_per_second: float
    stop: Stop
    """The request to stop before the last step, if a signal made one."""
    is_regrouping: bool = False
    """The ranks of an elastic job have agreed to leave their generation, because hosts have changed."""
    results: list[SetResult] | None = None
    """Evaluation after the last step; None if the run stopped earlier or does not evaluate during training."""


def train(
    run: Run,
    model: Model,
    first_step: int,
    writer: CheckpointWriter,
    signals: StopSignals,
    commits: Commits | None = None,
) -> TrainingResult:
    """Collective. Trains from `first_step` to the last step, or until a signal asks to stop; saves checkpoints.

    commits: of an elastic job, which also leaves the loop at a commit if the ranks are about to change.
    """
    config, loader, device = run.config, run.loader, run.device
    schedule = Schedule(config, loader.steps_per_epoch, commits.interval if commits is not None else None)
    num_steps = schedule.num_steps
    # A run that is resumed after its last step trains nothing: its last loss and speed come from the metrics it wrote.
    meter = Meter(config.train.global_batch, run.folder.read_metrics(), device)
    # The order of the data is a function of (seed, epoch, step), so a resumed run just starts in the middle of an epoch.
    epoch, step_in_epoch = divmod(first_step, loader.steps_per_epoch)
    batches = loader.batches(epoch, step_in_epoch, num_steps=num_steps - first_step)
    data_errors = DataErrors()
    # After an error in its data a rank keeps sending this batch, so that no other rank waits for it (data_errors.py).
    refused = batch_of_no_class(-(-config.train.global_batch // run.world.size), loader.image_size)
    done, stop, change = first_step, Stop.NO, Change()
    results: list[SetResult] | None = None
    reported_errors: set[str] = set()
    model.parallel.train()
    new_bar = progress_bar("training", num_steps, start=first_step) if run.world.is_main else no_bar()
    new_sinks = open_sinks(config, run.folder, is_new=first_step == 0) if run.world.is_main else no_sinks()
    observer = Observer(run, model.backbone, first_step)
    with ExitStack() as held, new_bar as bar:
        send_row = on_every_rank(partial(held.enter_context, new_sinks), device)
        change_fields = commits.describe_change(first_step) if commits is not None else None
        run.events.note_begin(first_step, num_steps, run.world.size, change_fields)
        if commits is not None:
            # From the first step on, the ranks that are left after a loss can continue.
            with observer.long_work("commit"):
                commits.commit(model, first_step, device)
        for step, batch in enumerate(meter.batches(data_errors.keep_error(batches, refused)), start=first_step):
            # They depend on the step alone, so that all ranks agree on every collective below without communicating.
            duties, done = schedule.duties(step), step + 1
            # The result stays on the device: the host queues further steps while the GPU still works on this one.
            with data_errors.raised_on_all_ranks(device), observer.step(step, is_last=duties.is_last):
                if step == first_step:
                    num_threads = max(1, available_cores() // run.world.local_size)
                    compile_programs(model, batch, config, step=step, device=device, num_threads=num_threads)
                meter.add(
                    training_step(
                        model,
                        batch,
                        config,
                        lr=duties.lr,
                        step=step,
                        device=device,
                        is_measured=duties.is_reported,
                        clock=observer.clock,
                    )
                )

            detail, numbers = "", {}
            if duties.is_evaluated:
                with meter.paused(), observer.long_work("evaluation"):
                    results = evaluate_between_steps(run, model, done, reported_errors)
                numbers = accuracies(results)
                run.events.note("evaluation", done, seconds=meter.last_pause_s, **numbers)
            if duties.is_reported:
                row = {"step": done, "epoch": done / loader.steps_per_epoch, "learning_rate": duties.lr, **meter.read()}
                row |= observer.read(meter, done)
                if commits is not None:
                    row["commit_s"] = commits.take_seconds()
                numbers |= {"loss": row["loss"]}
                # An error on any rank (bad data, gradients that are not finite, a full disk on rank 0) ends all of them here.
                with observer.reporting():
                    on_every_rank(partial(report, row | numbers, config, model, data_errors, send_row, meter), device)
                detail = describe_row(row, observer.describe_slow())
                if row["skipped_steps"]:
                    run.events.note("skip", done, num_steps=row["skipped_steps"])
                # Signals are exchanged at reports only, so that other steps need no additional collective.
                stop = Stop.NO if duties.is_last else signals.of_any_rank(device)
            bar.advance_to(done, detail)
            if commits is not None:
                commits.step_done(done)
                if duties.is_committed and not stop:
                    # Before the checkpoint of the same step: ranks never go back behind a checkpoint that is complete.
                    with observer.long_work("commit"):
                        change = commits.commit(model, done, device)
            is_regrouping = change.is_wanted and not duties.is_last
            if duties.is_saved or stop or (is_regrouping and change.has_removals):
                # The best checkpoint is chosen by these numbers, so they must belong to this step or be empty.
                with observer.long_work("saving"):
                    save(model, writer, done, numbers, device)
            # The checkpoint is on its way: what the run has done is not lost.
            if stop or is_regrouping:
                break
    observer.finish()
    return TrainingResult(
        num_steps=done,
        final_loss=meter.last_loss,
        images_per_second=meter.images_per_second(),
        stop=stop,
        is_regrouping=change.is_wanted and done < num_steps and not stop,
        results=None if stop else results,
    )


def report(
    row: dict[str, Any], config: Config, model: Model, data_errors: DataErrors, send_row: Sink, meter: Meter
) -> None:
    """Raises errors of this rank's data and gradients; otherwise rank 0 writes the row of metrics."""
    data_errors.check()
    check_finite(row, int(row["step"]), config.train.on_nan, model.loss_scale.is_dynamic, meter.skipped_in_row)
    send_row(row)


def describe_row(row: dict[str, Any], slow_rank: str = "") -> str:
    """Returns the text behind the progress bar. slow_rank: which rank is slower than the others, and in which phase."""
    parts = [
        f"loss {row['loss']:.3f}",
        f"{row['images_per_second']:,.0f} images/s",
        f"lr {row['learning_rate']:.3g}",
    ]
    # Shown only if it matters, so that the line usually fits into 80 columns.
    if row["data_wait_share"] >= _SHOWN_WAIT_SHARE:
        parts.append(f"waiting for data {row['data_wait_share']:.0%}")
    if "gpu_memory_gib" in row:
        parts.append(f"{row['gpu_memory_gib']:.1f} GiB")
    if slow_rank:
        parts.append(slow_rank)
    return "  ".join(parts)


def save(model: Model, writer: CheckpointWriter, step: int, metrics: dict[str, float], device: torch.device) -> None:
    """Collective. Averages the batch statistics over the ranks and starts a checkpoint, written during the next steps."""
    _logger.debug(f"saving a checkpoint of step {step}")
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
