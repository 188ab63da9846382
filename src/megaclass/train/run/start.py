"""`megaclass train`: from settings to a finished run, as one process, as the parent of local ranks, or as one rank."""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from megaclass.backbones import check_backbone
from megaclass.checkpoint.manifest import read_manifest
from megaclass.checkpoint.retention import published, step_of
from megaclass.checkpoint.save import CheckpointWriter
from megaclass.checkpoint.tensor_file import check_dtypes
from megaclass.config.read import to_toml
from megaclass.config.schema import Config
from megaclass.data.augment import parse_augment
from megaclass.data.fingerprint import DataMarks, marks_of
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import check_source, open_source
from megaclass.data.sources.source import ImageSource, PixelSource
from megaclass.data.synthetic.synthesize import synthesize
from megaclass.data.tools.inspect import survey_sizes
from megaclass.data.tools.stage import stage
from megaclass.distributed.agreement import (
    on_every_rank,
    on_every_rank_for_long,
    on_main_rank,
    on_main_rank_for_long,
    text_of_main_rank,
)
from megaclass.distributed.process_group import process_group
from megaclass.errors import CheckpointError, ConfigError, DataError, ExportError, TrainError
from megaclass.image_size import compact_size
from megaclass.launch.exit_codes import EXIT_RESUME_ME
from megaclass.launch.launchers.local import run_local
from megaclass.progress import Bar, progress_bar
from megaclass.train.build import Model, build_margin, build_model, input_size
from megaclass.train.loop import Outcome, train
from megaclass.train.run.class_names import class_list
from megaclass.train.run.finish import evaluate_run, finish_run
from megaclass.train.run.folder import RunFolder
from megaclass.train.run.initial_weights import initialise
from megaclass.train.run.packages import require_packages
from megaclass.train.run.resume import resume_run
from megaclass.train.run.signals import Stop, StopSignals
from megaclass.world import World, starters_variables, world_from_environment

# How long rank 0 of the start before may take to die: the launchers' graces, and a write to a slow disk.
_PATIENCE_S = 120.0
_EXIT_BY_HAND = 128 + signal.SIGINT


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """How a run begins."""

    resume: str | None = None
    """None, "auto" for the newest whole checkpoint of the run folder, "best", or the path of a checkpoint."""
    overwrite: bool = False
    """Replace the run that the folder holds."""
    matches_classes: bool = False
    """A list of classes that differs from the checkpoint's is matched by name, or number, and not refused."""
    trusts_numbers: bool = False
    """Classes without names are the same under the same numbers, even if their images are others."""

    def __post_init__(self) -> None:
        if self.resume is not None and self.overwrite:
            raise ConfigError("--resume and --overwrite exclude each other: continue the run or replace it.")

    @property
    def needs_free_folder(self) -> bool:
        return self.resume is None and not self.overwrite


def start_training(config: Config, arguments: Sequence[str], beginning: Beginning) -> int:
    """Exit code of the run. `arguments`: the command line that made this config, to start ranks with."""
    check_backbone(config.backbone.name, config.data.size or (config.synth.size if config.synth.identities else 16))
    build_margin(config.head)
    parse_augment(config.data.augment)
    world = world_from_environment()
    if world.starter != "none":
        if world.size == 1 and config.train.nproc > 1:
            print(f"WARNING {world.name()}: {_unused_nproc(config, world)}", file=sys.stderr, flush=True)
        return _train_as_rank(config, world, beginning)
    run = RunFolder(Path(config.train.run_dir))
    if beginning.needs_free_folder:
        run.check_free(["megaclass", "train", *arguments])
    require_packages(config)
    make_data(config)
    if config.train.nproc == 1:
        return _train_as_rank(config, world, beginning)
    return run_local([sys.executable, "-m", "megaclass", "train", *arguments], config.train.nproc)


def _unused_nproc(config: Config, world: World) -> str:
    """In a shell that a starter opened (srun --pty bash), every command looks like the only rank of a job."""
    return (
        f"train.nproc={config.train.nproc} is not used, because {world.starter} is in charge and started one process. "
        f"Start more with it, or, in a shell that it opened, type `unset {' '.join(starters_variables())}` first."
    )


