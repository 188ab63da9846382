"""`megaclass run --launcher ray`: one actor per rank in a placement group of a running Ray cluster (extra `ray`)."""

import importlib
import os
import re
import secrets
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from megaclass_launch.driver.outcome import (
    LastLines,
    Outcome,
    OutcomeDecision,
    Reason,
    StartResult,
    failure_report,
    headline,
    run_job,
)
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.errors import LaunchError
from megaclass_launch.exit_codes import (
    EXIT_HOST_LOST,
    EXIT_USER_ERROR,
    exit_status,
    is_worth_restarting,
    signal_name,
)
from megaclass_launch.hosts import Host
from megaclass_launch.launchers.ray_worker import RankActor
from megaclass_launch.launchers.replace_process import with_network_variables
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import job_environment, passed_on, place_ranks, rank_environment
from megaclass_launch.rendezvous.job_secret import new_secret
from megaclass_launch.signals import ENDING_SIGNALS, InterruptLadder
from megaclass_launch.world import World

_POLL_S = 0.2
_CONNECT_S = 5.0
_FULL_SCREEN_TICK_S = 0.02


def launch(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs the job as actors of Ray. Exit codes are those of ssh; 255 stands for a rank that Ray lost."""
    if hosts:
        raise LaunchError("--launcher ray: Ray chooses the hosts; leave -H and --hostfile out, and give -np N.")
    if options.is_dry_run:
        ranks = f"{options.num_processes} ranks" if options.num_processes else "one rank per GPU of the cluster"
        print(f"{ranks}, packed onto as few nodes as possible, each with a CPU, and a GPU if the cluster has any")
        print(f"command: {shlex.join(options.command)}\nworking folder: {options.workdir}")
        return 0
    options = with_network_variables(options)
    ray = _connected_ray()
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        num_processes = options.num_processes or num_gpus
        if not num_processes:
            raise LaunchError("How many processes? Give -np N; this Ray cluster has no GPUs to count.")
        return run_job(
            lambda io: _RayJob(ray, num_processes, bool(num_gpus), options, io),
            options,
            num_processes,
            num_restarts=options.restarts,
        )
    finally:
        ray.shutdown()


class _RayJob:
    """A RestartableJob. Ray chooses the hosts of every start."""

    def __init__(self, ray: Any, num_processes: int, has_gpus: bool, options: RunOptions, io: DriverIo) -> None:
        self._ray = ray
        self._num_processes = num_processes
        self._has_gpus = has_gpus
        self._options = options
        self._io = io

    def start(self, restart: int) -> StartResult:
        # Every start has its own placement group: a node may have gone, and with it the bundles that were there.
        bundle = {"CPU": 1, "GPU": 1} if self._has_gpus else {"CPU": 1}
        group = _requested_group(self._ray, self._num_processes, bundle)
        try:
            # Ray reserves all bundles or none, so two jobs never wait for each other's rest.
            number = self._wait_for(group, bundle)
            if number is not None:
                outcome = Outcome(exit_code=exit_status(-number), may_restart=False)
                return StartResult(outcome=outcome, has_started=False)
            actors = self._requested_actors(group)
            return StartResult(outcome=_RayRun(self._ray, actors, self._options, restart, self._io).run())
        finally:
            self._ray.util.remove_placement_group(group)

    def exclude_failed_hosts(self, outcome: Outcome) -> bool:
        # Ray itself avoids nodes that are gone.
        return False

    def describe(self) -> str:
        return f"{self._num_processes} ranks"

    def _requested_actors(self, group: Any) -> list[Any]:
        """Returns an actor per bundle of the placement group."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor = self._ray.remote(RankActor)
        return [
            actor.options(
                num_cpus=1,
                num_gpus=1 if self._has_gpus else 0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(self._num_processes)
        ]

    def _wait_for(self, group: Any, bundle: dict[str, int]) -> int | None:
        """Waits for the placement group; returns a signal by which the user ended the job meanwhile, or None."""
        deadline = time.monotonic() + self._options.start_timeout_s
        while not group.wait(_POLL_S):
            for number in self._io.signals.taken():
                if number in ENDING_SIGNALS:
                    return number
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Ray had no room for {self._num_processes} x {bundle} within {self._options.start_timeout_s:g} s: "
                    f"other jobs use it (see `ray status`). Wait longer with --start-timeout."
                )
        return None


def _connected_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError('--launcher ray needs Ray: pip install "megaclass-launch[ray]"') from error
    # Before ray.init, whose own error comes late and names no address.
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        # The driver shows the ranks' output, line by line with its prefix; Ray's own log would repeat it.
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR", include_dashboard=None)
    except (ConnectionError, RuntimeError) as error:
        where = os.environ.get("RAY_ADDRESS", "on this machine")
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(f"There is no Ray cluster {where} ({reason}). Start one: ray start --head") from error
    return ray


def _check_address(address: str) -> None:
    """Raises LaunchError if no process listens there: Ray itself would wait for more than a minute."""
    match = re.fullmatch(r"([^/]+):([0-9]{1,5})", address)
    if match is None:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=_CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"There is no Ray cluster at RAY_ADDRESS={address} ({error.strerror or error}): "
            f"unset RAY_ADDRESS, or start one there with ray start --head --port={match[2]}."
        ) from error


