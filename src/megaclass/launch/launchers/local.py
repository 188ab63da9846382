"""Processes of one job on this machine, in this terminal: what `megaclass train` with train.nproc starts."""

import os
import secrets
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from megaclass.distributed.network.job_secret import new_secret
from megaclass.errors import LaunchError
from megaclass.launch.agent.supervisor import Supervisor, default_threads
from megaclass.launch.driver.failure_report import exit_status, headline, stopped
from megaclass.launch.hosts import Host
from megaclass.launch.network import hold_store_port, reserve_port
from megaclass.launch.plan import job_environment, place_ranks, rank_environment, without_other_starters
from megaclass.launch.signals import SignalInbox, is_heeded, leave_closed_terminal

GRACE_S = 3.0
EXIT_RESUME_ME = 75
"""Of a rank that was asked to stop, saved, and can go on from there: no failure."""
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def run_local(command: Sequence[str], num_processes: int, env: Mapping[str, str] = os.environ) -> int:
    """Runs the command once a rank and waits; 0 when all ranks end with 0, else the exit code of the first that failed,
    else 75 when some rank ended with it.

    The ranks write to this terminal themselves. A rank that fails takes the others with it: SIGTERM, and SIGKILL 3 s later.
    Ctrl-C once is SIGINT to the ranks, twice SIGTERM, three times SIGKILL. SIGTERM and SIGUSR1 (preemption) are passed on,
    and the ranks take the time they need to save: only a second SIGTERM ends them within the 3 s. SIGHUP (the terminal was
    closed), unless ignored as under nohup, is a SIGTERM to them. If this process dies, the ranks are killed.
    """
    num_cores = len(os.sched_getaffinity(0))
    if num_processes > (most := max(16, 4 * num_cores)):
        raise LaunchError(
            f"{num_processes} processes were asked for on this machine: with {num_cores} cores it takes at most {most}. "
            f"For several machines: megaclass run -H host1:8,host2:8 …"
        )
    caught = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    caught += [signal.SIGHUP] if is_heeded(signal.SIGHUP) else []
    with (
        # Before the first start: a signal that comes in between must not orphan anybody.
        SignalInbox(caught) as inbox,
        reserve_port(0) as held,
        hold_store_port("127.0.0.1") as store,
        Supervisor(secrets.token_hex(8), grace_s=GRACE_S, adopts=False) as supervisor,
    ):
        [placement] = place_ranks([Host(name=socket.gethostname(), slots=num_processes, is_local=True)], num_processes)
        shared = job_environment(new_secret(), store.getsockname()[1])
        for world in placement.worlds:
            placed = rank_environment(world, host="localhost", address="127.0.0.1", port=held.getsockname()[1])
            threads = {"OMP_NUM_THREADS": str(default_threads(num_processes))}
            base = {**threads, **without_other_starters(env)}
            supervisor.start(world.rank, command, {**base, **placed, **shared, "MEGACLASS_STARTER": "megaclass"})
        return _wait(supervisor, inbox)


def _wait(supervisor: Supervisor, inbox: SignalInbox) -> int:
    status: int | None = None
    num_interrupts = 0
    is_asked = is_ending = wants_resume = False
    named: set[int] = set()
    while supervisor.running():
        select.select([inbox], [], [], 0.05 if is_ending else None)
        for number in inbox.taken():
            if number == signal.SIGINT:
                supervisor.send_signal(_INTERRUPTS[min(num_interrupts, 2)])
                num_interrupts += 1
                status = 128 + signal.SIGINT
            elif number == signal.SIGUSR1:
                supervisor.send_signal(number)
            elif number == signal.SIGHUP:
                # May come twice, from the kernel and from the shell: never the second SIGTERM that ends them.
                leave_closed_terminal()
                supervisor.send_signal(signal.SIGTERM)
            elif number == signal.SIGTERM and not is_asked:
                is_asked = True
                print(f"megaclass: SIGTERM to the ranks; a second one ends them in {GRACE_S:g} s.", file=sys.stderr)
                supervisor.send_signal(number)
            elif number == signal.SIGTERM:
                status = 128 + signal.SIGTERM
                supervisor.end()
                is_ending = True
        named = _name_stopped(supervisor, named)
        for worker in supervisor.reap():
            assert worker.code is not None
            wants_resume |= worker.code == EXIT_RESUME_ME
            if worker.code not in (0, EXIT_RESUME_ME) and status is None:
                others = len(supervisor.running())
                text = headline(worker.rank, socket.gethostname(), worker.pid, worker.code, others)
                print(f"megaclass: {text}", file=sys.stderr, flush=True)
                status = exit_status(worker.code)
                supervisor.end()
                is_ending = True
        if is_ending:
            supervisor.is_clear()
    supervisor.end()
    return status or (EXIT_RESUME_ME if wants_resume else 0)


def _name_stopped(supervisor: Supervisor, named: set[int]) -> set[int]:
    """Says which ranks were stopped since the last call; returns those that are. SIGCHLD comes when a rank is stopped."""
    are_stopped = {worker.rank: worker.pid for worker in supervisor.running() if supervisor.is_stopped(worker)}
    for rank in are_stopped.keys() - named:
        print(f"megaclass: {stopped(rank, socket.gethostname(), are_stopped[rank])}", file=sys.stderr, flush=True)
    return set(are_stopped)