def _begin(
    config: Config, run: RunFolder, world: World, device: torch.device, beginning: Beginning, held: ExitStack
) -> Beginning:
    """Collective. Rank 0 locks the folder, looks what it holds, and makes the data; all ranks begin as it decides."""
    decided = beginning

    def prepare() -> None:
        nonlocal decided
        require_packages(config)
        is_restart = world.starter != "none" and os.environ.get("MEGACLASS_RESTART", "0") != "0"
        if beginning.needs_free_folder and not is_restart:
            run.check_free()
        held.enter_context(run.locked(_PATIENCE_S if is_restart else 0.0))
        if is_restart:
            decided = _after_a_restart(config, run, beginning)
            if decided.needs_free_folder:
                run.check_free()
        else:
            run.set_taken(False)
        make_data(config)

    on_main_rank_for_long(prepare, device)
    return Beginning(**json.loads(text_of_main_rank(lambda: json.dumps(asdict(decided)), device)))


def _after_a_restart(config: Config, run: RunFolder, beginning: Beginning) -> Beginning:
    """Rank 0. `megaclass run --restarts` gives the same command again: the run goes on from its own newest checkpoint.

    Its own are those in a folder that was free, or that a start before this one took over. A run that failed before its
    first checkpoint begins as it was told to; a folder that holds another run is refused as ever.
    """
    if not run.holds_a_run() or not (beginning.needs_free_folder or run.is_taken()):
        return beginning
    if any(step_of(folder) > _first_step(beginning) for folder in published(run.checkpoints)):
        return replace(beginning, resume="auto", overwrite=False)
    is_the_same = run.holds_config(to_toml(config))
    return replace(beginning, overwrite=True) if is_the_same and beginning.resume is None else beginning


def _first_step(beginning: Beginning) -> int:
    """Where a run that begins with a checkpoint of another folder stands before it has saved any of its own."""
    if beginning.resume in (None, "auto", "best"):
        return -1
    try:
        return read_manifest(Path(beginning.resume)).step
    except CheckpointError:
        # Gone since: what the run has saved itself is all there is.
        return -1


def make_data(config: Config) -> None:
    """Draws synthetic identities where none are yet; otherwise the data must be there."""
    if not config.synth.identities:
        check_source(config.data.path)
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


