"""Going on from a checkpoint: which one, whether it is of this run, and its state on this number of ranks."""

import sys
import tomllib
from pathlib import Path

import torch

from megaclass.checkpoint.class_names import (
    ClassList,
    ClassMatch,
    describe_difference,
    describe_match,
    match_classes,
    saved_classes,
)
from megaclass.checkpoint.load import (
    copy_matched_rows,
    first_whole_on_all_ranks,
    load_rank_state,
    load_shared,
    saved_rows,
)
from megaclass.checkpoint.manifest import Manifest, read_manifest
from megaclass.checkpoint.retention import best_folder, published, set_aside_after
from megaclass.checkpoint.tensor_file import tensors_with_prefix
from megaclass.config.read import load_config_values, settings_with_changes
from megaclass.config.schema import Config
from megaclass.data.fingerprint import DataMarks, foreign_class
from megaclass.data.sources.source import ImageSource
from megaclass.distributed.agreement import (
    on_every_rank,
    on_every_rank_for_long,
    on_main_rank,
    on_main_rank_for_long,
)
from megaclass.distributed.collectives import gather_blocks
from megaclass.errors import CheckpointError, ConfigError
from megaclass.insightface.checkpoints import check_fits
from megaclass.train.build import Model
from megaclass.train.run.folder import RunFolder
from megaclass.train.run.generators import restore_generators
from megaclass.world import World


def resume_run(
    config: Config,
    model: Model,
    run: RunFolder,
    where: str,
    source: ImageSource,
    classes: ClassList,
    marks: DataMarks,
    world: World,
    device: torch.device,
    *,
    matches_classes: bool,
    trusts_numbers: bool = False,
) -> int:
    """Collective. Loads a checkpoint on every rank; returns the step to go on with.

    where: "auto" for the newest whole checkpoint of the run folder, "best" for the best one, or a checkpoint's path.
    marks: what the data is known by, on rank 0.
    matches_classes: a changed list of classes is matched by name, or by number where there are no names; otherwise it is
    refused.
    trusts_numbers: classes without names are the same under the same numbers, whatever their images say.
    """
    folder = _choose(config, run, where, device)

    def check() -> None:
        manifest = read_manifest(folder)
        saved = saved_classes(folder, manifest)
        if not matches_classes:
            _check_classes(saved, classes, folder)
        if not trusts_numbers:
            check_same_people(manifest.data, marks, source, saved, classes, folder)
        if saved == classes and manifest.data.fingerprint not in ("", marks.fingerprint):
            changed = _describe_fingerprints(manifest.data, marks, folder)
            print(f"megaclass: the data has changed, going on with it: {changed}", file=sys.stderr, flush=True)
        print(f"megaclass: resuming from {folder}, step {manifest.step}", file=sys.stderr, flush=True)

    on_main_rank_for_long(check, device)
    saved = on_every_rank(lambda: saved_classes(folder, read_manifest(folder)), device)
    match = match_on_all_ranks(saved, classes, model, world, device, str(folder)) if saved != classes else None
    step = on_every_rank_for_long(lambda: _load(model, folder, match, world, device), device)
    on_main_rank(lambda: _leave_later_ones(run, step), device)
    return step


def _choose(config: Config, run: RunFolder, where: str, device: torch.device) -> Path:
    """Collective. Every byte of what it returns has been checked."""
    candidates: list[Path] = []

    def list_candidates() -> list[Path]:
        candidates.append(Path(where))
        if where in ("auto", "best"):
            candidates[:] = published(run.checkpoints)[::-1]
            best = best_folder(candidates[::-1])
            if where == "best" and best is not None:
                candidates[:] = [best]
        return candidates

    found, passed_over = first_whole_on_all_ranks(
        list_candidates, device, lambda folder, manifest: _check_same_run(manifest, config, folder)
    )

    def report() -> None:
        if found is None and len(candidates) == 1:
            raise CheckpointError(passed_over[0])
        for reason in passed_over:
            print(f"megaclass: passed over a checkpoint: {reason}", file=sys.stderr)
        if found is None:
            raise CheckpointError(f"There is no whole checkpoint in {run.checkpoints} to resume this run from.")

    on_main_rank(report, device)
    assert found is not None
    return found


