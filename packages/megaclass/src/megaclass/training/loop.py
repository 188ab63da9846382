"""The training loop. Read this first.

One step on every rank (step.py), and what follows it (between_steps.py):

    batch       this rank's part of the global batch, decoded ahead of time
    forward     backbone: images -> embeddings; head: embeddings of all ranks -> one loss, the same on every rank
    backward    head: gradient of the embeddings; DDP: gradients of the backbone, averaged over ranks
    update      the optimizer updates the backbone, the head updates the sampled class centres; a step with a loss or
                gradient that is not finite updates nothing
    between     evaluate, report, commit, save: each one when it is due
"""

from contextlib import ExitStack
from dataclasses import dataclass

from megaclass.checkpoint.save import CheckpointWriter
from megaclass.data.loading.choose import available_cores
from megaclass.evaluation.protocol import SetResult
from megaclass.progress import progress_bar
from megaclass.training.between_steps import Position, work_between_steps
from megaclass.training.commits import Commits
from megaclass.training.model.build import Model
from megaclass.training.observer import Observer
from megaclass.training.run.run import Run
from megaclass.training.run.signals import Stop, StopSignals
from megaclass.training.schedule import Schedule
from megaclass.training.step import compile_programs, training_step
from megaclass_launch.rank_status import own_status


@dataclass(frozen=True)
class TrainingResult:
    """How training ended; the same on every rank."""

    num_steps: int
    """Number of steps done since the start of the run, including those before a resume."""
    final_loss: float
    images_per_second: float
    stop: Stop
    """The request to stop before the last step, if there was one."""
    is_regrouping: bool = False
    """The ranks of an elastic job have agreed to leave their generation, because hosts have changed."""
    results: list[SetResult] | None = None
    """Evaluation after the last step done; None if there was none."""
    minor_subcentres: tuple[int, int, list[tuple[int, int, int]]] | None = None
    """With sub-centres: PartialFC.minor_subcentres of the last epoch."""


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
    at, observer = Position(first_step, schedule.num_steps), Observer(run, model.backbone, first_step)
    # The order of the data is a function of (seed, epoch, step), so a resumed run just starts in the middle of an epoch.
    epoch, step_in_epoch = divmod(first_step, loader.steps_per_epoch)
    batches = loader.batches(epoch, step_in_epoch, num_steps=schedule.num_steps - first_step)
    model.parallel.train()
    with ExitStack() as held:
        works = work_between_steps(run, model, at, observer, writer, signals, commits, held)
        bar = held.enter_context(progress_bar("training", at.num_steps, start=at.done, is_shown=run.world.is_main))
        for step, batch in enumerate(observer.batches(batches), start=first_step):
            duties = schedule.duties(step)
            # The result stays on the device: the host queues further steps while the GPU still works on this one.
            with observer.step(step, is_last=duties.is_last):
                if step == first_step:
                    num_threads = max(1, available_cores() // run.world.local_size)
                    compile_programs(model, batch, config, step=step, device=device, num_threads=num_threads)
                if step == first_step or step % loader.steps_per_epoch == 0:
                    # Counted per epoch, for the report of the last one.
                    model.head.store.num_wins_R.zero_()
                result = training_step(
                    model,
                    batch,
                    config,
                    lr=duties.lr,
                    step=step,
                    device=device,
                    is_measured=duties.is_reported,
                    clock=observer.clock,
                )
            observer.meter.add(result)
            at.step_done(duties)
            for work in works:
                work.after_step(at, duties)
            bar.advance_to(at.done, at.detail)
            if at.is_over:
                # The checkpoint is on its way: what the run has done is not lost.
                break
    # After the last step the slowest disk decides how long the last checkpoint takes.
    own_status().progress(allowed_s=0.0, phase="after the last step")
    return TrainingResult(
        num_steps=at.done,
        final_loss=observer.meter.last_loss,
        images_per_second=observer.meter.images_per_second(),
        stop=at.stop,
        is_regrouping=at.is_regrouping,
        results=at.results,
        minor_subcentres=model.head.minor_subcentres() if config.head.subcentres > 1 else None,
    )
