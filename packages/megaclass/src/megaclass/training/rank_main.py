"""`megaclass train` in one rank: prepare the folder, open data and model, load weights, train, evaluate, export."""

import faulthandler
import logging
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from megaclass.checkpoint.save import CheckpointWriter
from megaclass.checkpoint.tensor_file import check_dtypes
from megaclass.config.read import to_toml
from megaclass.config.schema import Config
from megaclass.data.sources.source import TensorSource
from megaclass.distributed.agreement import on_every_rank, on_every_rank_for_long, on_main_rank
from megaclass.errors import CheckpointError, ExportError, HeadError, TrainError
from megaclass.evaluation.sets import sets_in_training
from megaclass.training.between_steps import evaluate_model
from megaclass.training.commits import Commits
from megaclass.training.finish import finish_run
from megaclass.training.generations import check_most_ranks, joined_group, open_to_join, through_generations
from megaclass.training.loop import TrainingResult, train
from megaclass.training.model.build import Model, build_model, build_row_optimizer
from megaclass.training.run.folder import RunFolder
from megaclass.training.run.run import (
    Callback,
    OpenedData,
    Run,
    check_same_start,
    describe_sizes,
    how_to_verify,
    open_run,
)
from megaclass.training.run.signals import Stop, StopSignals
from megaclass.training.start.restart import FolderLock, StartMode, prepare_run, take_over
from megaclass.training.start.resume import load_initial_weights, resume_run
from megaclass_launch.elastic import Assignment, elastic_worker
from megaclass_launch.errors import ConfigError, StateLostError
from megaclass_launch.exit_codes import EXIT_RESUME_ME
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.process_group import choose_device, process_group
from megaclass_launch.world import World

_logger = logging.getLogger("megaclass.training")
# The shell's code for a program that was ended by Ctrl-C.
_EXIT_INTERRUPTED = 128 + signal.SIGINT
_STDERR = 2
_STATE_LOST = (
    "all ranks that held the state of this elastic job are lost, the others had not received it yet, and the run folder "
    "holds no checkpoint. The job does not start again at step 0 by itself: start it again with --overwrite."
)
# How long rank 0 of an elastic job waits, after a loss, for the files of other ranks in a checkpoint that is under way: they
# wait for it to continue.
_LAST_WAIT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """Everything that one rank is given for its way from the settings to its exit code.

    Only `world` and `here` change from one generation of an elastic job to the next.
    """

    config: Config
    world: World
    mode: StartMode
    lock: FolderLock
    """Held until the rank ends, after its process group: rank 0 writes the last result into the locked run folder."""
    opened: OpenedData = field(default_factory=OpenedData)
    commits: Commits | None = None
    """Of an elastic job."""
    here: Assignment | None = None
    """The place of this process in the present generation of an elastic job."""
    max_ranks: int = 0
    """Largest number of ranks that an elastic job may have; 0 if it was not given."""
    callbacks: tuple[Callback, ...] = ()

    @property
    def is_continued(self) -> bool:
        """True if an earlier generation of this elastic job has begun the run; the same on every rank after `Commits.join`."""
        return self.commits is not None and self.commits.has_begun


def train_as_rank(
    config: Config,
    world: World,
    mode: StartMode,
    callbacks: Sequence[Callback] = (),
    *,
    waits_for_results: bool = False,
) -> int:
    """Trains as one rank of a job and returns its exit code: 0, or 75 or 130 after a signal asked to stop.

    waits_for_results: return only once rank 0 has written the results, also on the other ranks.
    """
    if not faulthandler.is_enabled():
        # A crash in native code then prints where it happened, whichever launcher started this process.
        faulthandler.enable(file=_STDERR)
    # The agent can ask this rank for its stacks at any time, also while it joins the others.
    own_status().give_stacks(str(Path(__file__).parents[1]), "no step has finished", "train.hang_after_s")
    worker = elastic_worker()
    with ExitStack() as held:
        context = RankContext(config=config, world=world, mode=mode, lock=FolderLock(held), callbacks=tuple(callbacks))
        if worker is None:
            code = _train_and_finish(context, process_group(world, device=config.train.device))
            assert code is not None, "only the ranks of elastic jobs change"
            if waits_for_results and not world.is_main:
                RunFolder(Path(config.train.run_dir)).wait_until_free()
            return code
        if config.train.shard_backbone:
            raise ConfigError(
                "train.shard_backbone does not work in elastic jobs, whose ranks each keep the whole backbone in case others "
                "are lost: leave it out, or give a fixed number of ranks with -np alone."
            )
        # Errors of this host come first, and what takes long: the others train meanwhile.
        choose_device(config.train.device, world)
        source = open_to_join(config) if worker.joins_running_job else None
        context = replace(
            context,
            opened=OpenedData(source),
            commits=Commits(worker, config.train.commit_steps),
            max_ranks=worker.max_ranks,
        )

        def train_generation(here: Assignment) -> int | None:
            group = joined_group(worker, here, config.train.device)
            return _train_and_finish(replace(context, world=here.world, here=here), group)

        return through_generations(worker, train_generation)


