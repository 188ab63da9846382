"""The work of the ranks between two steps: a list of objects with one method, in this order.

    place       centres move towards the means of their classes   after the last step
    evaluate    the accuracies of the weights as they are now     every train.evaluate_epochs
    report      a row of metrics, errors and signals of all ranks every train.report_steps, and before any other work
    commit      the state, into the memory of an elastic job      every train.commit_steps, and before a checkpoint
    save        a checkpoint                                      every train.checkpoint_epochs, and before the loop is left

The order matters. The accuracies are part of the row. An error that the report finds must end the run before a state with it
is kept. A commit comes before the checkpoint of the same step: ranks never go back behind a checkpoint that is complete.

Every condition depends on the step alone or on what all ranks have agreed, so all ranks call the same collectives.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from megaclass.checkpoint.retention import ACCURACY, TOP_1
from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.evaluation.centres import ClassShard
from megaclass.evaluation.protocol import Evaluator, SetResult
from megaclass.evaluation.results import headline
from megaclass.evaluation.sets import evaluate_sets, sets_in_training, sets_of_main_rank
from megaclass.progress import bar_on_demand
from megaclass.training.class_means import place_centres
from megaclass.training.commits import Change, Commits
from megaclass.training.metrics import check_finite
from megaclass.training.model.build import Model, generator_states
from megaclass.training.observer import Observer, SlowRanks
from megaclass.training.run.run import Run
from megaclass.training.run.signals import Stop, StopSignals
from megaclass.training.schedule import StepDuties
from megaclass.training.sinks import TRACKERS, Sink, open_sinks
from megaclass_launch.rank_status import own_status

_logger = logging.getLogger("megaclass.training")
# The progress bar shows the data wait above this share.
_SHOWN_WAIT_SHARE = 0.05
# How long a report may take if services get a copy of it.
_SERVICES_S = 300.0


@dataclass(slots=True)
class Position:
    """Place of the loop, and what the work after the present step has found so far; the same on every rank."""

    done: int
    """Steps done since the start of the run."""
    num_steps: int
    is_last: bool = False
    """The last step done was the last one of the run."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Loss and accuracies of this very step, or none: the best checkpoint is chosen by them."""
    results: list[SetResult] | None = None
    """The evaluation after the last step done, if there was one."""
    detail: str = ""
    """Text behind the progress bar."""
    stop: Stop = Stop.NO
    """The request to stop before the last step, if there is one."""
    change: Change = field(default_factory=Change)
    """The ranks of an elastic job that are about to change."""

    def step_done(self, duties: StepDuties) -> None:
        self.done, self.is_last = self.done + 1, duties.is_last
        self.numbers, self.results, self.detail = {}, None, ""

    @property
    def is_regrouping(self) -> bool:
        """True once the ranks have agreed to leave their generation, because hosts have changed."""
        return self.change.is_wanted and not self.is_last and not self.stop

    @property
    def is_over(self) -> bool:
        return bool(self.stop) or self.is_regrouping


@dataclass(kw_only=True)
class Work(ABC):
    """One kind of work between two steps."""

    run: Run
    model: Model
    observer: Observer

    @abstractmethod
    def after_step(self, at: Position, due: StepDuties) -> None:
        """Collective. Does the work if it is due after the step just done."""


def work_between_steps(
    run: Run,
    model: Model,
    at: Position,
    observer: Observer,
    writer: CheckpointWriter,
    signals: StopSignals,
    commits: Commits | None,
    held: ExitStack,
) -> list[Work]:
    """Collective. Notes the start of the run, and opens what receives its metrics until `held` ends; returns the works."""
    is_main = run.world.is_main
    # Only rank 0 sends rows.
    sinks = open_sinks(run.config, run.folder, is_new=at.done == 0) if is_main else nullcontext(lambda row: None)
    send_row: Sink = on_every_rank(lambda: held.enter_context(sinks), run.device)
    # Only now: a run whose sinks cannot be opened leaves its folder free.
    change = commits.describe_change(at.done) if commits is not None else None
    run.events.note_begin(at.done, at.num_steps, run.world.size, change)
    if commits is not None:
        # From the first step on, the ranks that are left after a loss can continue.
        with own_status().long_work("commit"):
            commits.commit(model, at.done, run.device)
    if is_main:
        # A request that came too late for an earlier start is forgotten.
        run.folder.take_end_request()
    shared: dict[str, Any] = {"run": run, "model": model, "observer": observer}
    return [
        PlaceCentres(**shared, is_due=lambda: at.is_last),
        Evaluate(**shared),
        ReportMetrics(**shared, signals=signals, commits=commits, send_row=send_row),
        *([Commit(**shared, commits=commits)] if commits is not None else []),
        PlaceCentres(**shared, is_due=lambda: at.stop is Stop.EARLY),
        Save(**shared, writer=writer),
    ]


