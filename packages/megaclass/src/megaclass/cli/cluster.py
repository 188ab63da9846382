"""`megaclass check` and `megaclass bench`: the commands that test a cluster and measure it."""

import argparse
import json
import sys
from pathlib import Path

from megaclass.cli.hints import Commands
from megaclass_launch.options import at_least, seconds


def add_cluster_commands(commands: Commands) -> None:
    """Adds `check` and `bench`."""
    check = commands.add_parser(
        "check",
        help="check whether training would start here or on these hosts",
        description="Checks whether training would start, and prints a table with advice: megaclass check -H gpu-1:8,gpu-2:8",
        epilog="Exits with 0 only if training would start.",
    )
    check.add_argument("recipe", nargs="?", help="a recipe that must be the same file on every host")
    where = check.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="h1:8,h2:8", help="hosts with their slots (default: this machine)")
    where.add_argument(
        "-hostfile", "--hostfile", type=Path, metavar="FILE", help="file of hosts with lines `h1 slots=8`"
    )
    check.add_argument("-p", "--ssh-port", type=at_least(1), metavar="PORT", help="port of the ssh servers")
    check.add_argument("-i", "--ssh-identity-file", type=Path, metavar="FILE", help="private key for ssh")
    check.add_argument(
        "--ssh-arg", action="append", default=[], metavar="ARG", help="additional argument for ssh (repeatable)"
    )
    check.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="Python on the hosts (default: this one)"
    )
    check.add_argument("--workdir", metavar="DIR", help="working folder on the hosts (default: this one)")
    check.add_argument(
        "--network-interface", metavar="NAME", help="interface between the hosts (default: towards host 0)"
    )
    check.add_argument(
        "--master-port", type=at_least(0), default=0, metavar="PORT", help="port of rank 0 (default: a free one)"
    )
    check.add_argument(
        "--start-timeout", type=seconds, default=30.0, metavar="S", help="seconds to wait for a host (default: 30)"
    )
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.set_defaults(run=_check)

    bench = commands.add_parser("bench", help="measure collectives, and what bounds a training step")
    bench_commands = bench.add_subparsers(required=True, metavar="COMMAND")
    allreduce = bench_commands.add_parser(
        "allreduce",
        help="measure all-reduce and other collectives by size, and check every result",
        description="Prints the table of all_reduce_perf: megaclass run -np 4 -H h1:2,h2:2 megaclass bench allreduce -e 64M",
    )
    allreduce.add_argument("-b", "--min-bytes", default="8", metavar="SIZE", help="first size (default: 8)")
    allreduce.add_argument("-e", "--max-bytes", default="256M", metavar="SIZE", help="last size (default: 256M)")
    allreduce.add_argument("-f", "--factor", type=int, default=2, metavar="N", help="factor between sizes (default: 2)")
    allreduce.add_argument(
        "-n", "--iterations", type=int, default=20, metavar="N", help="repetitions per size (default: 20)"
    )
    allreduce.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="longest time per size; large sizes are repeated less often (default: 2)",
    )
    allreduce.add_argument(
        "--operations",
        default="all_reduce,all_gather,reduce_scatter,broadcast",
        metavar="NAMES",
        help="comma-separated operations (default: all four)",
    )
    allreduce.add_argument("--backend", default="auto", help="gloo, nccl, or auto: all that work here (default: auto)")
    allreduce.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    allreduce.set_defaults(run=_bench)
    _add_bench_step(bench_commands)


def _check(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass_launch.check.check import CheckSettings, check
    from megaclass_launch.driver.ssh import SshSettings
    from megaclass_launch.hosts import given_hosts

    hosts = given_hosts(options.hosts, options.hostfile)
    workdir = options.workdir or str(Path.cwd())
    ssh = SshSettings(
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        extra=tuple(options.ssh_arg),
        python=options.python,
    )
    report = check(
        CheckSettings(
            hosts=tuple(hosts),
            ssh=ssh,
            workdir=workdir,
            config=options.recipe,
            interface=options.network_interface,
            master_port=options.master_port,
            start_timeout_s=options.start_timeout,
            run_options=_run_options(options, workdir),
        )
    )
    print(json.dumps(report.as_json(), indent=1) if options.json else report.table().lstrip("\n"))
    return 0 if report.would_start else 1


def _run_options(options: argparse.Namespace, workdir: str) -> tuple[str, ...]:
    """Returns options for `megaclass run` that are equivalent to those given to `check`."""
    found = [f"--ssh-arg={argument}" for argument in options.ssh_arg]
    for name, value in (
        ("--ssh-port", options.ssh_port),
        ("--ssh-identity-file", options.ssh_identity_file),
        ("--network-interface", options.network_interface),
        ("--master-port", options.master_port or None),
    ):
        if value is not None:
            found += [name, str(value)]
    found += ["--python", options.python, "--workdir", workdir, "--start-timeout", f"{options.start_timeout:g}"]
    return tuple(found)


def _bench(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass_launch.ranks.bench_allreduce import BenchSettings, parse_bytes, run_bench, warn_of_one_rank
    from megaclass_launch.world import world_from_environment

    settings = BenchSettings(
        min_bytes=parse_bytes(options.min_bytes),
        max_bytes=parse_bytes(options.max_bytes),
        factor=options.factor,
        iterations=options.iterations,
        seconds_per_size=options.seconds,
        operations=tuple(options.operations.split(",")),
        backend=options.backend,
    )
    world = world_from_environment()
    warn_of_one_rank(world)
    return run_bench(settings, world, is_json=options.json)


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