def _requested_group(ray: Any, num_processes: int, bundle: dict[str, int]) -> Any:
    resources = ray.cluster_resources()
    for resource, each in bundle.items():
        if resources.get(resource, 0) < num_processes * each:
            raise LaunchError(
                f"-np {num_processes} requires {num_processes * each} {resource}s, but the Ray cluster has "
                f"{int(resources.get(resource, 0))}: lower -np, or add a host with ray start --address=<head>."
            )
    module = importlib.import_module("ray.util.placement_group")
    return module.placement_group([bundle] * num_processes, strategy="PACK")


class _RayRun:
    """All ranks of one start. They begin together and end together. Everything happens in the main thread."""

    def __init__(self, ray: Any, actors: list[Any], options: RunOptions, restart: int, io: DriverIo) -> None:
        self._ray = ray
        self._actors = actors
        self._options = options
        self._restart = restart
        self._io = io
        # Filled by _start, when Ray has told on which node each actor runs; indices are ranks from then on.
        self._worlds: list[World] = []
        self._hosts: list[str] = []
        self._pids: dict[int, int] = {}
        self._last_lines: list[LastLines] = []
        self._decision = OutcomeDecision()
        self._ladder = InterruptLadder()
        self._has_passed_sigterm = False

    def run(self) -> Outcome:
        """Starts all ranks, waits until they have ended, and returns the outcome."""
        try:
            self._start()
            self._watch()
        finally:
            # An actor's Supervisor ends with its process, and the orphan killers end what the rank has left.
            for actor in self._actors:
                self._ray.kill(actor)
        if self._decision.report:
            self._io.messages.say(self._decision.report)
        return self._decision.final()

    def _start(self) -> None:
        """Sorts the ranks by node, so those of one host are neighbours, and starts them."""
        try:
            places = self._ray.get([actor.where.remote() for actor in self._actors])
        except self._ray.exceptions.RayError as error:
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise LaunchError(
                f"An actor of Ray did not start ({reason.strip()}): megaclass must be installed on every node, as here."
            ) from error
        # Ray numbers its bundles as it likes; local ranks need the ranks of one node to be neighbours.
        nodes = list(dict.fromkeys(place["node"] for place in places))
        order = sorted(range(len(places)), key=lambda i: nodes.index(places[i]["node"]))
        self._actors = [self._actors[i] for i in order]
        places = [places[i] for i in order]
        counts = [sum(place["node"] == node for place in places) for node in nodes]
        on_nodes = [Host(name=node, slots=count) for node, count in zip(nodes, counts, strict=True)]
        self._worlds = [world for placed in place_ranks(on_nodes, len(places)) for world in placed.worlds]
        self._hosts = [place["host"] for place in places]
        self._last_lines = [LastLines() for _ in places]
        # The actor of rank 0 holds the ports on its own node until the rank binds them.
        ports = self._ray.get(self._actors[0].hold_ports.remote(self._options.master_port))
        shared = job_environment(new_secret(), ports["store_port"])
        run_id, given_env = secrets.token_hex(8), self._options.given_env
        starts = []
        for actor, place, world in zip(self._actors, places, self._worlds, strict=True):
            env = {
                **passed_on(),
                **given_env,
                **rank_environment(
                    world, host=place["host"], address=places[0]["address"], port=ports["port"], given=given_env
                ),
                **shared,
                "MEGACLASS_RESTART": str(self._restart),
            }
            if gpus := sorted({gpu for other in places if other["node"] == place["node"] for gpu in other["gpus"]}):
                # A rank takes the GPU of its local rank among those that Ray gave to this run on its node.
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            one = (f"{run_id}-{world.rank}", world.rank, self._options.command, env)
            starts.append(actor.start.remote(*one, self._options.workdir, self._options.signal_grace_s))
        # All starts are under way before the first one is waited for.
        for world, started in zip(self._worlds, starts, strict=True):
            try:
                self._pids[world.rank] = self._ray.get(started)
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, LaunchError) else error
                raise LaunchError(f"{self._hosts[world.rank]}: {cause}") from error

    def _watch(self) -> None:
        polls = {actor.poll.remote(_POLL_S): rank for rank, actor in enumerate(self._actors)}
        while polls:
            ready, _ = self._ray.wait([*polls], timeout=_POLL_S)
            for number in self._io.signals.taken():
                self._on_signal(number, len(polls))
            # One poll per rank is always under way; Ray runs one call of an actor at a time.
            for answer in ready:
                rank = polls.pop(answer)
                if not self._note_answer(rank, answer):
                    polls[self._actors[rank].poll.remote(_POLL_S)] = rank
            # Without polls nothing is read: the ranks' pipes fill and the ranks wait.
            while self._io.screen.is_full:
                time.sleep(_FULL_SCREEN_TICK_S)

    def _note_answer(self, rank: int, answer: Any) -> bool:
        """Shows what the rank printed; returns whether the rank has ended."""
        try:
            output, code = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            reason = str(error).partition("\n")[0]
            self._io.messages.say(f"rank {rank} on {self._hosts[rank]} was lost: {reason}")
            self._fail(rank, EXIT_HOST_LOST)
            return True
        for stream, data in output:
            self._last_lines[rank].add(self._io.output.put(rank, stream, data))
        if code is None:
            return False
        self._last_lines[rank].add(self._io.output.finish(rank))
        if code != 0:
            if not self._decision.is_ending:
                others = len(self._actors) - 1
                self._io.messages.say(headline(rank, self._hosts[rank], self._pids[rank], code, others))
            self._fail(rank, code)
        return True

    def _fail(self, rank: int, code: int) -> None:
        lines = self._last_lines[rank].shown()
        report = failure_report(rank, self._hosts[rank], self._pids[rank], code, lines) + self._io.output.where(rank)
        outcome = Outcome(exit_code=exit_status(code), may_restart=is_worth_restarting(code))
        # Ranks that fail after the first one do so because of it.
        if not self._decision.decide(Reason.FAULT, outcome, report):
            return
        if self._options.restarts > self._restart and code == EXIT_USER_ERROR:
            self._io.messages.say(f"exit code {code} means that something has to be fixed first: no restart.")
        for other, actor in enumerate(self._actors):
            if other != rank:
                actor.end.remote(self._options.fault_grace_s)

    def _on_signal(self, number: int, num_running: int) -> None:
        if number not in ENDING_SIGNALS:
            self._pass_on(number)
            return
        self._decision.decide(Reason.SIGNAL, Outcome(exit_code=exit_status(-number), may_restart=False))
        if number == signal.SIGINT:
            sent = self._ladder.climb()
            self._io.messages.say(self._ladder.message(sent, num_running))
            self._pass_on(sent)
        else:
            self._io.messages.say(f"{signal_name(number)}: ending the ranks.")
            grace_s = self._options.fault_grace_s if self._has_passed_sigterm else None
            self._has_passed_sigterm = number == signal.SIGTERM
            for actor in self._actors:
                actor.end.remote(grace_s)

    def _pass_on(self, number: int) -> None:
        for actor in self._actors:
            actor.signal.remote(int(number))