@dataclass(kw_only=True)
class PlaceCentres(Work):
    """Moves the centres towards the means of their classes when the run ends."""

    is_due: Callable[[], bool]

    def after_step(self, at: Position, due: StepDuties) -> None:
        if self.is_due():
            with self.observer.paused("class means"):
                have_moved = place_centres(self.run, self.model)
            if have_moved:
                # The results of this step's evaluation are those of the earlier centres.
                at.results = None


@dataclass(kw_only=True)
class Evaluate(Work):
    """Evaluates the weights as they are now."""

    reported_errors: set[str] = field(default_factory=set)

    def after_step(self, at: Position, due: StepDuties) -> None:
        if due.is_evaluated:
            with self.observer.paused("evaluation"):
                at.results = evaluate_between_steps(self.run, self.model, at.done, self.reported_errors)
            at.numbers |= accuracies(at.results)
            self.run.events.note("evaluation", at.done, seconds=self.observer.meter.last_pause_s, **at.numbers)


@dataclass(kw_only=True)
class ReportMetrics(Work):
    """Sends a row of metrics, and exchanges errors and signals of all ranks.

    Ends the run on all ranks after an error of any rank: bad data, gradients that are not finite, a full disk.
    """

    signals: StopSignals
    commits: Commits | None
    send_row: Sink
    ends_early: bool = False
    """On rank 0: a callback or train.patience has asked to end the run here."""

    def __post_init__(self) -> None:
        self.slow_ranks = SlowRanks(self.run)
        rows = self.run.folder.read_metrics()
        # Of the first set, in every evaluation of the run.
        self.accuracies = [found for row in rows if (found := _first_accuracy(row)) is not None]

    def after_step(self, at: Position, due: StepDuties) -> None:
        if not due.is_reported:
            return
        run, limit, meter = self.run, self.observer.limit, self.observer.meter
        row = {"step": at.done, "epoch": at.done / run.loader.steps_per_epoch, "learning_rate": due.lr}
        row |= meter.read()
        limit.all_read()
        row |= self.slow_ranks.read(meter, at.done)
        if self.commits is not None:
            row["commit_s"] = self.commits.take_seconds()
        at.numbers |= {"loss": row["loss"]}
        allowed_s = limit.limit_s()
        if allowed_s and any(tracker.is_wanted(run.config.train) for tracker in TRACKERS):
            # A service that gets a copy may answer slowly without the job counting as hung.
            allowed_s = max(allowed_s, _SERVICES_S)
        with own_status().long_work("report", allowed_s=allowed_s):
            on_every_rank(partial(self._check_and_send, row | at.numbers), run.device)
        if row["skipped_steps"]:
            run.events.note("skip", at.done, num_steps=row["skipped_steps"])
        # Signals are exchanged at reports only, so other steps need no additional collective.
        own = Stop.EARLY if self.ends_early else Stop.NO
        at.stop = Stop.NO if due.is_last else self.signals.of_any_rank(run.device, own)
        at.detail = describe_row(row, self.slow_ranks.describe())

    def _check_and_send(self, row: dict[str, Any]) -> None:
        self.observer.data_errors.check()
        on_nan, is_scaled = self.run.config.train.on_nan, self.model.loss_scale.is_dynamic
        check_finite(row, int(row["step"]), on_nan, is_scaled, self.observer.meter.skipped_in_row)
        self.send_row(row)
        if self.run.world.is_main:
            # All of them are called, also if the first one has asked to end the run.
            asked = [callback(dict(row)) is True for callback in self.run.callbacks]
            self.ends_early = any([*asked, self._is_past_patience(row), self.run.folder.take_end_request()])

    def _is_past_patience(self, row: dict[str, Any]) -> bool:
        """Tells whether the last train.patience evaluations brought no better accuracy than an earlier one."""
        patience = self.run.config.train.patience
        accuracy = _first_accuracy(row)
        if not patience or accuracy is None:
            return False
        self.accuracies.append(accuracy)
        best = self.accuracies.index(max(self.accuracies))
        if len(self.accuracies) - 1 - best < patience:
            return False
        evaluations = "1 evaluation" if patience == 1 else f"{patience} evaluations"
        _logger.info(
            f"the run ends after step {row['step']:,}: the last {evaluations} brought no better accuracy than "
            f"{self.accuracies[best]:.2%} (train.patience={patience})."
        )
        return True


@dataclass(kw_only=True)
class Commit(Work):
    """Keeps the state in the memory of an elastic job, and learns whether its ranks are about to change."""

    commits: Commits

    def after_step(self, at: Position, due: StepDuties) -> None:
        self.commits.step_done(at.done)
        if due.is_committed and not at.stop:
            with own_status().long_work("commit"):
                at.change = self.commits.commit(self.model, at.done, self.run.device)


