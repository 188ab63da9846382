"""Work between two steps: a list of small objects with one method each, in this order.

    Evaluate    the accuracies of the weights as they are now     every train.evaluate_epochs
    ReportMetrics  a row of metrics, errors and signals of all ranks every train.report_steps, and before any other hook works
    Commit      the state, into the memory of an elastic job      every train.commit_steps, and before a checkpoint
    Save        a checkpoint                                      every train.checkpoint_epochs, and before the loop is left

The order matters. The accuracies are part of the row. An error that the report finds must end the run before a state with it
is kept. A commit comes before the checkpoint of the same step: ranks never go back behind a checkpoint that is complete.

Every condition depends on the step alone or on what all ranks have agreed, so all ranks call the same collectives.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.evaluation.protocol import SetResult
from megaclass.progress import Bar, no_bar, progress_bar
from megaclass.training.data_errors import DataErrors
from megaclass.training.elastic.commits import Change, Commits
from megaclass.training.evaluation import accuracies, evaluate_between_steps
from megaclass.training.metrics import Meter, check_finite
from megaclass.training.model.build import Model, generator_states
from megaclass.training.observe.observer import Observer
from megaclass.training.observe.sinks import Sink, no_sinks, open_sinks
from megaclass.training.run.run import Run
from megaclass.training.run.signals import Stop, StopSignals
from megaclass.training.schedule import NOTHING_DUE, StepDuties

_logger = logging.getLogger("megaclass.training")
# The progress bar shows the data wait above this share.
_SHOWN_WAIT_SHARE = 0.05


@dataclass(slots=True)
class LoopState:
    """Position of the loop, and what the hooks have found: the same on every rank, except for `detail`."""

    done: int
    """Steps done since the start of the run."""
    num_steps: int
    duties: StepDuties = NOTHING_DUE
    """Of the last step done."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Loss and accuracies of this very step, or empty: the best checkpoint is chosen by them."""
    detail: str = ""
    """Text behind the progress bar."""
    results: list[SetResult] | None = None
    """The last evaluation."""
    stop: Stop = Stop.NO
    """The request to stop before the last step, if a signal made one."""
    change: Change = field(default_factory=Change)
    """The ranks of an elastic job that are about to change."""

    def step_done(self, duties: StepDuties) -> None:
        self.done += 1
        self.duties, self.numbers, self.detail = duties, {}, ""

    @property
    def is_regrouping(self) -> bool:
        """True once the ranks have agreed to leave their generation, because hosts have changed."""
        return self.change.is_wanted and not self.duties.is_last and not self.stop

    @property
    def is_over(self) -> bool:
        return bool(self.stop) or self.is_regrouping