def _train_and_finish(context: RankContext, group: AbstractContextManager[torch.device]) -> int | None:
    """Trains in the group, evaluates and exports; returns the exit code, or None if the ranks of an elastic job change."""
    world = context.world
    with ExitStack() as held:
        with group as device:
            with out_of_memory_explained(context.config, world, device):
                run, model, outcome = train_in_group(context, device)
            if outcome.is_regrouping:
                return None
            is_interrupted = outcome.stop.is_interruption
            run.events.note("end", outcome.num_steps, outcome="stopped" if is_interrupted else "finished")
            if is_interrupted:
                if world.is_main:
                    _logger.info(f"asked to stop; saved at step {outcome.num_steps}, --resume continues.")
                return EXIT_RESUME_ME if outcome.stop is Stop.ASKED else _EXIT_INTERRUPTED
            # The network that is evaluated is the one that is exported.
            network = held.enter_context(model.for_evaluation())
            with own_status().long_work("evaluation"):
                results = outcome.results or evaluate_model(run, model, network, has_bar=True)
        # The other ranks are done: export and report are the work of one rank.
        if world.is_main:
            own_status().progress(allowed_s=0.0, phase="writing results")
            # It may use the cores of the others on this machine.
            torch.set_num_threads(torch.get_num_threads() * world.local_size)
            try:
                finish_run(run, model, network, outcome, results)
            except (OSError, ExportError, CheckpointError) as error:
                reason = str(error).rstrip(".")
                raise TrainError(
                    f"All {outcome.num_steps} steps are done and saved, but not all results could be written to "
                    f"{run.folder.path}: {reason}. Fix that, then --resume."
                ) from error
    return 0


def train_in_group(context: RankContext, device: torch.device) -> tuple[Run, Model, TrainingResult]:
    """Collective. Runs from the settings to the last step: opens the run, builds the model, loads weights, trains."""
    config, world, commits = context.config, context.world, context.commits
    hosts = check_same_start(config, device)
    restoration = None
    if commits is not None and context.here is not None:
        restoration = commits.join(context.here, device)
    # What an earlier generation did and said is not repeated: setting has_begun below changes the answer.
    is_continued = context.is_continued
    mode, run = _open(context, hosts, device)
    says = world.is_main and not is_continued
    sizes = on_every_rank_for_long(lambda: describe_sizes(config, run.source) if says else "", device)
    model = _build(run)
    if model.distiller is not None and config.distil.cache:
        model.distiller.fill_cache(run.folder.path, run.source, run.data_fingerprint.fingerprint, config, world)
    if restoration is not None and commits is not None:
        first_step = commits.restore(restoration, model, device)
        # Rows of steps that are trained once more would be in the curve twice.
        on_main_rank(lambda: run.folder.forget_metrics_after(first_step), device)
    else:
        if commits is not None and commits.is_state_lost and mode.resume is None:
            raise StateLostError(_STATE_LOST)
        first_step = 0
        if mode.resume is not None:
            first_step = resume_run(run, model, mode)
        else:
            load_initial_weights(run, model, mode)
        if is_continued and commits is not None and world.is_main:
            _announce_fallback(first_step, commits)
        # From here on a restart continues this run (see start/restart.py).
        on_main_rank(lambda: take_over(config, run.folder, mode), device)
    if commits is not None:
        commits.has_begun = True
    if says:
        _announce_start(run, sizes)
    with run.events.ending_noted(is_elastic=commits is not None):
        outcome = _train_and_save(run, model, first_step, commits)
    if run.loader.bad_images.num_bad:
        _logger.info(f"rank {world.rank}: {run.loader.bad_images.describe()}")
    if run.loader.num_resized:
        _logger.info(f"rank {world.rank}: {run.loader.describe_resized()}")
    return run, model, outcome


