"""`megaclass plan`: whether a job fits and how long it takes, before it starts."""

import argparse
import json
from typing import TYPE_CHECKING

from megaclass.cli.arguments import add_commands
from megaclass.errors import DataError
from megaclass_launch.errors import UserError

if TYPE_CHECKING:
    from megaclass.cli.hints import Commands

_DECODE_S = 1.0
_COMMANDS = """
plan: say before the start whether a job fits, how fast it is, and on how few GPUs it would fit
    Estimates memory, exchanges and time of a job without running it: megaclass plan demo -np 64 --gpu h200. Exits with 0 if
        the job fits and with 1 if it does not.
  recipe            path            TOML file with the settings, or the name of a recipe of the package
  @settings
  -np --num-proc    positive N      ranks in all (default: train.nproc)
  --ranks-per-host  positive=8 N    GPUs of each host
  --gpu             text NAME       h200, h100, a100-80, 4090, … (default: that of this machine, or h200)
  --network-gbit    positive=100 N  network of each host
  --classes         count N         number of classes, if the data is not here
  --images          count N         number of images, if the data is not here
  @json
"""


def add_plan_command(commands: "Commands") -> None:
    """Adds `plan`."""
    add_commands(commands, _COMMANDS, {"plan": _plan})


def _plan(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.backbones import own_size
    from megaclass.capacity.job import PlannedJob, gpu_named
    from megaclass.capacity.plan import make_plan, plan_text
    from megaclass.config.read import load_config
    from megaclass.data.sources.open_source import open_source
    from megaclass.data.sources.source import TensorSource
    from megaclass.data.tools.bench import read_and_decode_rate
    from megaclass.image_size import height_and_width, is_sequence

    config = load_config(options.recipe, options.settings)
    gpu, synth = gpu_named(options.gpu), config.synth
    num_classes, num_images = options.classes, options.images
    size = config.data.size or own_size(config.backbone.name)
    image_size, decode_rate = height_and_width(size or synth.size), None
    try:
        source = open_source(config.data.path)
        num_classes, num_images = num_classes or source.num_classes, num_images or source.num_images
        image_size = height_and_width(size) if size else source.image_size
        if is_sequence(source.image_size):
            raise UserError(f"No plan can be made for sequences, whose lengths decide the memory: {source.describe()}.")
        # Measured with one thread of this machine; features need no decoding.
        decode_rate = None if isinstance(source, TensorSource) else read_and_decode_rate(source, seconds=_DECODE_S)
    except DataError:
        # It is not on this machine, or not drawn yet.
        if synth.identities:
            num_classes = num_classes or synth.identities
            num_images = num_images or synth.identities * synth.images_per_identity
    if num_classes is None or num_images is None:
        raise UserError(
            f"There is no data at {config.data.path}, so the plan needs its size: give --classes and --images, "
            f"such as --classes 2000000 --images 40000000."
        )
    job = PlannedJob(
        config=config,
        gpu=gpu,
        num_ranks=options.num_proc or config.train.nproc,
        ranks_per_host=options.ranks_per_host,
        num_classes=num_classes,
        num_images=num_images,
        image_size=image_size,
        network=0.9 * options.network_gbit * 1e9 / 8,
    )
    plan = make_plan(job, decode_rate=decode_rate)
    print(json.dumps(plan, indent=1) if options.json else plan_text(plan, job))
    return 0 if plan["fits"] else 1
