"""The command line of a job, with horovodrun's option names. Standard library only."""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megaclass_launch.errors import LaunchError
from megaclass_launch.horovod_options import (
    TUNABLES,
    add_flags,
    environment_for,
    from_config,
    read_config,
    what_is_wrong,
)
from megaclass_launch.launchers import LAUNCHERS
from megaclass_launch.placement import HOROVOD_MARK
from megaclass_launch.versions import megaclass_version

_NO_EFFECT = {
    "--gloo": "the controller is neither gloo nor MPI",
    "--mpi": "no MPI is needed",
    "--jsrun": "ranks are started over ssh",
    "--mpi-args": "no MPI is needed",
    "--binding-args": "no MPI is needed",
    "--disable-cache": "nothing is cached",
}
_NUM_VALUES = dict.fromkeys(("--mpi-args", "--binding-args"), 1)
HOROVOD_VERSION = "0.28.1"
PROGRAM = "megaclass-run"
"""The command of this package. Other packages have names of their own for it."""
FAULT_GRACE_S = 3.0
_SIGNAL_GRACE_S = 30.0


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers that are not below the minimum."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Parses a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _two_numbers(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]{1,6},[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers of open files")
    first, second = text.split(",")
    return int(first), int(second)


_GROUPS = {
    "hosts": "hosts (default: those of the Slurm, PBS or LSF job, otherwise this machine)",
    "environment": "environment",
    "times": "times in seconds, and restarts",
    "elastic": "elastic jobs, whose number of processes may change while they run",
    "output": "output",
}


def _option(group: str, *flags: str, **argument: Any) -> Any:
    """Returns a field of RunOptions that is an option of the command line. argument: as for add_argument."""
    return field(metadata={"group": group, "flags": flags, "argument": argument})