def _staged(config: Config) -> str:
    """Where to read the data: its path, or the copy in memory that one rank of this host makes."""
    if not config.data.stage:
        return config.data.path
    with ExitStack() as held:
        bars: list[Bar] = []

        def on_progress(done: int, total: int) -> None:
            if not bars:
                bars.append(held.enter_context(progress_bar("copying the data into memory, MiB", total // 2**20)))
            bars[0].advance_to(done // 2**20)

        return stage(config.data.path, Path(config.data.stage), on_progress)


def open_data(config: Config, world: World) -> tuple[ImageSource, BatchLoader]:
    source = open_source(_staged(config))
    height, width = size = input_size(config, source)
    if height != width and not config.data.size:
        # Not taken as they are: a first photo of any shape would make a model of that shape.
        raise DataError(
            f"The images at {config.data.path} have {width} × {height} pixels, no square. Say what the model takes: "
            f"data.size=112 and data.fit=pad, crop or squash for squares, or data.size=[{height},{width}] for rectangles."
        )
    check_backbone(config.backbone.name, compact_size(size))
    return source, make_loader(config, source, world)


def _describe_sizes(config: Config, source: ImageSource) -> str:
    """Which size the model takes and why, and how many images have another."""
    height, width = size = input_size(config, source)
    reason = "as data.size says" if config.data.size else "the size of the data's first image; data.size sets another"
    text = f"megaclass: the model takes images of {width} × {height} pixels, {reason}"
    if isinstance(source, PixelSource):
        return f"{text}."
    found = survey_sizes(source, size)
    if not found.num_other_size:
        return f"{text}; {found.looked_at()} have it."
    text += (
        f"; {found.num_other_size:,} of {found.looked_at()} have another and are fitted (data.fit={config.data.fit})"
    )
    change = {"pad": "get black borders", "crop": "lose edges", "squash": "are distorted"}[config.data.fit]
    return f"{text}, {found.num_other_shape:,} of these {change}."


def make_loader(config: Config, source: ImageSource, world: World) -> BatchLoader:
    return BatchLoader(
        source,
        global_batch=config.train.global_batch,
        rank=world.rank,
        world_size=world.size,
        seed=config.train.seed,
        num_workers=config.data.threads,
        mirror=config.data.mirror,
        augment=parse_augment(config.data.augment),
        image_size=input_size(config, source),
        fit=config.data.fit,
        keep_last=config.data.keep_last,
        order=config.data.order,
        images_per_class=config.data.images_per_class,
        max_bad_fraction=config.data.max_bad_fraction,
        num_parts=config.train.accumulate,
        # Synchronised batch norm counts the images of all ranks.
        fewest_in_part=1 if config.backbone.batch_norm == "sync" and world.size > 1 else 2,
    )


def _train_as_rank(config: Config, world: World, beginning: Beginning) -> int:
    if not faulthandler.is_enabled():
        # A crash in native code then says where it happened, whoever started this process.
        faulthandler.enable(file=2)
    with ExitStack() as held:
        with process_group(world, device=config.train.device) as device:
            trained = train_in_group(config, world, device, beginning, held)
            if trained.outcome.stop:
                if world.is_main:
                    print(
                        f"megaclass: asked to stop; saved at step {trained.outcome.num_steps}, --resume goes on.",
                        file=sys.stderr,
                    )
                return EXIT_RESUME_ME if trained.outcome.stop is Stop.ASKED else _EXIT_BY_HAND
            # From here on the backbone carries the weights that are evaluated and exported.
            held.enter_context(trained.model.for_evaluation())
            scores = trained.outcome.results or evaluate_run(config, trained.model, trained.source, device)
        # The other ranks are done; what is left is one rank's work.
        if world.is_main:
            try:
                finish_run(config, trained.run, trained.model, trained.source, world, trained.outcome, scores)
            except (OSError, ExportError, CheckpointError) as error:
                reason = str(error).rstrip(".")
                raise TrainError(
                    f"All {trained.outcome.num_steps} steps are done and saved, but not all results could be written to "
                    f"{trained.run.path}: {reason}. Mend that, then --resume."
                ) from error
    return 0


@dataclass(frozen=True)
class Trained:
    """What a finished loop leaves to those who evaluate and export."""

    run: RunFolder
    source: ImageSource
    model: Model
    outcome: Outcome


def train_in_group(
    config: Config, world: World, device: torch.device, beginning: Beginning, held: ExitStack
) -> Trained:
    """Collective. From settings to the last step; `held` keeps the run folder locked until the caller is done with it."""
    run = RunFolder(Path(config.train.run_dir))
    beginning = _begin(config, run, world, device, beginning, held)
    run.check_seen_by_all(device)
    source, loader = on_every_rank_for_long(lambda: open_data(config, world), device)
    classes = on_every_rank(lambda: class_list(config.data.path, source), device)
    marks = on_every_rank_for_long(lambda: marks_of(source) if world.is_main else DataMarks(), device)
    sizes = on_every_rank_for_long(lambda: _describe_sizes(config, source) if world.is_main else "", device)
    model = build_model(config, source, world, device)
    on_every_rank(lambda: check_dtypes(model.shared_state()), device)
    matches_classes = beginning.matches_classes
    first_step = 0
    if beginning.resume is None:
        initialise(
            config,
            model,
            source,
            classes,
            world,
            device,
            matches_classes=matches_classes,
            trusts_numbers=beginning.trusts_numbers,
        )
    else:
        first_step = resume_run(
            config,
            model,
            run,
            beginning.resume,
            source,
            classes,
            marks,
            world,
            device,
            matches_classes=matches_classes,
            trusts_numbers=beginning.trusts_numbers,
        )

    def take_over() -> None:
        # As late as can be: what is wrong with settings, data or weights has been found by now.
        if beginning.overwrite:
            run.clear()
        run.write_config(to_toml(config))
        run.set_taken(True)

    on_main_rank(take_over, device)
    if world.is_main:
        print(source.describe(), file=sys.stderr)
        print(sizes, file=sys.stderr)
    signals = StopSignals(is_main=world.is_main)
    with signals.heard():
        with CheckpointWriter(
            run.checkpoints,
            config=to_toml(config),
            keep=config.train.keep_checkpoints,
            device=device,
            class_names=classes.text,
            data=marks,
            is_asynchronous=config.train.async_checkpoints,
        ) as writer:
            writer.reserve(model.head.rows(), model.shared_state())
            outcome = train(config, model, loader, run, world, device, first_step, writer, signals)
        # While the last checkpoint was written, too.
        outcome = replace(outcome, stop=signals.of_any_rank(device))
    if loader.bad_images.num_bad:
        print(f"megaclass: rank {world.rank}: {loader.bad_images.describe()}", file=sys.stderr)
    if loader.num_resized:
        print(f"megaclass: rank {world.rank}: {loader.describe_resized()}", file=sys.stderr)
    return Trained(run, source, model, outcome)
