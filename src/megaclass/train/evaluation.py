"""Evaluation of what is being trained, by all ranks together: at the end, or between two steps."""

import sys

import torch

from megaclass.config.schema import Config
from megaclass.data.sources.open_source import verification_files
from megaclass.distributed.collectives import group_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.evaluate.protocol import Evaluator, SetResult
from megaclass.evaluate.sets import evaluate_sets, find_sets
from megaclass.train.build import Model


def evaluate_model(config: Config, model: Model, image_size: tuple[int, int], device: torch.device) -> list[SetResult]:
    """Collective. The *.bin files beside the data, in the published ten-fold protocol; all ranks embed a part.

    A set that cannot be evaluated is noted in its result: it must not take a long run with it.
    """
    evaluator = Evaluator(
        network=model.backbone,
        image_size=image_size,
        device=device,
        num_threads=config.data.threads,
        fit=config.data.fit,
        mirror=config.data.mirror,
    )
    sets = find_sets(verification_files(config.data.path))
    wanted = config.train.evaluate_sets
    results = evaluate_sets(evaluator, [one for one in sets if not wanted or one.name in wanted])
    found = {one.name for one in sets}
    return results + [_missing(name, config.data.path) for name in wanted if name not in found]


def _missing(name: str, data_path: str) -> SetResult:
    reason = f"train.evaluate_sets names {name}, but there is no {name}.bin beside the data at {data_path}."
    return SetResult(name=name, kind="pairs", path=f"{name}.bin", error=reason)


def evaluate_between_steps(
    config: Config, model: Model, image_size: tuple[int, int], device: torch.device, errors_told: set[str]
) -> list[SetResult]:
    """Collective. Of the weights that would be exported now; training goes on unchanged.

    Rank 0 says why a set could not be evaluated, once: `errors_told` are those it said before.
    """
    average_buffers_(model.backbone)
    with model.for_evaluation():
        results = evaluate_model(config, model, image_size, device)
    errors = {f"{result.name}: {result.error}" for result in results if result.error is not None} - errors_told
    if group_rank(None) == 0:
        for error in sorted(errors):
            print(f"megaclass: not evaluated: {error}", file=sys.stderr, flush=True)
    errors_told |= errors
    return results


def accuracies(results: list[SetResult]) -> dict[str, float]:
    """The accuracy of each set by name, and of the first one as `verification_accuracy`."""
    found = {result.name: float(result.numbers["accuracy"]) for result in results if "accuracy" in result.numbers}
    first = {"verification_accuracy": next(iter(found.values()))} if found else {}
    return first | {f"accuracy_{name}": accuracy for name, accuracy in found.items()}
