"""`megaclass train` in the process that the user starts: checks the settings, then trains here or starts local ranks.

What a rank does is in `rank_main.py`. Under another launcher (megaclass run, torchrun, srun, mpirun) every process is a
rank already, and this file only checks the settings.
"""

import logging
import sys
from collections.abc import Sequence

from megaclass.backbones import check_backbone
from megaclass.config.schema import Config
from megaclass.data.augment import parse_augment
from megaclass.training.model.build import build_margin
from megaclass.training.start.restart import StartMode, check_start
from megaclass_launch.errors import LaunchError
from megaclass_launch.operating_system import is_linux
from megaclass_launch.world import NO_STARTER, World, starters_variables, world_from_environment

_logger = logging.getLogger("megaclass.training")
# Every backbone takes images of this size: the real size is checked when the data is open.
_SMALLEST_SIZE = 16


def start_training(config: Config, arguments: Sequence[str], mode: StartMode) -> int:
    """Returns the exit code of the run. `arguments`: the command line after `megaclass train`, to start ranks with."""
    _check_settings(config)
    world = world_from_environment()
    if world.starter != NO_STARTER:
        if world.size == 1 and config.train.nproc > 1:
            _logger.warning(_unused_nproc(config, world), extra={"sender": world.name()})
        return _train_here(config, world, mode)
    check_start(config, mode, ["megaclass", "train", *arguments])
    if config.train.nproc == 1:
        return _train_here(config, world, mode)
    if not is_linux():
        raise LaunchError(
            f"train.nproc is {config.train.nproc}, but several processes are started and watched on Linux only: set "
            f"train.nproc=1 on {sys.platform}."
        )
    # Not at module level, because it needs modules that exist on Linux only.
    from megaclass_launch.launchers.local import run_local

    return run_local([sys.executable, "-P", "-m", "megaclass", "train", *arguments], config.train.nproc)


def _train_here(config: Config, world: World, mode: StartMode) -> int:
    # Not at module level: a process that only starts ranks need not load what trains and evaluates.
    from megaclass.training.rank_main import train_as_rank

    return train_as_rank(config, world, mode)


def _check_settings(config: Config) -> None:
    """Builds what needs no data, for its errors: a typing mistake should not cost the start of the ranks."""
    check_backbone(
        config.backbone.name, config.data.size or (config.synth.size if config.synth.identities else _SMALLEST_SIZE)
    )
    build_margin(config.head)
    parse_augment(config.data.augment)


def _unused_nproc(config: Config, world: World) -> str:
    """Explains a world of one rank: in a shell under a launcher (srun --pty bash), every command looks like one."""
    return (
        f"train.nproc={config.train.nproc} is ignored, because {world.starter} is in charge and started one process. "
        f"Start more with it, or, in a shell that it opened, first run `unset {' '.join(starters_variables())}`."
    )
