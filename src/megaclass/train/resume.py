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
from megaclass.checkpoint.insightface import check_fits
from megaclass.checkpoint.load import copy_matched_rows, first_whole, load_rank_state, load_shared, saved_rows
from megaclass.checkpoint.manifest import Manifest, read_manifest
from megaclass.checkpoint.retention import best_folder, published
from megaclass.config import Config, load_config_values, to_toml
from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.distributed.collectives import gather_blocks
from megaclass.errors import CheckpointError, ConfigError
from megaclass.train.build import Model
from megaclass.train.generators import restore_generators
from megaclass.train.run_folder import RunFolder
from megaclass.world import World

# Settings that may change between a run and its continuation without making it another run.
_MAY_CHANGE = {
    "train.run_dir",
    "train.nproc",
    "train.device",
    "train.epochs",
    "train.report_steps",
    "train.checkpoint_epochs",
    "train.keep_checkpoints",
    "train.async_checkpoints",
    "train.init_backbone",
    "train.init_centres",
    "train.on_nan",
    "train.evaluate_epochs",
    "train.compile",
    "train.tensorboard",
    "train.wandb_project",
    "data.path",
    "data.threads",
    "data.stage",
    "data.max_bad_fraction",
    "head.kernel",
    "head.stored_gib",
    "export.onnx",
}
_NAME_BYTES = 256


def resume_run(
    config: Config,
    model: Model,
    run: RunFolder,
    where: str,
    classes: ClassList,
    world: World,
    device: torch.device,
    *,
    matches_classes: bool,
) -> int:
    """Collective. Loads a checkpoint on every rank; returns the step to go on with.

    where: "auto" for the newest whole checkpoint of the run folder, "best" for the best one, or a checkpoint's path.
    matches_classes: a changed list of classes is matched by name; otherwise it is refused.
    """
    name = b""

    def choose() -> None:
        nonlocal name
        folder, step = _choose(config, run, where)
        manifest = read_manifest(folder)
        _check_classes(saved_classes(folder, manifest), classes, folder, matches_classes=matches_classes)
        name = folder.name.encode()
        print(f"megaclass: resuming from {folder}, step {step}", file=sys.stderr, flush=True)

    on_main_rank(choose, device)
    block = torch.tensor(list(name.ljust(_NAME_BYTES)), dtype=torch.uint8, device=device)
    chosen = bytes(gather_blocks(block, None)[0].tolist()).decode().strip()
    folder = run.checkpoints / chosen if where in ("auto", "best") else Path(where)
    saved = on_every_rank(lambda: saved_classes(folder, read_manifest(folder)), device)
    match = match_on_all_ranks(saved, classes, model, world, device, str(folder)) if saved != classes else None
    step = on_every_rank(lambda: _load(model, folder, match, world, device), device)
    on_main_rank(lambda: run.forget_metrics_after(step), device)
    return step


def _choose(config: Config, run: RunFolder, where: str) -> tuple[Path, int]:
    """Rank 0. Every byte of what it returns has been checked."""

    def fits(folder: Path, manifest: Manifest) -> None:
        _check_same_run(manifest, config, folder)

    candidates = [Path(where)]
    if where in ("auto", "best"):
        candidates = published(run.checkpoints)[::-1]
        best = best_folder(candidates[::-1])
        if where == "best" and best is not None:
            candidates = [best]
    found, passed_over = first_whole(candidates, fits)
    if found is None and len(candidates) == 1:
        raise CheckpointError(passed_over[0])
    for reason in passed_over:
        print(f"megaclass: passed over a checkpoint: {reason}", file=sys.stderr)
    if found is None:
        raise CheckpointError(f"There is no whole checkpoint in {run.checkpoints} to resume this run from.")
    return found, read_manifest(found).step


def _load(model: Model, folder: Path, match: ClassMatch | None, world: World, device: torch.device) -> int:
    manifest = read_manifest(folder)
    shared = load_shared(folder)
    check_fits(
        model.backbone,
        {name.removeprefix("backbone."): tensor for name, tensor in shared.items() if name.startswith("backbone.")},
        folder,
    )
    model.load_shared_state(shared)
    own = model.head.classes
    if match is None:
        for first_class, rows in saved_rows(folder, manifest, own.start, own.stop):
            model.head.load_rows(first_class, rows)
    else:
        shards = saved_rows(folder, manifest, 0, manifest.num_classes)
        copy_matched_rows(shards, model.head.rows(), match.saved_K, model.head.store.num_subcentres, str(folder))
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


def _check_classes(saved: ClassList, classes: ClassList, folder: Path, *, matches_classes: bool) -> None:
    if not matches_classes and (difference := describe_difference(saved, classes)):
        raise CheckpointError(f"{folder} has other classes: {difference}.")


def _check_same_run(manifest: Manifest, config: Config, folder: Path) -> None:
    try:
        # Through Config, so that a setting which is newer than the checkpoint counts as its default.
        saved_config = load_config_values(tomllib.loads(manifest.config), where=f"the settings in {folder}")
    except (ConfigError, tomllib.TOMLDecodeError) as error:
        raise CheckpointError(f"{folder} has settings that this version does not know: {error}") from error
    saved, current = (tomllib.loads(to_toml(each)) for each in (saved_config, config))
    names = {f"{section}.{key}" for tree in (saved, current) for section, part in tree.items() for key in part}
    differences = []
    for name in sorted(names - _MAY_CHANGE):
        section, key = name.split(".")
        before, now = saved.get(section, {}).get(key, "unset"), current.get(section, {}).get(key, "unset")
        if before != now:
            differences.append(f"{name} was {before}, is {now}")
    if differences:
        raise CheckpointError(f"{folder} belongs to another run: {'; '.join(differences)}.")
