"""`megaclass run --launcher ray`: the ranks as workers in a placement group of a running Ray cluster (extra `ray`)."""

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

from megaclass.distributed.network.job_secret import new_secret
from megaclass.errors import LaunchError
from megaclass.launch.driver.driver import ScreenVoice
from megaclass.launch.driver.failure_report import LastLines, epitaph, exit_status, headline, signal_name
from megaclass.launch.driver.job_run import EXIT_HOST_LOST, EXIT_USER_ERROR, Outcome
from megaclass.launch.driver.output import RankOutput, Screen
from megaclass.launch.driver.restart_limit import RestartLimit
from megaclass.launch.hosts import Host
from megaclass.launch.launchers.local import EXIT_RESUME_ME
from megaclass.launch.launchers.ray_worker import RankKeeper
from megaclass.launch.options import RunOptions
from megaclass.launch.plan import job_environment, passed_on, place_ranks, rank_environment
from megaclass.launch.signals import SignalInbox
from megaclass.world import World

_POLL_S = 0.2
_CONNECT_S = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def run_on_ray(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Exit code as with ssh: 0, that of the first rank that failed, or 255 for a rank that Ray lost."""
    if hosts:
        raise LaunchError("--launcher ray: Ray chooses the hosts; leave -H and --hostfile out, and give -np N.")
    if options.is_dry_run:
        ranks = f"{options.num_processes} ranks" if options.num_processes else "a rank for each GPU of the cluster"
        print(f"{ranks}, packed onto as few nodes as possible, each with a CPU, and a GPU where the cluster has any")
        print(f"command: {shlex.join(options.command)}\nworking folder: {options.workdir}")
        return 0
    ray = _connected_ray()
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        num_processes = options.num_processes or num_gpus
        if not num_processes:
            raise LaunchError("How many processes? Give -np N; this Ray cluster has no GPUs to count.")
        return _run_with_restarts(ray, num_processes, bool(num_gpus), options)
    finally:
        ray.shutdown()


def _run_with_restarts(ray: Any, num_processes: int, has_gpus: bool, options: RunOptions) -> int:
    screen = Screen({"stdout": 1, "stderr": 2})
    voice = ScreenVoice(screen, options.is_verbose)
    plain = {"stdout": False, "stderr": False}
    output = RankOutput(
        screen,
        colours=plain,
        with_timestamp=options.with_timestamp,
        folder=options.output_dir,
        say=voice.say,
        num_ranks=num_processes,
    )
    try:
        limit = RestartLimit()
        for restart in range(options.restarts + 1):
            if restart:
                voice.say(f"restart {restart} of {options.restarts}: {num_processes} ranks.")
            # A new one for each start: a node may have gone, and with it the bundles that lay there.
            group = _placement_group(ray, num_processes, {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}, options)
            try:
                gang = _RayGang(ray, group, num_processes, has_gpus, options, restart, screen, voice, output)
                begun = time.monotonic()
                outcome = gang.run()
                limit.note(has_started=True, step=None, seconds=time.monotonic() - begun)
            finally:
                ray.util.remove_placement_group(group)
            if outcome.exit_code == 0 or not outcome.may_restart or restart == options.restarts:
                break
            if (why := limit.why_not_again()) is not None:
                voice.say(why)
                break
        return outcome.exit_code
    finally:
        output.close()
        screen.close()


def _connected_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError('--launcher ray needs Ray: pip install "megaclass[ray]"') from error
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        # The ranks' output comes from us, line by line and marked, not from Ray's own log.
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR", include_dashboard=None)
    except (ConnectionError, RuntimeError) as error:
        where = os.environ.get("RAY_ADDRESS", "on this machine")
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(f"There is no Ray cluster {where} ({reason}). Start one: ray start --head") from error
    return ray


def _check_address(address: str) -> None:
    """Ray itself waits more than a minute for a cluster that is not there."""
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


def _placement_group(ray: Any, num_processes: int, bundle: dict[str, int], options: RunOptions) -> Any:
    module = importlib.import_module("ray.util.placement_group")
    there = ray.cluster_resources()
    for resource, each in bundle.items():
        if there.get(resource, 0) < num_processes * each:
            raise LaunchError(
                f"-np {num_processes} asks for {num_processes * each} {resource}s, but the Ray cluster has "
                f"{int(there.get(resource, 0))}: lower -np, or add a host with ray start --address=<head>."
            )
    group = module.placement_group([bundle] * num_processes, strategy="PACK")
    if not group.wait(options.start_timeout_s):
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"Ray had no room for {num_processes} x {bundle} within {options.start_timeout_s:g} s: others use it "
            f"(see `ray status`). Wait longer with --start-timeout."
        )
    return group


class _RayGang:
    """All ranks of one start. They begin together and end together."""

    def __init__(
        self,
        ray: Any,
        group: Any,
        num_processes: int,
        has_gpus: bool,
        options: RunOptions,
        restart: int,
        screen: Screen,
        voice: ScreenVoice,
        output: RankOutput,
    ) -> None:
        self._ray = ray
        self._options = options
        self._restart = restart
        self._screen = screen
        self._voice = voice
        self._output = output
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor = ray.remote(RankKeeper)
        self._keepers = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if has_gpus else 0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(num_processes)
        ]
        self._worlds: list[World] = []
        self._hosts: list[str] = []
        self._pids: dict[int, int] = {}
        self._last_lines: list[LastLines] = []
        self._first_failure: tuple[int, int] | None = None
        self._num_interrupts = 0
        self._exit_code: int | None = None

    def run(self) -> Outcome:
        with SignalInbox(_SIGNALS) as inbox:
            try:
                self._start()
                return self._watch(inbox)
            finally:
                for keeper in self._keepers:
                    self._ray.kill(keeper)

    def _start(self) -> None:
        """Sorts the ranks by node, so that those of one host are neighbours, and starts them."""
        try:
            places = self._ray.get([keeper.where.remote() for keeper in self._keepers])
        except self._ray.exceptions.RayError as error:
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise LaunchError(
                f"A worker of Ray did not start ({reason.strip()}): megaclass must be installed on every node, as here."
            ) from error
        nodes = list(dict.fromkeys(place["node"] for place in places))
        order = sorted(range(len(places)), key=lambda i: nodes.index(places[i]["node"]))
        self._keepers = [self._keepers[i] for i in order]
        places = [places[i] for i in order]
        counts = [sum(place["node"] == node for place in places) for node in nodes]
        on_nodes = [Host(name=node, slots=count) for node, count in zip(nodes, counts, strict=True)]
        self._worlds = [world for placed in place_ranks(on_nodes, len(places)) for world in placed.worlds]
        self._hosts = [place["host"] for place in places]
        self._last_lines = [LastLines() for _ in places]
        port = self._ray.get(self._keepers[0].hold_port.remote(self._options.master_port))
        # A port that the user chose is the only one: a firewall may let no other through.
        is_chosen = bool(self._options.master_port)
        store_port = 0 if is_chosen else self._ray.get(self._keepers[0].hold_store_port.remote())
        shared = job_environment(new_secret(), store_port)
        run_id = secrets.token_hex(8)
        starts = []
        for keeper, place, world in zip(self._keepers, places, self._worlds, strict=True):
            env = {
                **passed_on(),
                **self._options.given_env,
                **rank_environment(
                    world,
                    host=place["host"],
                    address=places[0]["address"],
                    port=port,
                    given=self._options.given_env,
                ),
                **shared,
                "MEGACLASS_RESTART": str(self._restart),
            }
            if gpus := sorted({gpu for other in places if other["node"] == place["node"] for gpu in other["gpus"]}):
                # A rank takes the GPU of its local rank among those that Ray gave to this run on its node.
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            one = (f"{run_id}-{world.rank}", world.rank, self._options.command, env)
            starts.append(keeper.start.remote(*one, self._options.workdir, self._options.grace_s))
        for world, started in zip(self._worlds, starts, strict=True):
            try:
                self._pids[world.rank] = self._ray.get(started)
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, LaunchError) else error
                raise LaunchError(f"{self._hosts[world.rank]}: {cause}") from error

    def _watch(self, inbox: SignalInbox) -> Outcome:
        polls = {keeper.poll.remote(_POLL_S): rank for rank, keeper in enumerate(self._keepers)}
        while polls:
            ready, _ = self._ray.wait([*polls], timeout=_POLL_S)
            for number in inbox.taken():
                self._on_signal(number)
            for answer in ready:
                rank = polls.pop(answer)
                if not self._hear(rank, answer):
                    polls[self._keepers[rank].poll.remote(_POLL_S)] = rank
            while self._screen.is_full:
                time.sleep(0.02)
        if self._exit_code is not None:
            return Outcome(exit_code=self._exit_code, may_restart=False)
        if self._first_failure is None:
            return Outcome(exit_code=0)
        rank, code = self._first_failure
        last = self._last_lines[rank].shown()
        self._voice.say(epitaph(rank, self._hosts[rank], self._pids[rank], code, last) + self._output.where(rank))
        may_restart = code not in (EXIT_USER_ERROR, EXIT_RESUME_ME)
        if self._options.restarts > self._restart and code == EXIT_USER_ERROR:
            self._voice.say(f"exit code {code} says that something must be mended first: no restart.")
        return Outcome(exit_code=exit_status(code), may_restart=may_restart)

    def _hear(self, rank: int, answer: Any) -> bool:
        """Whether the rank is over."""
        try:
            output, code = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            self._voice.say(f"rank {rank} on {self._hosts[rank]} was lost: {str(error).partition(chr(10))[0]}")
            self._fail(rank, EXIT_HOST_LOST)
            return True
        for stream, data in output:
            self._last_lines[rank].add(self._output.put(rank, stream, data))
        if code is None:
            return False
        self._last_lines[rank].add(self._output.finish(rank))
        if code != 0:
            num_others = len(self._keepers) - 1
            if self._first_failure is None:
                self._voice.say(headline(rank, self._hosts[rank], self._pids[rank], code, num_others))
            self._fail(rank, code)
        return True

    def _fail(self, rank: int, code: int) -> None:
        if self._first_failure is None:
            self._first_failure = (rank, code)
            for other, keeper in enumerate(self._keepers):
                if other != rank:
                    keeper.end.remote()

    def _on_signal(self, number: int) -> None:
        """As with ssh: Ctrl-C once asks, twice insists, three times kills; SIGTERM is an order to end."""
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self._pass_on(number)
            return
        self._exit_code = 128 + number
        if number == signal.SIGINT:
            sent = _INTERRUPTS[min(self._num_interrupts, 2)]
            self._num_interrupts += 1
            self._voice.say(f"Ctrl-C: {sent.name} to all ranks.")
            self._pass_on(sent)
        else:
            self._voice.say(f"{signal_name(number)}: ending the ranks.")
            for keeper in self._keepers:
                keeper.end.remote()

    def _pass_on(self, number: int) -> None:
        for keeper in self._keepers:
            keeper.signal.remote(int(number))