_of_hosts, _of_environment, _times, _elastic, _output = (partial(_option, group) for group in _GROUPS)
_of_reach = partial(_option, "reach")
"""Options that `check` has as well; in the help of `run` they stand among those of hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The parsed command line of a job."""

    program: str
    """The command that was typed, for messages: megaclass-run, horovodrun, or a command of another package."""
    command: tuple[str, ...]
    num_processes: int | None = _option(
        "", "-n", "-np", "--num-proc", type=at_least(1), metavar="N", help="number of processes"
    )
    launcher: str = _option(
        "", "--launcher", choices=tuple(LAUNCHERS), default="ssh", metavar="NAME",
        help=f"what starts the processes: {', '.join(LAUNCHERS)} (default: ssh, which is not needed on one machine)",
    )  # fmt: skip
    checks_build: bool = _option(
        "", "-cb", "--check-build", action="store_true",
        help="print the available frameworks, controllers and operations",
    )  # fmt: skip

    hosts: str | None = _of_reach("-H", "--hosts", metavar="h1:8,h2:8", help="hosts with their slots")
    hostfile: Path | None = _of_reach(
        "-hostfile", "--hostfile", type=Path, metavar="FILE", help="file with lines `h1 slots=8`"
    )
    ssh_port: int | None = _of_reach(
        "-p", "--ssh-port", type=at_least(1), metavar="PORT", help="port of the ssh servers"
    )
    ssh_identity_file: Path | None = _of_reach(
        "-i", "--ssh-identity-file", type=Path, metavar="FILE", help="private key for ssh"
    )
    ssh_args: tuple[str, ...] = _of_reach(
        "--ssh-arg", action="append", default=[], metavar="ARG", help="additional argument for ssh; repeatable"
    )
    python: str = _of_reach(
        "--python", default=sys.executable, metavar="PATH",
        help="Python interpreter with megaclass on the hosts (default: the path of this one)",
    )  # fmt: skip
    workdir: str = _of_reach("--workdir", metavar="DIR", help="working folder on the hosts (default: this one)")
    interfaces: tuple[str, ...] = _of_reach(
        "--network-interface", "--network-interfaces", metavar="NAMES", action="append", default=[],
        help="network interfaces to use, comma-separated (default: the one towards host 0)",
    )  # fmt: skip
    master_port: int = _of_reach(
        "--master-port", type=at_least(0), default=0, metavar="PORT", help="port of rank 0 (default: a free one)"
    )
    remote_prefix: str = _of_hosts(
        "--remote-prefix", default="", metavar="TEXT", help="shell text in front of the agent's command on other hosts"
    )
    allows_mixed_versions: bool = _of_hosts(
        "--allow-mixed-versions", action="store_true", help="allow different versions of Python, torch or megaclass"
    )

    given_env: Mapping[str, str]
    """Variables for the ranks: -x, --env-file, horovodrun's options."""
    is_horovod: bool = _of_environment(
        "--horovod", action="store_true",
        help="also give the ranks Horovod's variables: HOROVOD_RANK, HOROVOD_SIZE and so on",
    )  # fmt: skip

    start_timeout_s: float = _times(
        "--start-timeout", type=seconds, default=30.0, metavar="S", help="time for all hosts to answer (default: 30)"
    )
    heartbeat_s: float = _times(
        "--heartbeat", type=seconds, default=30.0, metavar="S",
        help="the job ends within this time after a host is lost (default: 30)",
    )  # fmt: skip
    fault_grace_s: float
    """Time from SIGTERM to SIGKILL after a failure. The other ranks wait for the one that is gone and cannot save."""
    signal_grace_s: float
    """The same after a signal to the driver: the ranks have time for a checkpoint."""
    hang_timeout_s: float = _times(
        "--hang-timeout", type=seconds, default=0.0, metavar="S",
        help="end the job and name the culprit if no rank prints or makes progress for this long (default: off)",
    )  # fmt: skip
    restarts: int = _times(
        "--restarts", type=at_least(0), metavar="N", help="number of restarts after failures (default: 0)"
    )
    excludes_failed_hosts: bool = _times(
        "--exclude-failed-hosts", action="store_true", help="restart without the hosts that failed"
    )

    min_processes: int | None = _elastic(
        "--min-np", "--min-num-proc", type=at_least(1), metavar="N",
        help="minimum number of processes (default: -np); with --exclude-failed-hosts, of a restart",
    )  # fmt: skip
    max_processes: int | None = _elastic(
        "--max-np", "--max-num-proc", type=at_least(1), metavar="N",
        help="maximum number of processes (default: all slots)",
    )  # fmt: skip
    host_discovery_script: str | None = _elastic(
        "--host-discovery-script", metavar="COMMAND",
        help="prints the hosts to use, lines `host` or `host:slots`; run every second",
    )  # fmt: skip
    slots_per_host: int = _elastic(
        "--slots-per-host", "--slots", type=at_least(1), default=1, metavar="N",
        help="slots of hosts for which the script names none (default: 1)",
    )  # fmt: skip
    elastic_timeout_s: float = _elastic(
        "--elastic-timeout", type=seconds, default=600.0, metavar="S",
        help="time to wait for --min-np processes before the job ends (default: 600)",
    )  # fmt: skip
    reset_limit: int | None = _elastic(
        "--reset-limit", type=at_least(0), metavar="N",
        help="maximum number of changes (default: any number); without the options above, the same as --restarts",
    )  # fmt: skip
    cooldown_s: tuple[float, float] | None = _elastic(
        "--blacklist-cooldown-range", "--cooldown-range", type=seconds, nargs=2, metavar=("LOW", "HIGH"),
        help="seconds for which a failed host gets no new processes; doubles with each failure (default: forever)",
    )  # fmt: skip

    output_dir: Path | None = _output(
        "--output-filename", type=Path, metavar="DIR", help="also write the output to DIR/rank.<n>/{stdout,stderr}"
    )
    with_timestamp: bool = _output(
        "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        help="print the time before each line",
    )  # fmt: skip
    is_verbose: bool = _output("--verbose", action="store_true", help="print what the driver does")
    is_dry_run: bool = _output("--dry-run", action="store_true", help="print the whole plan and exit")
    remarks: tuple[str, ...]
    """One line per option that is accepted but has no effect."""
    call_fds: tuple[int, int] | None = _option("", "--call-fds", type=_two_numbers, help=argparse.SUPPRESS)
    """Pipes from and to a process that has its function called; see wire/call.py."""

    @property
    def is_elastic(self) -> bool:
        """Returns whether the number of ranks may change while the job runs."""
        has_range = self.max_processes is not None or self.host_discovery_script is not None
        return has_range or (self.min_processes is not None and not self.excludes_failed_hosts)

    @property
    def min_ranks(self) -> int:
        """Returns the smallest number of ranks with which an elastic job runs."""
        return self.min_processes or self.num_processes or 1

    @property
    def max_ranks(self) -> int:
        """Returns the largest number of ranks of an elastic job: by default as many as there are slots."""
        return self.max_processes or sys.maxsize


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.")


