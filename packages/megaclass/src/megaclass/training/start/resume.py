"""Weights of a start: resuming from a checkpoint, or beginning with the weights of another run, on any number of ranks.

A checkpoint is chosen, compared with this run, and loaded.
"""

import logging
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaclass.backbones.lora import evaluated_weights, wrapped_weights
from megaclass.backbones.timm_network import TimmNetwork, origin_of_weights
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
from megaclass.checkpoint.manifest import NAME, Manifest, read_manifest
from megaclass.checkpoint.retention import best_folder, published, set_aside_after
from megaclass.checkpoint.tensor_file import read_tensors, tensors_with_prefix
from megaclass.config.read import changes_refused_on_resume, load_config_values
from megaclass.config.schema import CLASS_MEANS, Config
from megaclass.data.fingerprint import DataFingerprint, foreign_class
from megaclass.distributed.agreement import (
    on_every_rank,
    on_every_rank_for_long,
    on_main_rank,
    on_main_rank_for_long,
    text_of_main_rank,
)
from megaclass.errors import CheckpointError
from megaclass.insightface.checkpoints import check_fits, load_backbone_, read_backbone, read_centre_shards
from megaclass.training.class_means import start_at_class_means
from megaclass.training.model.build import Model, restore_generators
from megaclass.training.run.folder import RunFolder
from megaclass.training.run.run import Run
from megaclass.training.schedule import Schedule
from megaclass.training.start.restart import StartMode
from megaclass_launch.errors import ConfigError
from megaclass_launch.ranks.collectives import gather_blocks

_logger = logging.getLogger("megaclass.training")
# A relative change of the learning rate on resume is announced from this size.
_LR_JUMP = 0.05


def resume_run(run: Run, model: Model, mode: StartMode) -> int:
    """Collective. Loads the checkpoint that `mode.resume` names on every rank; returns the step to continue with."""
    folder = _choose(run, mode)

    def check() -> None:
        manifest = read_manifest(folder)
        saved = saved_classes(folder, manifest)
        if not mode.matches_classes and (difference := describe_difference(saved, run.classes)):
            raise CheckpointError(f"{folder} has other classes: {difference}.")
        if not mode.trusts_numbers:
            _check_same_people(folder, run)
        if saved == run.classes and manifest.data.fingerprint not in ("", run.data_fingerprint.fingerprint):
            changed = _describe_fingerprints(manifest.data, run.data_fingerprint, folder)
            _logger.info(f"the data has changed, continuing with it: {changed}")
        _logger.info(f"resuming from {folder}, step {manifest.step}")
        _announce_learning_rate(run, manifest, folder)

    # Rank 0 alone checks the data: only it knows the fingerprint, and it may have to read hundreds of images.
    on_main_rank_for_long(check, run.device)
    saved = on_every_rank(lambda: saved_classes(folder, read_manifest(folder)), run.device)
    # Equal lists need no matching, which is the usual case: every rank then reads its own range of rows.
    match = match_on_all_ranks(run, model, saved, str(folder)) if saved != run.classes else None
    step = on_every_rank_for_long(lambda: _load(run, model, folder, match), run.device)
    # Only now, when the checkpoint is loaded everywhere, is anything in the folder changed.
    on_main_rank(lambda: _set_aside_later_steps(run.folder, step), run.device)
    return step


def _choose(run: Run, mode: StartMode) -> Path:
    """Collective. Returns the checkpoint to resume from, every byte of which has been checked."""
    assert mode.resume is not None
    where, checkpoints = mode.resume, run.folder.checkpoints

    def candidates() -> list[Path]:
        # Rank 0 alone calls this: another rank may see an older state of a network file system.
        if where not in ("auto", "best"):
            return [Path(where)]
        oldest_first = published(checkpoints)
        best = best_folder(oldest_first) if where == "best" else None
        return oldest_first[::-1] if best is None else [best]

    found, passed_over = first_whole_on_all_ranks(
        candidates,
        run.device,
        lambda folder, manifest: _check_same_run(manifest, run.config, folder, mode.command),
    )

    def report() -> None:
        if found is None and len(passed_over) == 1:
            raise CheckpointError(passed_over[0])
        for reason in passed_over:
            _logger.info(f"passed over a checkpoint: {reason}")
        if found is None:
            raise CheckpointError(
                f"There is no whole checkpoint in {checkpoints} to resume this run from. To start it from the beginning, leave "
                f"out --resume."
            )

    on_main_rank(report, run.device)
    assert found is not None
    return found