@dataclass(kw_only=True)
class Save(Work):
    """Averages the batch statistics over the ranks and starts a checkpoint, written during the next steps."""

    writer: CheckpointWriter

    def after_step(self, at: Position, due: StepDuties) -> None:
        # When ranks leave, one may take along the only copy of another's centres.
        if not (due.is_saved or at.stop or (at.is_regrouping and at.change.has_removals)):
            return
        _logger.debug(f"saving a checkpoint of step {at.done}")
        head = self.model.head
        with own_status().long_work("saving"):
            average_buffers_(self.model.backbone)
            self.writer.save(
                Snapshot(
                    step=at.done,
                    shared=self.model.shared_state(),
                    head_rows=head.rows(),
                    class_start=head.classes.start,
                    class_stop=head.classes.stop,
                    num_classes=head.num_classes,
                    rank_state=generator_states(self.run.device),
                    metrics=at.numbers,
                )
            )


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
    return "  ".join([*parts, slow_rank] if slow_rank else parts)


# ---- evaluation of the model in training, at the end or between two steps -----------------------------------------


def evaluate_model(run: Run, model: Model, network: nn.Module, *, has_bar: bool = False) -> list[SetResult]:
    """Collective. Evaluates the sets next to the data, or those of train.evaluate_sets; all ranks embed a part.

    A set that cannot be evaluated has the error in its result, because it must not end a long run.
    network: of model.for_evaluation(). has_bar: rank 0 shows the progress; not between steps, where the bar of the training
    is on the screen.
    """
    config = run.config
    # Rank 0 looks for the files: on a shared disk that is slow to show new ones, ranks would evaluate different sets.
    chosen = sets_of_main_rank(lambda: sets_in_training(config.data.path, config.train.evaluate_sets), run.device)
    if chosen and run.world.is_main:
        _logger.info(f"evaluating on {', '.join(one.name for one in chosen)}")
    evaluator = Evaluator(
        network=network,
        image_size=run.image_size,
        device=run.device,
        num_threads=config.data.threads,
        fit=config.data.fit,
        mirror=config.data.mirror,
        centres=lambda: _own_centres(run, model),
    )
    with bar_on_demand("embedding images") if has_bar and run.world.is_main else nullcontext(None) as show:

        def note_progress(done: int, total: int) -> None:
            # Shows the agent that the evaluation advances, and how far it is; it may take any time.
            own_status().progress(allowed_s=0.0, phase="evaluation", detail=f"{done:,} of {total:,} images")
            if show is not None:
                show(done, total)

        return evaluate_sets(replace(evaluator, on_progress=note_progress), chosen)


def _own_centres(run: Run, model: Model) -> ClassShard:
    head = model.head
    weight, is_cosine = head.rows()["weight"], head.settings.is_cosine
    shard = ClassShard.of(weight, head.classes.start, run.classes, len(head.classes), is_cosine=is_cosine)
    labels = run.source.labels
    return replace(shard, num_images_C=np.bincount(labels[labels >= 0], minlength=head.num_classes))


def evaluate_between_steps(run: Run, model: Model, step: int, reported_errors: set[str]) -> list[SetResult]:
    """Collective. Evaluates the weights that would be exported now; training continues unchanged afterwards.

    Rank 0 logs the accuracies after `step` steps, and why a set could not be evaluated, once: errors in `reported_errors`
    are not repeated, new ones are added.
    """
    # With local batch norm each rank has statistics of its own; the exported model has their average.
    average_buffers_(model.backbone)
    with model.for_evaluation() as network:
        results = evaluate_model(run, model, network)
    errors = {f"{result.name}: {result.error}" for result in results if result.error is not None} - reported_errors
    if run.world.is_main:
        if done := [f"{result.name} {headline(result)}" for result in results if result.error is None]:
            _logger.info(f"step {step:,}: {', '.join(done)}")
        for error in sorted(errors):
            _logger.info(f"not evaluated: {error}")
    reported_errors |= errors
    return results


def accuracies(results: list[SetResult]) -> dict[str, float]:
    """Returns the accuracy of each set by name, and those of the first one of pairs and of the first to classify by kind."""
    found = {result.name: float(result.numbers["accuracy"]) for result in results if "accuracy" in result.numbers}
    tops = {result.name: float(result.numbers["top_k"]["1"]) for result in results if "top_k" in result.numbers}
    first = {kind: next(iter(of_kind.values())) for kind, of_kind in ((ACCURACY, found), (TOP_1, tops)) if of_kind}
    return first | {f"accuracy_{name}": accuracy for name, accuracy in (found | tops).items()}


def _first_accuracy(row: Mapping[str, Any]) -> float | None:
    """Returns the number by which evaluations are compared: that of verification, else that of classification."""
    return next((row[kind] for kind in (ACCURACY, TOP_1) if isinstance(row.get(kind), float)), None)
