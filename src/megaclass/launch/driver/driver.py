"""`megaclass run`: one command, many hosts, no orphans. Standard library only; torch is never imported here.

options -> hosts -> plan -> gang (agents, ranks, output) -> exit code
                      ^------- again, after a failure, with --restarts
"""

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megaclass.errors import LaunchError
from megaclass.launch.driver.job_run import Gang, GangSettings, Outcome
from megaclass.launch.driver.output import RankOutput, Screen
from megaclass.launch.driver.restart_limit import SHORT_S, RestartLimit
from megaclass.launch.driver.ssh import SshSettings, agent_command
from megaclass.launch.hosts import Host, given_hosts, hosts_from_batch_system
from megaclass.launch.options import RunOptions
from megaclass.launch.plan import describe_plan, passed_on, place_ranks
from megaclass.launch.signals import SignalInbox
from megaclass.launch.wire.plain_text import plain_lines

_FILES_PER_HOST = 8
_FILES_PER_RANK = 2
_SCREEN_S = 2.0
_LONGEST_PAUSE_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(options: RunOptions) -> int:
    """Exit code of the run: 0, or that of the first rank that failed; 255 for a lost host, 2 for what cannot start."""
    hosts, num_processes = _hosts(options)
    settings = _settings(options)
    placements = place_ranks(hosts, num_processes)
    here = [placement.host.name for placement in placements if placement.host.is_local]
    if len(here) > 1:
        print(
            f"megaclass run: WARNING {' and '.join(here)} are this machine: taken for {len(here)} hosts, whose ranks share "
            f"its cores, and its GPUs where they choose them by local rank.",
            file=sys.stderr,
        )
    if options.is_dry_run:
        starts = [agent_command(placement.host, settings.ssh) for placement in placements]
        print(
            describe_plan(
                placements,
                starts,
                command=settings.command,
                workdir=settings.workdir,
                given=settings.given,
                passed=settings.passed,
            )
        )
        return 0
    _allow_files(_FILES_PER_HOST * len(placements) + _FILES_PER_RANK * num_processes)
    return _run_with_restarts(options, settings, hosts, num_processes)


@dataclass(frozen=True, slots=True)
class ScreenVoice:
    """The driver's own sentences, between the lines of the ranks and never inside one.

    What they quote may come from another host: a terminal finds nothing in them to obey.
    """

    screen: Screen
    is_verbose: bool

    def say(self, text: str) -> None:
        self.screen.put("stderr", f"megaclass: {plain_lines(text)}\n".encode())

    def detail(self, text: str) -> None:
        if self.is_verbose:
            self.say(text)


def _run_with_restarts(options: RunOptions, settings: GangSettings, hosts: list[Host], num_processes: int) -> int:
    # By number: where they were closed, Python has no objects for them.
    screen = Screen({"stdout": 1, "stderr": 2})
    voice = ScreenVoice(screen, options.is_verbose)
    output = _output(options, screen, voice, num_processes)
    outcome = Outcome(exit_code=0)
    with SignalInbox(_SIGNALS) as inbox:
        try:
            limit = RestartLimit()
            for restart in range(options.restarts + 1):
                if restart:
                    if (number := _pause(limit.num_short, voice, inbox)) is not None:
                        outcome = Outcome(exit_code=128 + number, may_restart=False)
                        break
                    voice.say(f"restart {restart} of {options.restarts}: {num_processes} ranks on {_listed(hosts)}.")
                begun = time.monotonic()
                placements = place_ranks(hosts, num_processes)
                gang = Gang(
                    placements,
                    settings,
                    restart=restart,
                    restarts_left=options.restarts - restart,
                    output=output,
                    screen=screen,
                    voice=voice,
                    inbox=inbox,
                )
                outcome = gang.run()
                limit.note(has_started=gang.has_started, step=gang.step, seconds=time.monotonic() - begun)
                if outcome.exit_code == 0 or not outcome.may_restart or restart == options.restarts:
                    break
                hosts_before = hosts
                hosts, num_processes = _for_the_next_start(options, hosts, num_processes, outcome)
                if hosts != hosts_before:
                    limit.forget()
                if (why := limit.why_not_again()) is not None:
                    voice.say(why)
                    break
                if not hosts:
                    voice.say(
                        f"no restart: without {', '.join(outcome.failed_hosts)} too few slots are left for --min-np."
                    )
                    break
        finally:
            output.close()
            # Somebody who interrupts does not want to wait for a pager either.
            screen.close(None if outcome.may_restart else _SCREEN_S)
    return outcome.exit_code