def _set_aside_later_steps(folder: RunFolder, step: int) -> None:
    """Rank 0. Renames checkpoints of later steps, which are not part of the resumed run, and drops their metrics.

    They are not deleted: each may have taken hours.
    """
    for left in set_aside_after(folder.checkpoints, step):
        _logger.info(
            f"set aside as {left.name}: a checkpoint of a later step, which is no longer part of this run. "
            f"Delete it if you do not need it."
        )
    folder.forget_metrics_after(step)


def _load(run: Run, model: Model, folder: Path, match: ClassMatch | None) -> int:
    manifest = read_manifest(folder)
    shared = load_shared(folder)
    # Compare names and shapes first: the error then names the checkpoint, and nothing is half loaded.
    check_fits(model.backbone, tensors_with_prefix(shared, "backbone."), folder)
    model.load_shared_state(shared)
    own = model.head.classes
    # The number of ranks may have changed: rows are read by class number from whichever shards hold them.
    if match is None:
        for first_class, rows in saved_rows(folder, manifest, own.start, own.stop):
            model.head.load_rows(first_class, rows)
    else:
        shards = saved_rows(folder, manifest, 0, manifest.num_classes)
        copy_matched_rows(shards, model.head.rows(), match.saved_K, model.head.store.num_subcentres, str(folder))
        model.head.accept_rows()
    # The head draws its samples by step number.
    model.head.step_count = manifest.step
    # The state of random generators is per rank, and has no meaning on another number of ranks.
    if manifest.world_size == run.world.size:
        restore_generators(load_rank_state(folder, manifest, run.world.rank), run.device)
    return manifest.step


def match_on_all_ranks(run: Run, model: Model, saved: ClassList, where: str) -> ClassMatch:
    """Collective. Returns where this rank's classes are in the saved list; rank 0 logs the number of each kind."""
    own, classes = model.head.classes, run.classes
    match = on_every_rank(lambda: match_classes(saved, classes, own.start, own.stop), run.device)
    counts = torch.tensor([match.num_same, match.num_renumbered, match.num_new], device=run.device)
    num_same, num_renumbered, num_new = gather_blocks(counts, None).sum(0).tolist()
    if not num_same + num_renumbered:
        raise CheckpointError(
            f"None of the {classes.num_classes:,} classes of the data is among the {saved.num_classes:,} of {where}: "
            f"check that both lists are names, or both numbers."
        )
    if run.world.is_main:
        table = describe_match(num_same, num_renumbered, num_new, saved.num_classes)
        _logger.info(f"classes matched by {classes.kind_of_name} with {where}\n{table}")
    return match


def _check_same_people(where: Path, run: Run) -> None:
    """Refuses to match classes by number if their images show that they are other people.

    Classes without names can be told apart by their images alone: each class that still exists must hold one of the images
    recorded in its fingerprint. More or fewer images of the same classes are accepted, in any order or format, and so is
    everything if the classes have names both in the checkpoint and in the data. If only one of them has names, a name that
    looks like a number is matched with that number, so the images also decide here.
    """
    manifest, classes, current = read_manifest(where), run.classes, run.data_fingerprint
    saved, saved_list = manifest.data, saved_classes(where, manifest)
    is_same_data = saved_list == classes and saved.fingerprint == current.fingerprint
    if (saved_list.text and classes.text) or not saved.fingerprint or is_same_data:
        return
    recorded = {int(label): images for label, images in saved.class_images.items()}
    images_by_name = {name: recorded[number] for number, name in enumerate(saved_list.names()) if number in recorded}
    left = {str(number): images_by_name[name] for number, name in enumerate(classes.names()) if name in images_by_name}
    foreign = foreign_class(DataFingerprint(fingerprint=saved.fingerprint, class_images=left), run.source)
    if foreign is not None:
        raise CheckpointError(
            f"{where} was trained on other data: class {foreign} holds none of the images recorded in the checkpoint "
            f"({_describe_fingerprints(saved, current, where)}). If the classes have the same numbers and their images were "
            f"only encoded again, use --same-numbers; with a classes.txt next to the data of both runs, classes are matched "
            f"by name instead."
        )


