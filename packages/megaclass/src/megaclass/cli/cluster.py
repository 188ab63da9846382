"""`megaclass check` and `megaclass bench`: the commands that test a cluster and measure it."""

from megaclass.cli.hints import Commands
from megaclass_launch.command import add_allreduce_command, add_check_command


def add_cluster_commands(commands: Commands) -> None:
    """Adds `check` and `bench`."""
    add_check_command(commands)
    bench = commands.add_parser("bench", help="measure collectives")
    add_allreduce_command(bench.add_subparsers(required=True, metavar="COMMAND"))
