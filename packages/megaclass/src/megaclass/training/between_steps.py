"""The work of the ranks between two steps, in this order.

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
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megaclass.checkpoint.retention import ACCURACY, TOP_1
from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.evaluation.centres import ClassShard
from megaclass.evaluation.protocol import Evaluator, SetResult
from megaclass.evaluation.results import headline
from megaclass.evaluation.sets import evaluate_sets, sets_in_training, sets_of_main_rank
from megaclass.progress import Bar, bar_on_demand, no_bar, progress_bar
from megaclass.training.class_means import place_centres
from megaclass.training.commits import Change, Commits
from megaclass.training.data_errors import DataErrors
from megaclass.training.metrics import Meter, StepClock, check_finite
from megaclass.training.model.build import Model, generator_states
from megaclass.training.observer import Observer
from megaclass.training.run.run import Run
from megaclass.training.run.signals import Stop, StopSignals
from megaclass.training.schedule import StepDuties
from megaclass.training.sinks import Sink, no_sinks, open_sinks
from megaclass_launch.rank_status import own_status

_logger = logging.getLogger("megaclass.training")
# The progress bar shows the data wait above this share.
_SHOWN_WAIT_SHARE = 0.05


class BetweenSteps:
    """The work between the steps of one rank, and the position of the loop. Used by the loop alone."""

    def __init__(
        self,
        run: Run,
        model: Model,
        done: int,
        num_steps: int,
        writer: CheckpointWriter,
        signals: StopSignals,
        commits: Commits | None,
    ) -> None:
        self._run, self._model = run, model
        self._writer, self._signals, self._commits = writer, signals, commits
        self.clock, self.data_errors = StepClock(run.device, model.backbone), DataErrors()
        # A run that is resumed after its last step trains nothing: its last loss and speed come from the metrics it wrote.
        rows = run.folder.read_metrics()
        self.meter = Meter(run.config.train.global_batch, rows, run.device, self.clock)
        self.observer = Observer(run, self.clock, done)
        self._bar: Bar
        self._send_row: Sink
        self._reported_errors: set[str] = set()
        self._duties: StepDuties | None = None
        """Of the last step done; None before the first one."""
        self._num_steps = num_steps
        self._change = Change()
        """The ranks of an elastic job that are about to change."""
        self.done = done
        """Steps done since the start of the run."""
        self.results: list[SetResult] | None = None
        """The evaluation after the last step done, if there was one."""
        self.stop = Stop.NO
        """The request to stop before the last step, if there is one."""
        self._ends_early = False
        """On rank 0: a callback or train.patience has asked to end the run here."""
        self._accuracies: list[float] = [found for row in rows if (found := _first_accuracy(row)) is not None]
        """Of the first set, in every evaluation of the run."""

    @property
    def is_regrouping(self) -> bool:
        """True once the ranks have agreed to leave their generation, because hosts have changed."""
        is_last = self._duties is not None and self._duties.is_last
        return self._change.is_wanted and not is_last and not self.stop

    @property
    def is_over(self) -> bool:
        return bool(self.stop) or self.is_regrouping

    def open(self, held: ExitStack) -> None:
        """Collective. Notes the start of the run, and opens what receives its metrics until `held` ends."""
        run, is_main = self._run, self._run.world.is_main
        sinks = open_sinks(run.config, run.folder, is_new=self.done == 0) if is_main else no_sinks()
        self._send_row = on_every_rank(lambda: held.enter_context(sinks), run.device)
        # Only now: a run whose sinks cannot be opened leaves its folder free.
        change = self._commits.describe_change(self.done) if self._commits is not None else None
        run.events.note_begin(self.done, self._num_steps, run.world.size, change)
        # From the first step on, the ranks that are left after a loss can continue.
        self._commit()
        bar = progress_bar("training", self._num_steps, start=self.done) if is_main else no_bar()
        self._bar = held.enter_context(bar)
        if is_main:
            # A request that came too late for an earlier start is forgotten.
            run.folder.take_end_request()

    def after_step(self, duties: StepDuties) -> None:
        """Collective. Does what is due after this step."""
        self.done += 1
        self._duties = duties
        # Loss and accuracies of this very step, or none: the best checkpoint is chosen by them.
        numbers: dict[str, float] = {}
        detail, self.results = "", None
        if duties.is_last:
            self._place_centres()
        if duties.is_evaluated:
            numbers = self._evaluate()
        if duties.is_reported:
            detail = self._report(duties, numbers)
        self._bar.advance_to(self.done, detail)
        if self._commits is not None:
            self._commits.step_done(self.done)
            if duties.is_committed and not self.stop:
                self._commit()
        if self.stop is Stop.EARLY:
            self._place_centres()
        # When ranks leave, one may take along the only copy of another's centres.
        if duties.is_saved or self.stop or (self.is_regrouping and self._change.has_removals):
            self._save(numbers)

    def _place_centres(self) -> None:
        with self.meter.paused(), self.observer.long_work("class means"):
            place_centres(self._run, self._model)

    def _evaluate(self) -> dict[str, float]:
        with self.meter.paused(), self.observer.long_work("evaluation"):
            self.results = evaluate_between_steps(self._run, self._model, self.done, self._reported_errors)
        numbers = accuracies(self.results)
        self._run.events.note("evaluation", self.done, seconds=self.meter.last_pause_s, **numbers)
        return numbers

    def _report(self, duties: StepDuties, numbers: dict[str, float]) -> str:
        """Returns the text behind the progress bar; adds the loss to the numbers.

        Ends the run on all ranks after an error of any rank: bad data, gradients that are not finite, a full disk.
        """
        run, device = self._run, self._run.device
        row = {"step": self.done, "epoch": self.done / run.loader.steps_per_epoch, "learning_rate": duties.lr}
        row |= self.meter.read()
        row |= self.observer.read(self.meter, self.done)
        if self._commits is not None:
            row["commit_s"] = self._commits.take_seconds()
        numbers |= {"loss": row["loss"]}
        with self.observer.reporting():
            on_every_rank(partial(self._check_and_send, row | numbers), device)
        if row["skipped_steps"]:
            run.events.note("skip", self.done, num_steps=row["skipped_steps"])
        # Signals are exchanged at reports only, so other steps need no additional collective.
        own = Stop.EARLY if self._ends_early else Stop.NO
        self.stop = Stop.NO if duties.is_last else self._signals.of_any_rank(device, own)
        return describe_row(row, self.observer.describe_slow())

    def _check_and_send(self, row: dict[str, Any]) -> None:
        self.data_errors.check()
        on_nan, is_scaled = self._run.config.train.on_nan, self._model.loss_scale.is_dynamic
        check_finite(row, int(row["step"]), on_nan, is_scaled, self.meter.skipped_in_row)
        self._send_row(row)
        if self._run.world.is_main:
            # All of them are called, also if the first one has asked to end the run.
            asked = [callback(dict(row)) is True for callback in self._run.callbacks]
            self._ends_early = any([*asked, self._is_past_patience(row), self._run.folder.take_end_request()])

    def _is_past_patience(self, row: dict[str, Any]) -> bool:
        """Tells whether the last train.patience evaluations brought no better accuracy than an earlier one."""
        patience = self._run.config.train.patience
        accuracy = _first_accuracy(row)
        if not patience or accuracy is None:
            return False
        self._accuracies.append(accuracy)
        best = self._accuracies.index(max(self._accuracies))
        if len(self._accuracies) - 1 - best < patience:
            return False
        evaluations = "1 evaluation" if patience == 1 else f"{patience} evaluations"
        _logger.info(
            f"the run ends after step {self.done:,}: the last {evaluations} brought no better accuracy than "
            f"{self._accuracies[best]:.2%} (train.patience={patience})."
        )
        return True

    def _commit(self) -> None:
        if self._commits is not None:
            with self.observer.long_work("commit"):
                change = self._commits.commit(self._model, self.done, self._run.device)
            # Before the first step a commit keeps the state only.
            self._change = change if self._duties is not None else self._change

    def _save(self, numbers: dict[str, float]) -> None:
        """Averages the batch statistics over the ranks and starts a checkpoint, written during the next steps."""
        _logger.debug(f"saving a checkpoint of step {self.done}")
        head = self._model.head
        with self.observer.long_work("saving"):
            average_buffers_(self._model.backbone)
            self._writer.save(
                Snapshot(
                    step=self.done,
                    shared=self._model.shared_state(),
                    head_rows=head.rows(),
                    class_start=head.classes.start,
                    class_stop=head.classes.stop,
                    num_classes=head.num_classes,
                    rank_state=generator_states(self._run.device),
                    metrics=numbers,
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


def evaluate_model(run: Run, model: Model, *, has_bar: bool = False) -> list[SetResult]:
    """Collective. Evaluates the sets next to the data, or those of train.evaluate_sets; all ranks embed a part.

    A set that cannot be evaluated has the error in its result, because it must not end a long run.
    has_bar: rank 0 shows the progress; not between steps, where the bar of the training is on the screen.
    """
    config = run.config
    # Rank 0 looks for the files: on a shared disk that is slow to show new ones, ranks would evaluate different sets.
    chosen = sets_of_main_rank(lambda: sets_in_training(config.data.path, config.train.evaluate_sets), run.device)
    if chosen and run.world.is_main:
        _logger.info(f"evaluating on {', '.join(one.name for one in chosen)}")
    evaluator = Evaluator(
        network=model.backbone,
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
    shard = ClassShard.of(head.rows()["weight"], head.classes.start, run.classes, len(head.classes))
    labels = run.source.labels
    return replace(shard, num_images_C=np.bincount(labels[labels >= 0], minlength=head.num_classes))


def evaluate_between_steps(run: Run, model: Model, step: int, reported_errors: set[str]) -> list[SetResult]:
    """Collective. Evaluates the weights that would be exported now; training continues unchanged afterwards.

    Rank 0 logs the accuracies after `step` steps, and why a set could not be evaluated, once: errors in `reported_errors`
    are not repeated, new ones are added.
    """
    # With local batch norm each rank has statistics of its own; the exported model has their average.
    average_buffers_(model.backbone)
    with model.for_evaluation():
        results = evaluate_model(run, model)
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