def _describe_fingerprints(saved: DataFingerprint, current: DataFingerprint, where: Path) -> str:
    return f"fingerprint of the data {saved.fingerprint} in {where}, {current.fingerprint} now"


def _check_same_run(manifest: Manifest, config: Config, folder: Path, command: Sequence[str]) -> None:
    changes = sorted(changes_refused_on_resume(_saved_config(manifest, folder), config))
    if changes:
        differences = [f"{name} was {_shown(before)}, is {_shown(now)}" for name, before, now in changes]
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join(differences)}. "
            f"{how_to_change(config.train.run_dir, [name for name, _, _ in changes], command)}"
        )


def _saved_config(manifest: Manifest, folder: Path) -> Config:
    try:
        # A setting that is newer than the checkpoint has its default.
        return load_config_values(tomllib.loads(manifest.config), where=f"the settings in {folder}")
    except (ConfigError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder} has settings that this version does not know: {error}") from error


def how_to_change(run_dir: str, changed: Sequence[str], command: Sequence[str]) -> str:
    """Returns the two ways out: continue the run as it was, or start a new one from its weights if they fit."""
    unchanged = f"Continue it as it was: megaclass train {run_dir}/config.toml --resume"
    settings = [f"train.run_dir={run_dir}-2"]
    if not any(name.startswith("backbone.") for name in changed):
        settings += [f"train.init_backbone={run_dir}"]
        # Centres have a width and a number per class; the data decides which classes there are.
        if not {"head.subcentres", "data.path"} & set(changed):
            settings += [f"train.init_centres={run_dir}"]
    replaced = tuple(f"{setting.partition('=')[0]}=" for setting in settings)
    kept = [word for word in command if not word.startswith(("--resume", *replaced))]
    what = "a new run from its weights" if len(settings) > 1 else "a new run"
    line = shlex.join([*(kept or ["megaclass", "train", "RECIPE"]), *settings])
    return f"{unchanged}\nOr start {what} with the new settings: {line}"


def _announce_learning_rate(run: Run, manifest: Manifest, folder: Path) -> None:
    """Logs a jump of the learning rate: the schedule is a function of the number of steps, which may have changed."""
    before, now = _saved_config(manifest, folder), run.config
    then, from_now_on = (Schedule(one, run.loader.steps_per_epoch) for one in (before, now))
    step, steps_now = manifest.step, from_now_on.num_steps
    if then.num_steps == steps_now or step >= steps_now:
        return
    old = then.duties(min(step, then.num_steps - 1)).lr
    new = from_now_on.duties(step).lr
    if abs(new - old) > _LR_JUMP * max(old, new):
        # Usually the run had ended at a low rate, and more epochs raise it again.
        lower = (
            f" To train on at a low rate instead, start a new run with a lower optimizer.lr from these weights: "
            f"train.init_backbone={run.folder.path} train.init_centres={run.folder.path}"
        )
        _logger.info(
            f"the learning rate jumps from {old:.3g} to {new:.3g} at step {step + 1:,}, because train.epochs was "
            f"{before.train.epochs:g} and is {now.train.epochs:g}: the {now.optimizer.schedule} schedule now ends at step "
            f"{steps_now:,}.{lower if new > old else ''}"
        )


def _shown(value: object) -> object:
    return "unset" if value is None else list(value) if isinstance(value, tuple) else value


# ---- fine-tuning: a new run starts with the backbone, and optionally the class centres, of another one ------------------

_MODEL = "model.safetensors"


