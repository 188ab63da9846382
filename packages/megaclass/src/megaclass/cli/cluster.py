"""`megaclass check` and `megaclass bench`: the commands that test a cluster and measure it."""

import argparse
from pathlib import Path

from megaclass.cli.hints import Commands
from megaclass_launch.command import add_allreduce_command, add_check_command


def add_cluster_commands(commands: Commands) -> None:
    """Adds `check` and `bench`."""
    add_check_command(commands)
    bench = commands.add_parser("bench", help="measure collectives, and what bounds a training step")
    bench_commands = bench.add_subparsers(required=True, metavar="COMMAND")
    add_allreduce_command(bench_commands)
    _add_bench_step(bench_commands)


def _add_bench_step(bench_commands: Commands) -> None:
    """Adds `bench step` to the commands of `bench`."""
    meaning = "measure the training step of a recipe with its data and without reading; name the bottleneck"
    step = bench_commands.add_parser("step", help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
    step.add_argument("recipe", type=Path, help="TOML file with the settings")
    step.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings that take precedence over the file",
    )
    step.add_argument("--steps", type=int, default=20, help="number of steps per data source (default: 20)")
    step.add_argument("--json", action="store_true", help="print the result as JSON")
    step.set_defaults(run=_bench_step)


def _bench_step(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.bench.step import bench_step
    from megaclass.config.read import load_config

    config = load_config(options.recipe, options.settings)
    return bench_step(config, given[2:], num_steps=max(1, options.steps), is_json=options.json)