def _open(context: RankContext, hosts: tuple[str, ...], device: torch.device) -> tuple[StartMode, Run]:
    """Collective. Locks the run folder, decides how the run starts, and opens the data."""
    config, world, is_continued = context.config, context.world, context.is_continued
    folder = RunFolder(Path(config.train.run_dir))
    mode = prepare_run(config, folder, world, device, context.mode, context.lock, is_continued=is_continued)
    # Before any checkpoint is written: shards on another file system would be noticed only when resuming.
    folder.check_seen_by_all(device)
    own_status().name_folder(folder.path.absolute())
    run = open_run(config, world, device, folder, hosts, context.opened)
    if context.max_ranks and not is_continued:
        on_main_rank(lambda: check_most_ranks(config, run.source, context.max_ranks), device)
    return mode, replace(run, command=mode.command, callbacks=context.callbacks)


def _build(run: Run) -> Model:
    """Collective. Builds the model, whose tensors must all have a place in a checkpoint."""
    config, world, device = run.config, run.world, run.device
    if world.is_main and device.type == "cuda":
        # A start takes from five to fifteen seconds (benchmarks/startup.md): say what is being waited for.
        _logger.info(f"building {config.backbone.name} and {run.source.num_classes:,} class centres …")
    model = build_model(config, run.source, world, device)
    on_every_rank(lambda: check_dtypes(model.backbone.state_dict(prefix="backbone.")), device)
    num_parameters = sum(parameter.numel() for parameter in model.backbone.parameters())
    _logger.debug(
        f"rank {world.rank}: {config.backbone.name} with {num_parameters:,} parameters in {model.precision.dtype}, "
        f"{len(model.head.classes):,} of {model.head.num_classes:,} classes"
    )
    return model


def _announce_start(run: Run, sizes: str) -> None:
    """Rank 0. Says what is trained on, and what the user may have overlooked."""
    config = run.config
    _logger.info(run.source.describe())
    _logger.info(sizes)
    if run.device.type == "cuda":
        _logger.info("the first step compiles programs for the GPU, unless they are in the cache of Triton …")
    has_images = not isinstance(run.source, TensorSource) and Path(config.data.path).exists()
    if has_images and not sets_in_training(config.data.path, config.train.evaluate_sets):
        _logger.info(f"no accuracy will be measured, because {how_to_verify(config.data.path)[0]}")
    if config.optimizer.warmup_epochs >= config.train.epochs:
        _logger.warning(
            f"optimizer.warmup_epochs is {config.optimizer.warmup_epochs:g}, and the run has {config.train.epochs:g} "
            f"epochs: the learning rate rises until the last step and never falls. Set optimizer.warmup_epochs=0, or train "
            f"longer."
        )


def _announce_fallback(first_step: int, commits: Commits) -> None:
    """Rank 0. Says what the ranks continue from, because no commit in memory is whole."""
    last_step = commits.last_step
    if commits.is_state_lost:
        _logger.warning(
            "all ranks that held the state of this job are lost, and the others had not received it yet: continuing from "
            f"the checkpoint of step {first_step:,}."
        )
        return
    if first_step == last_step:
        _logger.info(
            "the ranks that left held centres that no other rank has: continuing from the checkpoint on the disk."
        )
        return
    where = f"the checkpoint of step {first_step:,}" if first_step else "the start, because there is no checkpoint yet"
    _logger.warning(
        f"a rank and the rank that held the copy of its centres are lost: going back from step {last_step:,} to {where}."
    )