def _leave_later_ones(run: RunFolder, step: int) -> None:
    """Rank 0. What this run comes to after `step` takes the place of what lies there; nothing that took hours is removed."""
    for left in set_aside_after(run.checkpoints, step):
        print(
            f"megaclass: set aside as {left.name}: a checkpoint of a later step, which is no part of this run any more. "
            f"Remove it if nobody needs it.",
            file=sys.stderr,
            flush=True,
        )
    run.forget_metrics_after(step)


def _load(model: Model, folder: Path, match: ClassMatch | None, world: World, device: torch.device) -> int:
    manifest = read_manifest(folder)
    shared = load_shared(folder)
    check_fits(model.backbone, tensors_with_prefix(shared, "backbone."), folder)
    model.load_shared_state(shared)
    own = model.head.classes
    if match is None:
        for first_class, rows in saved_rows(folder, manifest, own.start, own.stop):
            model.head.load_rows(first_class, rows)
    else:
        shards = saved_rows(folder, manifest, 0, manifest.num_classes)
        copy_matched_rows(shards, model.head.rows(), match.saved_K, model.head.store.num_subcentres, str(folder))
        model.head.accept_rows()
    model.head.step_count = manifest.step
    if manifest.world_size == world.size:
        restore_generators(load_rank_state(folder, manifest, world.rank), device)
    return manifest.step


def match_on_all_ranks(
    saved: ClassList, classes: ClassList, model: Model, world: World, device: torch.device, where: str
) -> ClassMatch:
    """Collective. Where this rank's classes stood in the saved list; rank 0 prints how many of each kind there are."""
    own = model.head.classes
    match = on_every_rank(lambda: match_classes(saved, classes, own.start, own.stop), device)
    counts = torch.tensor([match.num_same, match.num_renumbered, match.num_new], device=device)
    num_same, num_renumbered, num_new = gather_blocks(counts, None).sum(0).tolist()
    if not num_same + num_renumbered:
        raise CheckpointError(
            f"None of the {classes.num_classes:,} classes of the data is among the {saved.num_classes:,} of {where}: "
            f"are both lists names, or both numbers?"
        )
    if world.is_main:
        table = describe_match(num_same, num_renumbered, num_new, saved.num_classes)
        print(
            f"megaclass: classes matched by {classes.kind_of_name} with {where}\n{table}", file=sys.stderr, flush=True
        )
    return match


def _check_classes(saved: ClassList, classes: ClassList, folder: Path) -> None:
    if difference := describe_difference(saved, classes):
        raise CheckpointError(f"{folder} has other classes: {difference}.")


def check_same_people(
    saved: DataMarks, marks: DataMarks, source: ImageSource, saved_list: ClassList, classes: ClassList, where: Path
) -> None:
    """Refuses to find classes by number where their images say that the people are others.

    Classes without names are told from others by their images alone: a class that still exists must hold one of those
    that it is known by. More or fewer images of the same classes, in any order or format, go on, and so does everything
    where classes have names.
    """
    if saved_list.text or classes.text or not saved.fingerprint or saved.fingerprint == marks.fingerprint:
        return
    left = {label: images for label, images in saved.class_images.items() if int(label) < source.num_classes}
    foreign = foreign_class(DataMarks(fingerprint=saved.fingerprint, class_images=left), source)
    if foreign is not None:
        raise CheckpointError(
            f"{where} was trained on other data: class {foreign} holds none of the images that it is known by "
            f"({_describe_fingerprints(saved, marks, where)}). If the classes are the same ones under the same numbers, and "
            f"their images were only encoded anew, --same-numbers goes on; a classes.txt beside the data of both runs "
            f"finds people by name instead."
        )


def _describe_fingerprints(saved: DataMarks, marks: DataMarks, where: Path) -> str:
    return f"fingerprint of the data {saved.fingerprint} in {where}, {marks.fingerprint} now"


def _check_same_run(manifest: Manifest, config: Config, folder: Path) -> None:
    try:
        # Through Config, so that a setting which is newer than the checkpoint counts as its default.
        saved_config = load_config_values(tomllib.loads(manifest.config), where=f"the settings in {folder}")
    except (ConfigError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise CheckpointError(f"{folder} has settings that this version does not know: {error}") from error
    differences = sorted(
        f"{name} was {_shown(before)}, is {_shown(now)}"
        for name, before, now in settings_with_changes(saved_config, config)
    )
    if differences:
        raise CheckpointError(f"{folder} belongs to another run: {'; '.join(differences)}.")


def _shown(value: object) -> object:
    return "unset" if value is None else list(value) if isinstance(value, tuple) else value
