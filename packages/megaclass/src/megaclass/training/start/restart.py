"""How a run starts: new, resumed, replacing another run, or restarted by `megaclass run --restarts`.

A launcher that restarts a failed job repeats the same command, for example `train … --overwrite`. Taken literally, the
second start would throw away what the first one trained. The lock file of the run folder therefore records whether this
job has already put its own run into the folder. Rank 0 alone reads and writes it, while it holds the lock:

    first start                      all settings, data and weights are loaded
    ───────────► "" (previous run) ──────────────────────────────────────────► "taken" (run of this job)
                  ▲  │                take_over: clear if --overwrite,             │  ▲
                  └──┘                write config.toml                            └──┘
             a failure leaves it,                                       a failure leaves it,
             a restart starts as told                                   a restart continues this run

In the state "taken", or if the folder had to be free at first, a restart (`_mode_after_restart`)
  - resumes from the newest checkpoint that this job has written, if there is one;
  - otherwise replaces the folder's run, if that was started with the same settings: it ended before its first checkpoint;
  - otherwise starts as told, and is refused if the folder holds the run of another job.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from megaclass.checkpoint.manifest import read_manifest
from megaclass.checkpoint.retention import published, step_of, unfinished_saves
from megaclass.config.read import to_toml
from megaclass.config.schema import Config
from megaclass.distributed.agreement import on_main_rank_for_long, text_of_main_rank
from megaclass.errors import CheckpointError
from megaclass.progress import size_text
from megaclass.training.model.distil import CACHE_FILES
from megaclass.training.run.folder import RunFolder
from megaclass.training.run.run import make_data
from megaclass.training.sinks import TRACKERS
from megaclass_launch.errors import ConfigError
from megaclass_launch.files import folder_bytes, free_bytes
from megaclass_launch.world import NO_STARTER, World

_logger = logging.getLogger("megaclass.training")
# How long rank 0 of the previous start may take to end: the grace periods of the launchers, and a write to a slow disk.
_PREVIOUS_START_ENDS_S = 120.0
_WAITING_RANKS_S = 1.0
# For the configuration, metrics and events of a run that has no checkpoint yet.
_LEAST_ROOM_BYTES = 2**20
_ROOM_POLL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class StartMode:
    """How a run starts, as the options of `megaclass train` say."""

    resume: str | None = None
    """None for a new run, "auto" for the newest whole checkpoint of the run folder, "best", or the path of a checkpoint."""
    overwrite: bool = False
    """Replace the run in the run folder."""
    matches_classes: bool = False
    """Match a changed list of classes by name, or by number if there are no names, instead of refusing it."""
    trusts_numbers: bool = False
    """Take classes without names for the same ones if their numbers are equal, even if their images differ."""
    command: tuple[str, ...] = ()
    """The command line as typed, for errors that show a changed one; empty if it is not known."""

    def __post_init__(self) -> None:
        if self.resume is not None and self.overwrite:
            raise ConfigError("--resume and --overwrite exclude each other: continue the run or replace it.")

    @property
    def needs_free_folder(self) -> bool:
        return self.resume is None and not self.overwrite


def check_start(config: Config, mode: StartMode, command: Sequence[str]) -> None:
    """Finds mistakes before any rank is started, and draws the data if the recipe says so. Called by the parent.

    command: the command line as typed, from which the error about an occupied folder derives the one that resumes.
    """
    if mode.needs_free_folder:
        RunFolder(Path(config.train.run_dir)).check_free(command)
    require_packages(config)
    make_data(config)


@dataclass(slots=True)
class FolderLock:
    """The lock of the run folder: a process takes it once and holds it until `held` ends."""

    held: ExitStack
    is_taken: bool = False

    def take(self, folder: RunFolder, patience_s: float) -> None:
        """Takes the lock, unless this process has it."""
        if not self.is_taken:
            self.held.enter_context(folder.locked(patience_s))
            self.is_taken = True


def prepare_run(
    config: Config,
    folder: RunFolder,
    world: World,
    device: torch.device,
    mode: StartMode,
    lock: FolderLock,
    *,
    is_continued: bool = False,
) -> StartMode:
    """Collective. Rank 0 locks the folder, decides how the run starts, and makes the data; returns the decision.

    is_continued: an elastic job has begun this run with other ranks, so rank 0 decides as after a restart.
    """
    decided = mode
    # Under torchrun, srun or megaclass run no parent has called check_start. The ranks that our own parent starts cannot
    # be told from those, so rank 0 repeats the checks there, which takes milliseconds: the data exists by then.
    is_first_check = world.starter != NO_STARTER

    def prepare() -> None:
        nonlocal decided
        is_restart = is_continued or (is_first_check and os.environ.get("MEGACLASS_RESTART", "0") != "0")
        if is_first_check:
            require_packages(config)
            if mode.needs_free_folder and not is_restart:
                folder.check_free()
        # A restart may come before the previous rank 0 has ended.
        # The other ranks of a script hold it for a moment to learn that rank 0 has written the results of its last run.
        lock.take(folder, _PREVIOUS_START_ENDS_S if is_restart else _WAITING_RANKS_S if world.size > 1 else 0.0)
        if is_restart:
            if not is_continued:
                wait_for_room(folder)
            # Only the holder of the lock may read what the previous start left.
            decided = _mode_after_restart(config, folder, mode)
            if decided.needs_free_folder:
                folder.check_free()
        else:
            folder.set_taken(False)
        if is_first_check:
            make_data(config)

    on_main_rank_for_long(prepare, device)
    _logger.debug(f"rank {world.rank}: starting with {decided}")
    # The other ranks may see an older state of a network file system: they start as rank 0 decided.
    shared = text_of_main_rank(lambda: json.dumps(asdict(replace(decided, command=()))), device)
    return replace(StartMode(**json.loads(shared)), command=mode.command)


def wait_for_room(folder: RunFolder) -> None:
    """Waits until the disk of the run folder has room for another checkpoint: on a full disk a restart would train in vain."""
    needed = max([_LEAST_ROOM_BYTES, *(folder_bytes(one) for one in published(folder.checkpoints)[-1:])])
    # The next save removes what a killed one has left.
    needed -= sum(folder_bytes(one) for one in unfinished_saves(folder.checkpoints) if one.is_dir())
    has_said = False
    while (free := free_bytes(folder.path)) < needed:
        if not has_said:
            _logger.warning(
                f"the disk of {folder.path} has {size_text(free)} free, and a checkpoint of this run takes "
                f"{size_text(needed)}: the restart waits until there is room. Make room, or end the job with Ctrl-C."
            )
            has_said = True
        time.sleep(_ROOM_POLL_S)


def take_over(config: Config, folder: RunFolder, mode: StartMode) -> None:
    """Rank 0. Puts this run into the folder, as late as possible: mistakes in settings, data or weights were found by now."""
    if mode.overwrite:
        # What the teacher has embedded for this run is there already.
        folder.clear(but=CACHE_FILES if config.distil.cache else ())
    folder.write_config(to_toml(config))
    folder.set_taken(True)


def require_packages(config: Config) -> None:
    """Checks that the optional packages of the chosen exports and trackers are installed, before the first step.

    Only rank 0 exports and sends metrics, so only its host needs them.
    """
    onnx = (config.export.onnx, "export.onnx", "false", "onnx", ("onnx", "onnxscript", "onnxruntime"))
    services = [
        (tracker.is_wanted(config.train), tracker.setting, tracker.off, tracker.extra, tracker.packages)
        for tracker in TRACKERS
    ]
    for is_asked, setting, off, extra, names in (onnx, *services):
        missing = [name for name in names if not _is_installed(name)]
        if is_asked and missing:
            raise ConfigError(
                f"{setting} needs {', '.join(missing)}: pip install 'megaclass[{extra}]', or disable it: {setting}={off}."
            )


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # Without an origin it is an ordinary folder of that name, such as the one that wandb leaves where it ran.
    return spec is not None and spec.origin is not None


def _mode_after_restart(config: Config, folder: RunFolder, mode: StartMode) -> StartMode:
    """Rank 0, with the lock held. Decides how a restarted job starts; see the diagram at the top of this file."""
    if not folder.holds_a_run() or not (mode.needs_free_folder or folder.is_taken()):
        return mode
    if any(step_of(checkpoint) > _first_step(mode) for checkpoint in published(folder.checkpoints)):
        return replace(mode, resume="auto", overwrite=False)
    has_same_settings = folder.holds_config(to_toml(config))
    return replace(mode, overwrite=True) if has_same_settings and mode.resume is None else mode


def _first_step(mode: StartMode) -> int:
    """Returns the step of the checkpoint that a run was told to start from; later checkpoints are its own."""
    if mode.resume in (None, "auto", "best"):
        return -1
    try:
        return read_manifest(Path(mode.resume)).step
    except CheckpointError:
        # Deleted since: every checkpoint that is left is the run's own.
        return -1