def parse_options(
    arguments: Sequence[str], env: Mapping[str, str] = os.environ, *, program: str = PROGRAM
) -> RunOptions:
    """Parses the command line. Raises LaunchError for options that are wrong or contradict each other."""
    parser = run_parser(program)
    given = parser.parse_args(list(arguments))
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command and not given.checks_build:
        parser.error(f"there is no command to run: {program} -np 2 python train.py")
    _check_elastic(given, parser)
    given_env, handed_over = _environment(given, env)
    typed: dict[str, Any] = {field.name: getattr(given, field.name, None) for field in fields(RunOptions)}
    options = RunOptions(
        **{
            **typed,
            "program": program,
            "command": tuple(command),
            "reset_limit": given.reset_limit if given.reset_limit is not None else given.restarts,
            "cooldown_s": tuple(given.cooldown_s) if given.cooldown_s else None,
            "ssh_args": tuple(given.ssh_args),
            "workdir": given.workdir or str(Path.cwd()),
            "given_env": given_env,
            "interfaces": tuple(name for name in ",".join(given.interfaces).split(",") if name),
            "fault_grace_s": given.grace or FAULT_GRACE_S,
            "signal_grace_s": given.grace or _SIGNAL_GRACE_S,
            "restarts": given.restarts if given.restarts is not None else given.reset_limit or 0,
            "remarks": (*given.remarks, *handed_over),
        }
    )
    _check_launcher(options)
    return options


def _check_launcher(options: RunOptions) -> None:
    """Raises LaunchError for options that the launcher would ignore."""
    typed = [flag for one in fields(options) if getattr(options, one.name) for flag in one.metadata.get("flags", ())]
    if found := [flag for flag in LAUNCHERS[options.launcher] if flag in typed]:
        raise LaunchError(
            f"--launcher {options.launcher} does not support {' and '.join(found)}: leave that out, or leave --launcher "
            f"out, and the ranks are started over ssh."
        )