def _pause(num_short: int, voice: ScreenVoice, inbox: SignalInbox) -> int | None:
    """Waits before a restart, longer after each of several short runs: a host that boots must not use all restarts up.

    The number of a signal that says not to go on; None to go on.
    """
    ends_at = time.monotonic() + min(_LONGEST_PAUSE_S, 2.0 ** (num_short - 1) - 1 if num_short else 0.0)
    if (left_s := ends_at - time.monotonic()) > 1:
        voice.say(f"{num_short} starts ended within {SHORT_S:g} s: the next one in {left_s:.0f} s.")
    while (left_s := ends_at - time.monotonic()) > 0:
        select.select([inbox], [], [], left_s)
        for number in inbox.taken():
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                return number
    return None


def _for_the_next_start(
    options: RunOptions, hosts: list[Host], num_processes: int, outcome: Outcome
) -> tuple[list[Host], int]:
    """The hosts to go on with and how many processes; no hosts when they do not suffice."""
    if not options.excludes_failed_hosts:
        return hosts, num_processes
    left = [host for host in hosts if host.name not in outcome.failed_hosts]
    num_slots = sum(host.slots for host in left)
    is_enough = num_slots >= (options.min_processes or num_processes)
    return (left, min(num_processes, num_slots)) if is_enough else ([], 0)


def _hosts(options: RunOptions) -> tuple[list[Host], int]:
    """The hosts, and how many processes on them."""
    hosts = given_hosts(options.hosts, options.hostfile)
    is_local = options.launcher == "local"
    if is_local and (others := [host.name for host in hosts if not host.is_local]):
        raise LaunchError(f"--launcher local starts everything here, but {others[0]} is another machine: leave -H out.")
    if not hosts and not is_local and (found := hosts_from_batch_system(os.environ)) is not None:
        hosts, what = found
        print(f"megaclass run: detected {what}", file=sys.stderr)
    if not hosts:
        if options.num_processes is None:
            raise LaunchError("How many processes? Give -np N, or hosts with their slots: -H gpu-1:8,gpu-2:8.")
        hosts = [Host(name="localhost", slots=options.num_processes, is_local=True)]
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    if options.min_processes is not None and options.min_processes > num_processes:
        raise LaunchError(f"--min-np {options.min_processes} is more than the {num_processes} processes to start with.")
    return hosts, num_processes


def _settings(options: RunOptions) -> GangSettings:
    return GangSettings(
        command=options.command,
        workdir=options.workdir,
        ssh=SshSettings(
            port=options.ssh_port,
            identity_file=options.ssh_identity_file,
            extra=options.ssh_args,
            remote_prefix=options.remote_prefix,
            python=options.python,
            heartbeat_s=options.heartbeat_s,
        ),
        given=dict(options.given_env),
        passed=passed_on(),
        interfaces=options.interfaces,
        master_port=options.master_port,
        start_timeout_s=options.start_timeout_s,
        heartbeat_s=options.heartbeat_s,
        grace_s=options.grace_s,
        hang_timeout_s=options.hang_timeout_s,
        allows_mixed_versions=options.allows_mixed_versions,
    )


def _output(options: RunOptions, screen: Screen, voice: ScreenVoice, num_ranks: int) -> RankOutput:
    wants_colour = "NO_COLOR" not in os.environ
    return RankOutput(
        screen,
        colours={"stdout": wants_colour and os.isatty(1), "stderr": wants_colour and os.isatty(2)},
        with_timestamp=options.with_timestamp,
        folder=options.output_dir,
        say=voice.say,
        num_ranks=num_ranks,
    )


def _allow_files(num_wanted: int) -> None:
    """Three pipes a host and two files a rank: a thousand hosts need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_wanted + 256
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise LaunchError(f"This many hosts and ranks need {wanted} open files; the limit is {hard} (`ulimit -Hn`).")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listed(hosts: Sequence[Host]) -> str:
    return ", ".join(f"{host.name}:{host.slots}" for host in hosts)
