"""`megaclass plan`: whether a job fits and how long it takes, before it starts."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megaclass.errors import DataError
from megaclass_launch.errors import UserError
from megaclass_launch.options import at_least

if TYPE_CHECKING:
    from megaclass.cli.hints import Commands
    from megaclass.config.schema import Config
    from megaclass.data.sources.source import ImageSource

_DECODE_S = 1.0
_MOST = 10**12


def add_plan_command(commands: "Commands") -> None:
    """Adds `plan`."""
    plan = commands.add_parser(
        "plan",
        help="say before the start whether a job fits, how fast it is, and on how few GPUs it would fit",
        description="Estimates memory, exchanges and time of a job without running it: megaclass plan demo -np 64 --gpu h200",
        epilog="Exits with 0 if the job fits and with 1 if it does not.",
    )
    plan.add_argument("recipe", type=Path, help="TOML file with the settings, or the name of a recipe of the package")
    plan.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that take precedence"
    )
    plan.add_argument("-np", "--num-proc", type=at_least(1), metavar="N", help="ranks in all (default: train.nproc)")
    plan.add_argument(
        "--ranks-per-host", type=at_least(1), default=8, metavar="N", help="GPUs of each host (default: 8)"
    )
    plan.add_argument(
        "--gpu", metavar="NAME", help="h200, h100, a100-80, 4090, … (default: that of this machine, or h200)"
    )
    plan.add_argument(
        "--network-gbit", type=at_least(1), default=100, metavar="N", help="network of each host (default: 100)"
    )
    plan.add_argument("--classes", type=_count, metavar="N", help="number of classes, if the data is not here")
    plan.add_argument("--images", type=_count, metavar="N", help="number of images, if the data is not here")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_plan)


def _count(text: str) -> int:
    """Parses a number of classes or images, also with commas or underscores between the digits."""
    digits = text.replace(",", "").replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MOST:,}")
    return int(digits)


def _plan(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.capacity.job import PlannedJob, gpu_named
    from megaclass.capacity.plan import make_plan, plan_text
    from megaclass.config.read import load_config

    config = load_config(options.recipe, options.settings)
    gpu = gpu_named(options.gpu)
    source = _source(config)
    num_classes, num_images = _sizes(config, source, options)
    job = PlannedJob(
        config=config,
        gpu=gpu,
        num_ranks=options.num_proc or config.train.nproc,
        ranks_per_host=options.ranks_per_host,
        num_classes=num_classes,
        num_images=num_images,
        image_size=_image_size(config, source),
        network=0.9 * options.network_gbit * 1e9 / 8,
    )
    plan = make_plan(job, decode_rate=_decode_rate(source) if source is not None else None)
    print(json.dumps(plan, indent=1) if options.json else plan_text(plan, job))
    return 0 if plan["fits"] else 1


def _source(config: "Config") -> "ImageSource | None":
    """Returns the data, or None if it is not on this machine or not drawn yet."""
    from megaclass.data.sources.open_source import open_source

    try:
        return open_source(config.data.path)
    except DataError:
        return None


def _sizes(config: "Config", source: "ImageSource | None", options: argparse.Namespace) -> tuple[int, int]:
    num_classes, num_images = options.classes, options.images
    if source is not None:
        num_classes, num_images = num_classes or source.num_classes, num_images or source.num_images
    elif config.synth.identities:
        num_classes = num_classes or config.synth.identities
        num_images = num_images or config.synth.identities * config.synth.images_per_identity
    if num_classes is None or num_images is None:
        raise UserError(
            f"There is no data at {config.data.path}, so the plan needs its size: give --classes and --images, "
            f"such as --classes 2000000 --images 40000000."
        )
    return num_classes, num_images


def _image_size(config: "Config", source: "ImageSource | None") -> tuple[int, int]:
    from megaclass.backbones import own_size
    from megaclass.image_size import height_and_width

    if size := config.data.size or own_size(config.backbone.name):
        return height_and_width(size)
    if source is not None:
        return source.image_size
    return height_and_width(config.synth.size)


def _decode_rate(source: "ImageSource") -> float:
    """Measures for a second how many images one thread of this machine reads and decodes."""
    from megaclass.data.tools.bench import read_and_decode_rate

    return read_and_decode_rate(source, seconds=_DECODE_S)