def _check_elastic(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses elastic options that contradict each other."""
    least, start, most = given.min_processes, given.num_processes, given.max_processes
    known = [(flag, n) for flag, n in (("--min-np", least), ("-np", start), ("--max-np", most)) if n is not None]
    for (low_flag, low), (high_flag, high) in itertools.pairwise(known):
        if low > high:
            parser.error(f"{low_flag} {low} is more than {high_flag} {high}")
    if given.host_discovery_script is not None and (given.hosts or given.hostfile):
        parser.error("--host-discovery-script names the hosts: leave -H and --hostfile out")
    if given.host_discovery_script is not None and least is None and start is None:
        parser.error("--host-discovery-script needs --min-np N or -np N: with how many processes may the job start?")
    if (span := given.cooldown_s) and span[0] > span[1]:
        parser.error(f"--blacklist-cooldown-range {span[0]:g} {span[1]:g}: the first number must not be the larger one")


def run_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Returns the parser of a job's command line; its results have the names of the fields of RunOptions.

    program: the command to name in the help; it may be another package's.
    """
    parser = _Parser(
        prog=program,
        usage=f"{program} -np N [-H host:slots,host:slots] [options] command …",
        description="Start a command N times, on this machine or on several, and never leave a process behind.",
        epilog="Other options of horovodrun are accepted; a message names those that have no effect.",
    )
    parser.add_argument("-v", "--version", action=_Version, nargs=0, help="print the version and exit")
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    groups |= {name: parser.add_argument_group(title) for name, title in _GROUPS.items()}
    add_host_options(groups["hosts"])
    for name, group in groups.items():
        _add_options(group, name)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command that each process runs")
    groups["environment"].add_argument(
        "-x", dest="env", action="append", default=[], metavar="NAME[=VALUE]", help="environment variable for all ranks"
    )
    groups["environment"].add_argument(
        "--env-file", type=Path, metavar="FILE", help="file with variables for all ranks, lines NAME=VALUE"
    )
    groups["times"].add_argument(
        "--grace", type=seconds, metavar="S",
        help=f"time from SIGTERM to SIGKILL (default: {FAULT_GRACE_S:g} after a failure, {_SIGNAL_GRACE_S:g} after SIGTERM "
        "or SIGHUP to this command, so ranks can save)",
    )  # fmt: skip
    parser.set_defaults(remarks=[])
    for flag in _NO_EFFECT:
        parser.add_argument(flag, action=_Remark, nargs=_NUM_VALUES.get(flag, 0), help=argparse.SUPPRESS)
    parser.add_argument("--config-file", type=Path, help=argparse.SUPPRESS)
    add_flags(parser)
    return parser


def add_host_options(hosts: argparse._ActionsContainer) -> None:
    """Adds the options that name the hosts and say how they are reached; `check` has the same ones."""
    _add_options(hosts.add_mutually_exclusive_group(), "reach", "hosts", "hostfile")
    _add_options(hosts, "reach")


def _add_options(where: argparse._ActionsContainer, group: str, *names: str) -> None:
    """Adds the options of a group; names: only these, which are left out otherwise."""
    for one in fields(RunOptions):
        is_chosen = one.name in names if names else one.name not in ("hosts", "hostfile")
        if one.metadata.get("group") == group and is_chosen:
            where.add_argument(*one.metadata["flags"], dest=one.name, **one.metadata["argument"])


class _Version(argparse.Action):
    """Prints the version; after --horovod, which horovodrun gives, the one of Horovod's API, which scripts compare."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        print(HOROVOD_VERSION if namespace.is_horovod else f"megaclass {megaclass_version()}")
        parser.exit()


class _Remark(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        namespace.remarks = [
            *namespace.remarks,
            f"{self.option_strings[0]} has no effect: {_NO_EFFECT[self.option_strings[0]]}.",
        ]


def _horovods(given: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Returns the variables for horovodrun's options, from its file and the command line, and remarks about the latter."""
    typed = {tunable.name: getattr(given, tunable.name) for tunable in TUNABLES}
    typed = {name: value for name, value in typed.items() if value is not None}
    values = (from_config(read_config(given.config_file)) if given.config_file is not None else {}) | typed
    if wrong := what_is_wrong(values):
        raise LaunchError(f"{wrong[0].upper()}{wrong[1:]}.")
    remarks = []
    for tunable in TUNABLES:
        if tunable.name not in typed:
            continue
        flag = tunable.flag if typed[tunable.name] is not False else tunable.off_flags[0]
        if tunable.no_effect:
            remarks.append(f"{flag} has no effect: {tunable.no_effect}.")
        else:
            remarks.append(f"{flag} is for the ranks, which find it as {tunable.variable}.")
    return environment_for(values), remarks


def _environment(given: argparse.Namespace, env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables for the ranks (horovodrun's options, then the file, then -x) and remarks about the former."""
    found, remarks = _horovods(given)
    if given.env_file is not None:
        found |= _read_env_file(given.env_file)
    for text in given.env:
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise LaunchError(f"Cannot read -x {text!r}: expected NAME or NAME=VALUE.")
        if equals:
            found[name] = value
        elif name in env:
            found[name] = env[name]
        else:
            raise LaunchError(
                f"-x {name}: the variable is not set here. Set it, or give its value with -x {name}=VALUE."
            )
    if given.is_horovod:
        found[HOROVOD_MARK] = "1"
    return found, remarks


def _read_env_file(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError as error:
        raise LaunchError(f"Cannot read --env-file {path}: {error.strerror}.") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        # The line itself is not shown, because it may hold a secret.
        if not equals or not name.strip() or "\0" in line:
            raise LaunchError(f"Cannot read line {number} of --env-file {path}: expected NAME=VALUE.")
        found[name.strip()] = value
    return found