def _train_and_save(run: Run, model: Model, first_step: int, commits: Commits | None) -> TrainingResult:
    """Collective. Trains with a checkpoint writer; signals are handled until the last checkpoint is on the disk."""
    config = run.config
    signals = StopSignals(is_main=run.world.is_main)
    with signals.handled():
        with CheckpointWriter(
            run.folder.checkpoints,
            config=to_toml(config),
            keep=config.train.keep_checkpoints,
            device=run.device,
            class_names=run.classes.text,
            data=run.data_fingerprint,
            is_asynchronous=config.train.async_checkpoints,
            on_published=partial(run.events.note, "save"),
            last_wait_s=None if commits is None else _LAST_WAIT_S,
            is_asked_to_stop=lambda: signals.is_asked,
        ) as writer:
            # Host memory for the copies is allocated now, so the first save takes no longer than the others.
            writer.reserve(model.head.rows(), model.shared_state())
            outcome = train(run, model, first_step, writer, signals, commits)
            if run.world.is_main and not outcome.stop.is_interruption and not outcome.is_regrouping:
                _logger.info(f"all {outcome.num_steps:,} steps are done; writing the last checkpoint")
        # A signal may have come while the last checkpoint was written.
        return replace(outcome, stop=signals.of_any_rank(run.device, outcome.stop))


# ---- out of memory: how much was asked for, what takes the memory, and which settings to lower ----------------------

_GIB = 2**30
# Texts of the allocators of torch: of a CPU, and of CUDA, whose exception is a class of its own.
_CPU_TEXT = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


@contextmanager
def out_of_memory_explained(config: Config, world: World, device: torch.device) -> Iterator[None]:
    """Turns an out-of-memory error in the block into a TrainError with figures and the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        free, total = torch.cuda.mem_get_info(device)
        used = (
            f"{(total - free) / _GIB:.1f} of {total / _GIB:.1f} GiB are in use, "
            f"{torch.cuda.memory_allocated(device) / _GIB:.1f} GiB of them by tensors of this process"
        )
        raise TrainError(_text(config, world, device, asked[1] if asked else "more", used)) from error
    except (RuntimeError, MemoryError, HeadError) as error:
        found = _CPU_TEXT.search(str(error))
        if found is None and not isinstance(error, MemoryError):
            raise
        asked_text = f"{int(found[1]) / _GIB:.2f} GiB" if found else "more"
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = f"this process has used up to {peak / _GIB:.1f} GiB"
        raise TrainError(_text(config, world, device, asked_text, used)) from error


def _text(config: Config, world: World, device: torch.device, asked: str, used: str) -> str:
    train, head = config.train, config.head
    lower = [f"train.global_batch={max(1, train.global_batch // 2)} (is {train.global_batch})"]
    if train.accumulate < train.global_batch:
        lower.append(f"train.accumulate={2 * train.accumulate} (is {train.accumulate}; the same step in parts)")
    if head.sample_rate == 1.0:
        lower.append("head.sample_rate=0.1 (is 1.0)")
    if head.storage != "bf16":
        lower.append(f"head.storage=bf16 (is {head.storage})")
    if head.stored_gib:
        lower.append(f"head.stored_gib=0 (is {head.stored_gib:g})")
    return (
        f"{world.name()} ran out of memory on {device}: it asked for {asked}, and {used}. {_centres(config)} Lower one of: "
        f"{'; '.join(lower)}; or use more processes, which share the classes (train.nproc is {train.nproc})."
    )


def _centres(config: Config) -> str:
    """Returns a sentence on what a million centres cost with these settings."""
    width = config.backbone.embedding_dim
    weight = torch.empty((1, width), dtype=torch.bfloat16 if config.head.storage == "bf16" else torch.float32)
    rows = {"weight": weight, **build_row_optimizer(config.head).new_state(weight)}
    per_class = config.head.subcentres * sum(row.numel() * row.element_size() for row in rows.values())
    return (
        f"Centres and optimizer state take {per_class * 10**6 / _GIB:.2f} GiB per million classes "
        f"(backbone.embedding_dim={width}, head.optimizer={config.head.optimizer}), divided by the number of processes."
    )