class Hook(Protocol):
    """Work between two steps."""

    def after_step(self, now: LoopState) -> None:
        """Collective. Does its work if it is due after this step."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluate:
    run: Run
    model: Model
    meter: Meter
    observer: Observer
    reported_errors: set[str] = field(default_factory=set)

    def after_step(self, now: LoopState) -> None:
        if not now.duties.is_evaluated:
            return
        with self.meter.paused(), self.observer.long_work("evaluation"):
            now.results = evaluate_between_steps(self.run, self.model, now.done, self.reported_errors)
        now.numbers = accuracies(now.results)
        self.run.events.note("evaluation", now.done, seconds=self.meter.last_pause_s, **now.numbers)


@dataclass(frozen=True, slots=True)
class ReportMetrics:
    run: Run
    model: Model
    meter: Meter
    observer: Observer
    data_errors: DataErrors
    signals: StopSignals
    commits: Commits | None
    send_row: Sink

    def after_step(self, now: LoopState) -> None:
        """Ends the run on all ranks after an error of any rank: bad data, gradients that are not finite, a full disk."""
        if not now.duties.is_reported:
            return
        device = self.run.device
        row = {"step": now.done, "epoch": now.done / self.run.loader.steps_per_epoch, "learning_rate": now.duties.lr}
        row |= self.meter.read()
        row |= self.observer.read(self.meter, now.done)
        if self.commits is not None:
            row["commit_s"] = self.commits.take_seconds()
        now.numbers |= {"loss": row["loss"]}
        with self.observer.reporting():
            on_every_rank(partial(self._check_and_send, row | now.numbers), device)
        now.detail = describe_row(row, self.observer.describe_slow())
        if row["skipped_steps"]:
            self.run.events.note("skip", now.done, num_steps=row["skipped_steps"])
        # Signals are exchanged at reports only, so other steps need no additional collective.
        now.stop = Stop.NO if now.duties.is_last else self.signals.of_any_rank(device)

    def _check_and_send(self, row: dict[str, Any]) -> None:
        self.data_errors.check()
        on_nan, is_scaled = self.run.config.train.on_nan, self.model.loss_scale.is_dynamic
        check_finite(row, int(row["step"]), on_nan, is_scaled, self.meter.skipped_in_row)
        self.send_row(row)


@dataclass(frozen=True, slots=True)
class ShowProgress:
    bar: Bar

    def after_step(self, now: LoopState) -> None:
        self.bar.advance_to(now.done, now.detail)


@dataclass(frozen=True, slots=True)
class Commit:
    run: Run
    model: Model
    observer: Observer
    commits: Commits

    def after_step(self, now: LoopState) -> None:
        self.commits.step_done(now.done)
        if now.duties.is_committed and not now.stop:
            now.change = self.commit(now.done)

    def commit(self, step: int) -> Change:
        with self.observer.long_work("commit"):
            return self.commits.commit(self.model, step, self.run.device)


@dataclass(frozen=True, slots=True)
class Save:
    run: Run
    model: Model
    observer: Observer
    writer: CheckpointWriter

    def after_step(self, now: LoopState) -> None:
        """Averages the batch statistics over the ranks and starts a checkpoint, written during the next steps."""
        # When ranks leave, one may take along the only copy of another's centres.
        if not (now.duties.is_saved or now.stop or (now.is_regrouping and now.change.has_removals)):
            return
        _logger.debug(f"saving a checkpoint of step {now.done}")
        head = self.model.head
        with self.observer.long_work("saving"):
            average_buffers_(self.model.backbone)
            self.writer.save(
                Snapshot(
                    step=now.done,
                    shared=self.model.shared_state(),
                    head_rows=head.rows(),
                    class_start=head.classes.start,
                    class_stop=head.classes.stop,
                    num_classes=head.num_classes,
                    rank_state=generator_states(self.run.device),
                    metrics=now.numbers,
                )
            )


def open_hooks(
    run: Run,
    model: Model,
    now: LoopState,
    held: ExitStack,
    meter: Meter,
    observer: Observer,
    data_errors: DataErrors,
    writer: CheckpointWriter,
    signals: StopSignals,
    commits: Commits | None,
) -> Sequence[Hook]:
    """Collective. Logs the start of the run and returns the hooks; what they hold open is closed with `held`."""
    is_main = run.world.is_main
    new_sinks = open_sinks(run.config, run.folder, is_new=now.done == 0) if is_main else no_sinks()
    new_bar = progress_bar("training", now.num_steps, start=now.done) if is_main else no_bar()
    open_one: Callable[[], Sink] = partial(held.enter_context, new_sinks)
    send_row = on_every_rank(open_one, run.device)
    # Only now: a run whose sinks cannot be opened leaves its folder free.
    change = commits.describe_change(now.done) if commits is not None else None
    run.events.note_begin(now.done, now.num_steps, run.world.size, change)
    commit = Commit(run, model, observer, commits) if commits is not None else None
    if commit is not None:
        # From the first step on, the ranks that are left after a loss can continue.
        commit.commit(now.done)
    return [
        Evaluate(run, model, meter, observer),
        ReportMetrics(run, model, meter, observer, data_errors, signals, commits, send_row),
        ShowProgress(held.enter_context(new_bar)),
        *([commit] if commit is not None else []),
        Save(run, model, observer, writer),
    ]


def describe_row(row: dict[str, Any], slow_rank: str = "") -> str:
    """Returns the text behind the progress bar. slow_rank: which rank is slower than the others, and in which phase."""
    parts = [
        f"loss {row['loss']:.3f}",
        f"{row['images_per_second']:,.0f} images/s",
        f"lr {row['learning_rate']:.3g}",
    ]
    # Shown only if it matters, so the line usually fits into 80 columns.
    if row["data_wait_share"] >= _SHOWN_WAIT_SHARE:
        parts.append(f"waiting for data {row['data_wait_share']:.0%}")
    if "gpu_memory_gib" in row:
        parts.append(f"{row['gpu_memory_gib']:.1f} GiB")
    if slow_rank:
        parts.append(slow_rank)
    return "  ".join(parts)
