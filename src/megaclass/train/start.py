"""`megaclass train`: from settings to a finished run, as one process, as the parent of local ranks, or as one rank."""

import sys
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megaclass.backbones import check_backbone
from megaclass.checkpoint.load import load_shared, newest_whole, saved_rows
from megaclass.checkpoint.manifest import check_files, read_manifest
from megaclass.config import Config, to_toml
from megaclass.data.loader import BatchLoader
from megaclass.data.source import check_source, open_source
from megaclass.data.synthesize import synthesize
from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.distributed.collectives import gather_blocks
from megaclass.distributed.process_group import process_group
from megaclass.errors import CheckpointError, ConfigError
from megaclass.launch.local import run_local
from megaclass.train.build import Model, build_margin, build_model
from megaclass.train.finish import evaluate_run, finish_run
from megaclass.train.loop import train
from megaclass.train.progress import progress_bar
from megaclass.train.run_folder import RunFolder
from megaclass.world import World, world_from_environment

# Settings that may change between a run and its continuation without making it another run.
_MAY_CHANGE = {
    "train.run_dir",
    "train.nproc",
    "train.device",
    "train.epochs",
    "train.report_steps",
    "train.checkpoint_epochs",
    "train.keep_checkpoints",
    "data.path",
    "data.threads",
    "head.kernel",
    "export.onnx",
}


def start_training(config: Config, arguments: Sequence[str], *, resume: str | None, overwrite: bool) -> int:
    """Exit code of the run. `arguments`: the command line that made this config, to start ranks with.

    resume: None, "auto" for the newest whole checkpoint of the run folder, or the path of a checkpoint.
    """
    if resume is not None and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other: continue the run or replace it.")
    check_backbone(config.backbone.name, config.synth.size if config.synth.identities else 16)
    build_margin(config.head)
    world = world_from_environment()
    if world.starter != "nobody":
        return _train_as_rank(config, world, resume=resume, overwrite=overwrite)
    run = RunFolder(Path(config.train.run_dir))
    if resume is None and not overwrite:
        run.check_free()
    _make_data(config)
    if config.train.nproc == 1:
        return _train_as_rank(config, world, resume=resume, overwrite=overwrite)
    return run_local([sys.executable, "-m", "megaclass", "train", *arguments], config.train.nproc)


def _make_data(config: Config) -> None:
    """Draws synthetic identities where none are yet; otherwise the data must be there."""
    if not config.synth.identities:
        check_source(Path(config.data.path))
        return
    synth = config.synth
    total = synth.identities * synth.images_per_identity + 2 * synth.pairs
    with progress_bar("drawing identities", total) as bar:
        synthesize(
            Path(config.data.path),
            num_identities=synth.identities,
            images_per_identity=synth.images_per_identity,
            image_size=synth.size,
            seed=synth.seed,
            num_pairs=synth.pairs,
            on_progress=lambda done, _: bar.advance_to(done),
        )


def _train_as_rank(config: Config, world: World, *, resume: str | None, overwrite: bool) -> int:
    run = RunFolder(Path(config.train.run_dir))
    with ExitStack() as held:
        with process_group(world, device=config.train.device) as device:

            def prepare() -> None:
                if resume is None and not overwrite:
                    run.check_free()
                held.enter_context(run.locked())
                if overwrite:
                    run.clear()
                _make_data(config)

            on_main_rank(prepare, device)
            source = open_source(Path(config.data.path))
            loader = BatchLoader(
                source,
                global_batch=config.train.global_batch,
                rank=world.rank,
                world_size=world.size,
                seed=config.train.seed,
                num_workers=config.data.threads,
                mirror=config.data.mirror,
            )
            model = build_model(config, source, world, device)
            first_step = _resume(config, model, run, resume, world, device) if resume is not None else 0
            if world.is_main:
                run.write_config(to_toml(config))
                print(source.describe(), file=sys.stderr)
            outcome = train(config, model, loader, run, world, device, first_step)
            scores = evaluate_run(config, model, source, device)
        # The other ranks are done; what is left is one rank's work.
        if world.is_main:
            finish_run(config, run, model, source, world, outcome, scores)
    return 0


def _resume(config: Config, model: Model, run: RunFolder, resume: str, world: World, device: torch.device) -> int:
    """Loads the checkpoint on every rank; returns the step to go on with."""
    chosen = torch.tensor([-1], dtype=torch.int64)
    folder = Path(resume)

    def choose() -> None:
        nonlocal folder
        if resume == "auto":
            found, passed_over = newest_whole(run.checkpoints)
            for reason in passed_over:
                print(f"megaclass: passed over a checkpoint: {reason}", file=sys.stderr)
            if found is None:
                raise CheckpointError(f"There is no whole checkpoint in {run.checkpoints} to resume from.")
            folder = found
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        _check_same_run(tomllib.loads(manifest.config), tomllib.loads(to_toml(config)), folder)
        chosen[0] = manifest.step
        print(f"megaclass: resuming from {folder}, step {manifest.step}", file=sys.stderr)

    on_main_rank(choose, device)
    step = int(gather_blocks(chosen.to(device), None)[0])
    if resume == "auto":
        folder = run.checkpoints / f"step-{step:09d}"

    def load() -> None:
        manifest = read_manifest(folder)
        if manifest.num_classes != model.head.num_classes:
            raise CheckpointError(
                f"{folder} holds {manifest.num_classes} classes, the data at {config.data.path} {model.head.num_classes}."
            )
        model.load_shared_state(load_shared(folder))
        for first_class, rows in saved_rows(folder, manifest, model.head.classes.start, model.head.classes.stop):
            model.head.load_rows(first_class, rows)
        model.head.step_count = step
        if world.is_main:
            run.forget_metrics_after(step)

    on_every_rank(load, device)
    return step


def _check_same_run(saved: dict[str, dict[str, object]], current: dict[str, dict[str, object]], folder: Path) -> None:
    names = {f"{section}.{key}" for tree in (saved, current) for section, part in tree.items() for key in part}
    differences = []
    for name in sorted(names - _MAY_CHANGE):
        section, key = name.split(".")
        before, now = saved.get(section, {}).get(key, "unset"), current.get(section, {}).get(key, "unset")
        if before != now:
            differences.append(f"{name} was {before}, is {now}")
    if differences:
        raise CheckpointError(f"{folder} belongs to another run: {'; '.join(differences)}.")
