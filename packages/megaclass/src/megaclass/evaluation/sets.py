"""Finds the evaluation sets at the paths given with `--on`, and evaluates them one by one.

A set that cannot be evaluated is noted in its result; the other sets still run.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megaclass.data.sources.open_source import check_source, verification_files
from megaclass.data.tools.split import held_out_images
from megaclass.distributed.agreement import text_of_main_rank
from megaclass.errors import DataError
from megaclass.evaluation.protocol import EvaluationSet, Evaluator, SetResult
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.protocols.classification import ClassificationProtocol
from megaclass_launch.errors import UserError


def find_sets(paths: Sequence[Path], labelled: Sequence[Path] = ()) -> list[EvaluationSet]:
    """Returns the sets at the paths; a path at which no protocol recognises anything is an error.

    labelled: labelled images that are to be classified, in any form that training reads.
    """
    found: list[EvaluationSet] = []
    for path in paths:
        here = next((sets for protocol in PROTOCOLS.values() if (sets := protocol.find(path))), [])
        if not here:
            expected = ", or ".join(protocol.found_at for protocol in PROTOCOLS.values() if protocol.found_at)
            reason = "nothing of that kind is in it" if path.is_dir() else "it is neither"
            pairs = (
                f" Labelled images, which are to be classified: --classify {path}. Pairs of the images in a folder: "
                f"megaclass data pairs {path} --out {path}.bin"
                if path.is_dir()
                else ""
            )
            raise DataError(
                f"Cannot evaluate on {path}: expected {expected}, but "
                f"{reason if path.exists() else 'the path does not exist'}.{pairs}"
            )
        found += here
    for path in labelled:
        check_source(path)
        found.append(classification_set(path))
    return _with_distinct_names(found)


def classification_set(path: Path) -> EvaluationSet:
    # Not the bare name: `data split` writes pairs of the images in holdout/ to holdout.bin.
    name = f"{path.stem if path.is_file() else path.absolute().name}-classes"
    return EvaluationSet(name=name, kind=ClassificationProtocol.kind, path=path)


def sets_in_training(data_path: str, wanted: Sequence[str]) -> list[EvaluationSet]:
    """Returns the sets that a run evaluates: those that lie next to its data, or the wanted ones of them.

    Next to the data lie `.bin` files, a holdout.rec, and the other part of `data split --images`. wanted: names of sets, or
    paths of labelled images anywhere.
    """
    labelled = held_out_images(data_path)
    near = _with_distinct_names([*find_sets(verification_files(data_path)), *map(classification_set, labelled)])
    if not wanted:
        return near
    named = {one.name: one for one in near}
    return _with_distinct_names([named.get(name) or classification_set(Path(name)) for name in wanted])


def sets_of_main_rank(
    action: Callable[[], Sequence[EvaluationSet]], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[EvaluationSet]:
    """Collective. Runs the action on rank 0 and returns its sets on every rank: their hosts may show different files."""

    def told() -> str:
        return json.dumps([[one.name, one.kind, str(one.path), one.probes and str(one.probes)] for one in action()])

    sets = json.loads(text_of_main_rank(told, device, group))
    return [
        EvaluationSet(name=name, kind=kind, path=Path(path), probes=probes and Path(probes))
        for name, kind, path, probes in sets
    ]


def evaluate_sets(evaluator: Evaluator, sets: Sequence[EvaluationSet]) -> list[SetResult]:
    """Collective. Returns one result per set; an error that a user can fix is noted in the result of its set."""
    results = []
    for one in sets:
        try:
            result = PROTOCOLS[one.kind].evaluate(evaluator, one)
            if not evaluator.mirror:
                # Published numbers add the mirrored image. Without it they are not comparable, so they are marked.
                result = replace(result, numbers={**result.numbers, "mirror": False})
        except (UserError, OSError) as error:  # raised on all ranks or none: see on_every_rank
            result = SetResult(name=one.name, kind=one.kind, path=str(one.path), error=str(error))
        results.append(result)
    return results


def _with_distinct_names(sets: list[EvaluationSet]) -> list[EvaluationSet]:
    """Makes names unique, because results are stored by name; a set that is given twice counts once.

    Two lfw.bin of different folders become parent-lfw, with as many parents as it takes; lfw.bin and lfw.txt of one folder
    keep their suffixes.
    """
    sets = list({(one.kind, one.path.absolute()): one for one in sets}.values())
    places = [(one.path.absolute().parent, one.name) for one in sets]
    names = [one.path.name if places.count(place) > 1 else one.name for one, place in zip(sets, places, strict=True)]
    shared = {name for name in names if names.count(name) > 1}
    num_parents = 0
    distinct = names
    while len(set(distinct)) < len(distinct):
        num_parents += 1
        distinct = [
            "-".join([*one.path.absolute().parts[-1 - num_parents : -1], name]) if name in shared else name
            for one, name in zip(sets, names, strict=True)
        ]
    return [replace(one, name=name) for one, name in zip(sets, distinct, strict=True)]
