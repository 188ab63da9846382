"""Evaluation of the model in training by all ranks together, at the end or between two steps."""

import logging
from contextlib import nullcontext
from dataclasses import replace

from megaclass.data.sources.open_source import verification_files
from megaclass.distributed.agreement import paths_of_main_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.evaluation.protocol import Evaluator, SetResult
from megaclass.evaluation.results import headline
from megaclass.evaluation.sets import evaluate_sets, find_sets
from megaclass.progress import bar_on_demand
from megaclass.training.model.build import Model
from megaclass.training.run.run import Run
from megaclass_launch.rank_status import own_status

_logger = logging.getLogger("megaclass.training")


def evaluate_model(run: Run, model: Model, *, has_bar: bool = False) -> list[SetResult]:
    """Collective. Evaluates the *.bin files next to the data by the published ten-fold protocol; all ranks embed a part.

    A set that cannot be evaluated has the error in its result, because it must not end a long run.
    has_bar: rank 0 shows the progress; not between steps, where the bar of the training is on the screen.
    """
    config = run.config
    # Rank 0 looks for the files: on a shared disk that is slow to show new ones, ranks would evaluate different sets.
    sets = find_sets(paths_of_main_rank(lambda: verification_files(config.data.path), run.device))
    wanted = config.train.evaluate_sets
    chosen = [one for one in sets if not wanted or one.name in wanted]
    if chosen and run.world.is_main:
        _logger.info(f"evaluating on {', '.join(one.name for one in chosen)}")
    evaluator = Evaluator(
        network=model.backbone,
        image_size=run.image_size,
        device=run.device,
        num_threads=config.data.threads,
        fit=config.data.fit,
        mirror=config.data.mirror,
    )
    with bar_on_demand("embedding images") if has_bar and run.world.is_main else nullcontext(_no_bar) as show:

        def note_progress(done: int, total: int) -> None:
            # Shows the agent that the evaluation advances, and how far it is; it may take any time.
            own_status().progress(allowed_s=0.0, phase="evaluation", detail=f"{done:,} of {total:,} images")
            show(done, total)

        results = evaluate_sets(replace(evaluator, on_progress=note_progress), chosen)
    found = {one.name for one in sets}
    return results + [_missing(name, config.data.path) for name in wanted if name not in found]


def _no_bar(done: int, total: int) -> None:
    """Shows nothing, between steps and on all ranks but rank 0."""


def _missing(name: str, data_path: str) -> SetResult:
    reason = f"train.evaluate_sets names {name}, but there is no {name}.bin next to the data at {data_path}."
    return SetResult(name=name, kind="pairs", path=f"{name}.bin", error=reason)


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
    """Returns the accuracy of each set by name, and that of the first one as `verification_accuracy`."""
    found = {result.name: float(result.numbers["accuracy"]) for result in results if "accuracy" in result.numbers}
    first = {"verification_accuracy": next(iter(found.values()))} if found else {}
    return first | {f"accuracy_{name}": accuracy for name, accuracy in found.items()}