def load_initial_weights(run: Run, model: Model, mode: StartMode) -> None:
    """Collective. Loads what train.init_backbone and train.init_centres name; every rank reads the files.

    A run folder stands for its newest whole checkpoint in both. Each byte of a checkpoint is checked by one of the ranks.
    """
    config, device, classes = run.config.train, run.device, run.classes
    # One path for both is resolved once, so backbone and centres come from the same checkpoint.
    is_one_path = config.init_backbone == config.init_centres
    backbone = Path()
    if config.init_backbone is not None:
        backbone = _resolve(Path(config.init_backbone), device, or_else=None if is_one_path else _MODEL)
        on_every_rank(lambda: _load_backbone(model, backbone), device)
    elif run.config.backbone.pretrained:
        on_every_rank_for_long(lambda: _load_pretrained(run, model), device)
    if config.init_centres == CLASS_MEANS:
        start_at_class_means(run, model)
    elif config.init_centres is not None:
        path = backbone if is_one_path else _resolve(Path(config.init_centres), device, or_else=None)
        # InsightFace's files do not record any people.
        if not mode.trusts_numbers and (path / NAME).is_file():
            on_main_rank_for_long(lambda: _check_same_people(path, run), device)
        saved, shards = on_every_rank(lambda: _read_centres(model, path, classes, mode.matches_classes), device)
        saved_K = np.arange(model.head.classes.start, model.head.classes.stop)
        if saved != classes:
            saved_K = match_on_all_ranks(run, model, saved, str(path)).saved_K
        # Only the centres themselves: the state of their optimizer belongs to the other run.
        target, num_subcentres = {"weight": model.head.rows()["weight"]}, model.head.store.num_subcentres
        on_every_rank_for_long(lambda: copy_matched_rows(shards, target, saved_K, num_subcentres, str(path)), device)
        model.head.accept_rows()


def _resolve(path: Path, device: torch.device, *, or_else: str | None) -> Path:
    """Collective. Returns what to read: a whole checkpoint, else the file `or_else` in the run folder, else the path itself."""
    folder, passed_over = first_whole_on_all_ranks(lambda: _checkpoints_of(path), device)

    def resolve() -> str:
        for reason in passed_over if folder is not None else ():
            _logger.info(f"passed over a checkpoint: {reason}")
        if folder is not None:
            _logger.info(f"starting with the weights of {folder}")
            return str(folder)
        if or_else is not None and (path / or_else).is_file():
            return str(path / or_else)
        if passed_over or (path / "checkpoints").is_dir():
            why = "; ".join(passed_over) or "the folder is empty"
            raise CheckpointError(f"There is no whole checkpoint in {path}: {why}.")
        return str(path)

    return Path(text_of_main_rank(resolve, device))


def _checkpoints_of(path: Path) -> list[Path]:
    """Returns the checkpoint itself, or those of a run folder, newest first."""
    return [path] if (path / NAME).is_file() else published(path / "checkpoints")[::-1]


def _load_backbone(model: Model, path: Path) -> None:
    state = _read_backbone(path)
    with model.loaded() as network:
        load_backbone_(network, wrapped_weights(state, network.state_dict()), path)


def _load_pretrained(run: Run, model: Model) -> None:
    settings = run.config.backbone
    with model.loaded() as network:
        assert isinstance(network, TimmNetwork)
        network.load_pretrained_(settings.pretrained)
    if run.world.is_main:
        _logger.info(f"starting with {origin_of_weights(settings.name, settings.pretrained)}")


def _read_backbone(path: Path) -> dict[str, Tensor]:
    if (path / NAME).is_file():
        return evaluated_weights(load_shared(path))
    if path.is_dir():
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run folder: it holds no {NAME}, no checkpoints/ and no {_MODEL}."
        )
    return read_tensors(path) if path.suffix == ".safetensors" else read_backbone(path)


def _read_centres(
    model: Model, path: Path, classes: ClassList, matches_classes: bool
) -> tuple[ClassList, Iterator[tuple[int, dict[str, Tensor]]]]:
    """Returns the classes of the saved centres, and an iterator over the centres, shard by shard."""
    if (path / NAME).is_file():
        manifest = read_manifest(path)
        saved, shards = saved_classes(path, manifest), saved_rows(path, manifest, 0, manifest.num_classes)
    else:
        centres = read_centre_shards(path)
        num_saved = sum(len(shard) for _, shard in centres) // model.head.store.num_subcentres
        # InsightFace identifies classes by number alone: if there are as many as in the data, they are taken as equal.
        saved = classes if num_saved == classes.num_classes else ClassList(num_saved)
        shards = ((first, {"weight": shard}) for first, shard in centres)
    if saved != classes and not matches_classes:
        raise CheckpointError(f"The centres in {path} are of other classes: {describe_difference(saved, classes)}.")
    return saved, shards
