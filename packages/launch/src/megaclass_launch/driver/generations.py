"""The generations of an elastic job: which hosts and workers it uses, and who gets which rank. Standard library only.

            all started          every member waits at the rendezvous,
            workers are ready    and there are at least --min-np of them
    START ------------------> GENERATION n --------------------------------> GENERATION n + 1
      |                          |     ^                                          |
      |                          |     +--- a member failed or hangs, or ---------+
      |                          |          members left: hosts have changed
      |                          | a member ends with exit code 0
      v                          v
     END <------------------- FINISHING
          signals, exit code 2, all members failed, too few ranks for --elastic-timeout, --reset-limit

`advance` is called in every pass of the driver's loop, after messages and times have changed the job, and does what follows
from its state, whatever has changed it:

    update_hosts      the answers of the discovery come into the table of hosts
    _open_agents      on usable hosts, until there are enough slots; agents of removed hosts leave
    _start_new        workers in free slots, also while a generation trains: they import their modules meanwhile
    _form_first       all first workers are ready: publish generation 1
    _announce_change  no member has left: "leave at your next commit", once per change of the hosts
    _note_break       one is gone, waits for the next generation, or hangs: "do not wait for the others"
    _form_next        all members that are left are ready, and are enough: publish
    _kill_late        members that do not come to the rendezvous in time, dismissed workers that do not end
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from megaclass_launch.driver.agent_pipe import AgentPipe, PipeState
from megaclass_launch.driver.discovery import DiscoveryAnswer
from megaclass_launch.driver.job import Generation, JobState, Open, RunningGeneration, WorkerRecord, named
from megaclass_launch.driver.job_end import end, end_after_failure, order_end
from megaclass_launch.driver.outcome import Outcome, Reason
from megaclass_launch.driver.start import drop_starting, new_generation, start_workers
from megaclass_launch.exit_codes import EXIT_USER_ERROR
from megaclass_launch.hosts import Host
from megaclass_launch.placement import worlds_of
from megaclass_launch.wire.protocol import Message, Why
from megaclass_launch.world import World

_LEAVE_S = 10.0
"""Time for a dismissed worker to end by itself."""
_JOIN_TOGETHER_S = 30.0
"""Workers that were started within this time are waited for, so they join in one generation."""
_LEAVE_HUNG_S = 20.0
"""Time for the members of a generation that hangs to leave it: those that only wait for another one do so at once."""


def advance(job: JobState, now: float) -> None:
    """Does what follows from the state of an elastic job."""
    # Once there is a reason to end, nothing new is started. That includes exit code 75 (Reason.RESUME), after which the
    # other ranks save and leave by themselves.
    if job.decision.reason is not Reason.NONE:
        _close_if_empty(job)
    elif not job.is_closing:
        _kill_leavers(job, now)
        if job.is_finishing:
            _finish(job)
        else:
            # Hosts that are about to be connected to may have room: workers are started after they have answered.
            if not _open_agents(job, now):
                _start_new(job, now)
            _form(job, now)


# ---- hosts ----


def update_hosts(job: JobState, name: str, answers: Sequence[DiscoveryAnswer]) -> None:
    """Takes over answers of the discovery. name: of the script or the file."""
    for answer in answers:
        if not answer.problem:
            _take_hosts(job, answer.hosts)
        elif job.hosts.listed:
            # A script may fail for a moment, because a server does not answer, say; the ranks that run need no answer.
            job.messages.say(f"WARNING {name}: {answer.problem}; its last good answer stands.")
        else:
            job.messages.say(f"{name}: {answer.problem}. The job needs hosts to start with.")
            end(job, Outcome(exit_code=EXIT_USER_ERROR, may_restart=False))


def _take_hosts(job: JobState, hosts: Sequence[Host]) -> None:
    is_first = not job.hosts.listed
    added, removed = job.hosts.update(hosts)
    # In the first answer every host is new; the message about the first generation names them.
    if is_first:
        return
    for host in added:
        job.messages.say(f"{host.name}:{host.slots} was added; new ranks there join at the next commit.")
    for host in removed:
        left = job.hosts.slots(host.name)
        what = f"has {left} slot(s) now" if left else "was removed"
        job.messages.say(f"{host.name} {what}; its ranks that are not needed leave at the next commit.")


# ---- new workers ----


def _open_agents(job: JobState, now: float) -> bool:
    """Opens agents on usable hosts, and lets those of removed hosts leave; returns whether any is being opened."""
    is_opening = False
    # Of a banned host, whose agent stays, the ranks that still run there count, but not the slots that nothing can fill.
    num_slots = sum(
        job.hosts.slots(name) if job.hosts.is_usable(name, now) else len(job.ranks.on_host(name)) for name in job.agents
    )
    for name, host in job.hosts.listed.items():
        if num_slots >= job.options.max_ranks:
            break
        if name not in job.agents and job.hosts.is_usable(name, now):
            job.order(Open(host))
            num_slots += host.slots
            is_opening = True
    for name, agent in list(job.agents.items()):
        # The last worker there leaves at a commit, possibly long after the host was removed.
        if name not in job.hosts.listed and not job.ranks.on_host(name):
            dismiss_agent(job, agent)
    return is_opening


def dismiss_agent(job: JobState, agent: AgentPipe) -> None:
    """Lets the agent of a host leave that the job does not use any more."""
    job.forget(agent)
    job.tell(agent, {"do": "end", "grace_s": None})


def _start_new(job: JobState, now: float) -> None:
    """Starts workers in the free slots of usable hosts."""
    # The first workers start together, once every host has answered: they form one generation, not one per host. Further
    # ones only replace those that were lost since, if the others are too few.
    is_first, staying = job.current is None, job.ranks.staying()
    if is_first and (len(staying) >= job.options.min_ranks or job.is_any_starting()):
        return
    free = _free_slots(job, now)
    num_wanted = job.options.min_ranks if staying else job.options.num_processes or job.options.min_ranks
    if is_first and not is_enough(job, len(staying) + len(free), num_wanted, now):
        return
    if not free:
        return
    new = [job.ranks.add(host, slot, now) for host, slot in free]
    # A guess, as if the next generation had exactly these members. The worker needs values before its rendezvous, for
    # its output and for programs that read the environment when they are imported; the rendezvous replaces them.
    guessed = in_rank_order([*(staying if is_first else job.ranks.members()), *new], list(job.hosts.listed))
    worlds = worlds_by_worker(guessed)
    for worker in new:
        worker.shown_rank = worlds[worker.number].rank
    if job.current is not None:
        generation: Generation | None = job.current.facts
    else:
        generation = new_generation(job, 1, [worker.host for worker in guessed])
        job.printed_at = now
    assert generation is not None, "an agent that has said hello has named its ports"
    max_ranks = job.options.max_processes or 0
    start_workers(job, new, worlds, generation, is_running=job.has_progressed, max_ranks=max_ranks)
    if is_first:
        job.messages.detail(f"started {len(new)} workers on {listed(new)}")


def _free_slots(job: JobState, now: float) -> list[tuple[str, int]]:
    """Returns hosts and slots for new workers, no more than --max-np allows."""
    # Workers that are leaving count in the slots, which they still hold, but not in the number of ranks.
    room = job.options.max_ranks - len(job.ranks.staying())
    free = [
        (name, slot)
        for name in job.hosts.listed
        if job.hosts.is_usable(name, now) and name in job.agents and job.agents[name].state is not PipeState.STARTING
        for slot in job.ranks.free_slots(name, job.hosts.slots(name))
    ]
    return free[: max(0, room)]


def is_enough(job: JobState, num_ranks: int, num_needed: int, now: float) -> bool:
    """Returns whether there are enough ranks for a generation; if there are too few for too long, the job is given up.

    To be called again and again while there are too few.
    """
    if num_ranks >= num_needed:
        # The next shortage has the whole time again, and a message of its own.
        job.short_since, job.has_told_shortage = None, False
        return True
    # The time counts from the first moment, although the user is told later: a host that never connects also uses it up.
    job.short_since = job.short_since or now
    # No message while hosts are still being found or connected to: at every start there are too few for a moment.
    if not job.hosts.listed or job.is_any_starting():
        return False
    limit = f"{job.options.elastic_timeout_s:g} s (--elastic-timeout)"
    flag = "-np" if job.current is None and num_needed == job.options.num_processes else "--min-np"
    if not job.has_told_shortage:
        job.has_told_shortage = True
        job.messages.say(
            f"{num_ranks} rank(s) can run, but {num_needed} are needed ({flag}): waiting for hosts for up to {limit}."
        )
    if now - job.short_since > job.options.elastic_timeout_s:
        job.messages.say(
            f"no new generation: {num_ranks} rank(s) can run, {num_needed} are needed ({flag}), and no host was added "
            f"within {limit}."
        )
        end_after_failure(job)
    return False


# ---- one generation after the other ----


def _form(job: JobState, now: float) -> None:
    """Announces changes, ends the current generation, publishes the next."""
    if job.current is None:
        _form_first(job, now)
        return
    members = job.ranks.members()
    if not job.current.is_broken(members):
        _announce_change(job, job.current, now)
        return
    # Before anything else: collectives of the members may be waiting for one that is gone.
    _note_break(job, job.current, members, now)
    if not members:
        # The state was in their memory; without any of them no worker can continue.
        end_after_failure(job)
    elif all(worker.is_ready for worker in members):
        _form_next(job, members, now)
    else:
        _kill_late(job, job.current, members, now)


def _form_first(job: JobState, now: float) -> None:
    workers = job.ranks.staying()
    if workers:
        # All of them, so the job does not begin with a change: a rank that is left out now could only join through the
        # next generation. Some may have been lost since the start.
        are_ready = all(worker.is_ready for worker in workers)
        if are_ready and is_enough(job, len(workers), job.options.min_ranks, now):
            _publish(job, workers, now)
    elif job.first_failure is not None and not any(job.hosts.is_usable(name, now) for name in job.hosts.listed):
        # Otherwise a host is being connected to, or there are too few slots yet (is_enough).
        end_after_failure(job)


def _form_next(job: JobState, members: Sequence[WorkerRecord], now: float) -> None:
    """Publishes the next generation, once enough workers are ready. All members of the last one wait for it."""
    wanted = [worker for worker in members if job.is_wanted(worker)]
    new = [w for w in job.ranks.staying() if w.rank is None and w.is_ready and job.is_wanted(w)]
    if not wanted:
        # All hosts were replaced: the old ranks stay for one more generation, so the new ones get the state.
        candidates = [*members, *new]
        num_needed = len(members) + min(1, len(new))
    else:
        # Before the count, so they leave now, although the others may have to wait for further hosts.
        dismiss(job, [worker for worker in members if worker not in wanted], "its host has left the job")
        candidates = chosen([*wanted, *new], job.options.max_ranks, list(job.hosts.listed))
        num_needed = job.options.min_ranks
    if is_enough(job, len(candidates), num_needed, now):
        _publish(job, candidates, now)


def _publish(job: JobState, members: Sequence[WorkerRecord], now: float) -> None:
    number, previous_size = job.generation + 1, job.current.size if job.current is not None else 0
    limit = job.options.reset_limit
    if limit is not None and number - 1 > limit:
        job.messages.say(f"no new generation: the ranks have changed {limit} times (--reset-limit).")
        end_after_failure(job)
        return
    members = in_rank_order(members, list(job.hosts.listed))
    hosts = list(dict.fromkeys(member.host for member in members))
    generation = new_generation(job, number, hosts)
    # The host of rank 0 has just given its ports to the last generation, and its message with new ones is on its way.
    if generation is None:
        return
    worlds = worlds_by_worker(members)
    message = publication(generation, members, previous_size, has_progressed=job.has_progressed)
    # Used once: no rank of an old generation may reach the new one by an address that it knows.
    job.agents[hosts[0]].ports = {}
    for host in hosts:
        here = {str(member.number): asdict(worlds[member.number]) for member in members if member.host == host}
        job.tell(job.agents[host], {**message, "worlds": here, "uses_ports": host == hosts[0]})
    # After the messages, which name the old ranks; what the ranks have printed without a line end belongs to these as well.
    for worker in job.ranks.alive.values():
        job.show_rest(worker)
    for member in members:
        member.rank = member.shown_rank = worlds[member.number].rank
        member.is_ready = False
    change = f"; before: {previous_size}" if previous_size else ""
    ranks = f"{len(members)} rank{'s' if len(members) > 1 else ''}"
    job.messages.say(f"generation {number}: {ranks} on {listed(members)}{change}.")
    job.current = RunningGeneration(generation, len(members), now)


def _announce_change(job: JobState, current: RunningGeneration, now: float) -> None:
    """Tells the members that they should leave at their next commit, if hosts have changed."""
    new = [worker for worker in job.ranks.staying() if worker.rank is None]
    # A change costs every member a restart of its connections. Workers of hosts that came together, which import their
    # modules at different speeds, should therefore cause one change, not several.
    if any(not worker.is_ready and now - worker.since < _JOIN_TOGETHER_S for worker in new):
        return
    room = job.options.max_ranks - current.size
    unwanted = frozenset(worker.number for worker in job.ranks.members() if not job.is_wanted(worker))
    ready = [worker.number for worker in new if worker.is_ready and job.is_wanted(worker)]
    # A member that leaves makes room for a new worker, also if --max-np is reached.
    joining = frozenset(ready[: max(0, room + len(unwanted))])
    # If all hosts were replaced, the old ranks train until new ones can take over their state.
    is_useful = bool(joining) or 0 < len(unwanted) < current.size
    # This is called many times per second, while members may train for minutes before their next commit.
    if is_useful and (joining, unwanted) != current.announced:
        current.announced = (joining, unwanted)
        _tell_generation(job, {"do": "changed", "only_removals": not joining, "has_removals": bool(unwanted)})


def _note_break(job: JobState, current: RunningGeneration, members: Sequence[WorkerRecord], now: float) -> None:
    """Notes that the generation is broken; tells the members if one of them failed or hangs."""
    if current.broken_since is None:
        current.broken_since = now
    # Members that leave because of an announced change have agreed on the step: nothing waits for them in a collective,
    # and news of a failure would make the others go back to their last commit.
    has_failed = len(members) < current.size or any(w.is_ready and w.why is not Why.CHANGED for w in members)
    if current.has_announced_break or not (has_failed or current.hung):
        return
    current.has_announced_break = True
    if current.hung and not has_failed:
        job.messages.say(
            f"{current.hung}: the ranks leave generation {current.facts.number}, and one that has not left within "
            f"{_LEAVE_HUNG_S:g} s is killed."
        )
    _tell_generation(job, {"do": "broken"})


def _tell_generation(job: JobState, message: Message) -> None:
    """Tells all workers of the current generation. Each agent tells only its workers of that generation."""
    for agent in job.agents.values():
        # The others have started no worker yet.
        if agent.state is PipeState.RUNNING:
            job.tell(agent, {**message, "token": job.generation_token})


# ---- workers that leave ----


def dismiss(job: JobState, workers: Sequence[WorkerRecord], why: str) -> None:
    """Tells workers that the job continues without them, which they learn at the rendezvous."""
    job.tell_about("dismiss", workers, why=why)
    for worker in workers:
        # From here on the worker counts neither as a member nor, when it ends, as a failure of its host.
        worker.is_leaving, worker.since = True, time.monotonic()


def _kill_leavers(job: JobState, now: float) -> None:
    """Kills dismissed workers that have not ended in time."""
    # Of `alive`, because `staying` leaves them out: until it has ended, a worker holds its slot and its GPU.
    late = [worker for worker in job.ranks.alive.values() if worker.is_leaving and now - worker.since > _LEAVE_S]
    job.tell_about("kill", late)
    for worker in late:
        # The agent's report of the end takes a moment; without a new time every pass would send the order again.
        worker.since = now


def _kill_late(job: JobState, current: RunningGeneration, members: Sequence[WorkerRecord], now: float) -> None:
    """Kills the members that have not come to the rendezvous in time after the break."""
    assert current.broken_since is not None, "_note_break comes first"
    limit_s = _LEAVE_HUNG_S if current.hung else job.options.elastic_timeout_s
    if now - current.broken_since <= limit_s:
        return
    late = [worker for worker in members if not worker.is_ready]
    limit = f"{limit_s:g} s" if current.hung else f"{limit_s:g} s (--elastic-timeout)"
    job.messages.say(f"{named(late)} did not leave generation {current.facts.number} within {limit} and is killed.")
    job.tell_about("kill", late)
    # Not dismissed, unlike leavers: the end of a member that hangs is a failure, after which its host is avoided.
    # If its agent does not report the end, the order is repeated after the same time.
    current.broken_since = now


def kill_stopped(job: JobState, now: float, limit_s: float) -> None:
    """Kills workers that are stopped for so long: their connections stay open, and the other ranks wait for them."""
    for worker in job.ranks.staying():
        if worker.stopped_at is not None and now - worker.stopped_at > limit_s:
            worker.stopped_at = now
            # Only its agent knows whether it still is stopped: no message tells of a SIGCONT.
            job.tell_about("kill", [worker], if_stopped=True)


def _finish(job: JobState) -> None:
    """Ends the job after a member has ended with exit code 0: members that train have time to end likewise."""
    # A worker at the rendezvous would wait forever, because no generation follows. A new one is on its way there.
    waiting = [worker for worker in job.ranks.staying() if worker.is_ready or worker.rank is None]
    if unfinished := [worker for worker in waiting if worker.rank is not None]:
        job.messages.say(
            f"WARNING {named(unfinished)} had not finished when another rank ended with exit code 0, which finishes "
            f"the job: what was computed since the last checkpoint is lost."
        )
    dismiss(job, waiting, "the job is finished")
    _close_if_empty(job)


def _close_if_empty(job: JobState) -> None:
    """Lets the agents leave when the last worker has ended: they do not leave by themselves, as those of other jobs do."""
    # No worker runs there, and their hellos would not be used any more.
    drop_starting(job)
    if not job.ranks.alive and not job.is_closing:
        job.is_closing = True
        order_end(job)


# ---- members and their ranks: pure functions of the workers ----


def in_rank_order(workers: Sequence[WorkerRecord], host_order: Sequence[str]) -> list[WorkerRecord]:
    """Returns the workers in the order of their new ranks.

    Survivors keep their order, and the ranks of a host stay together: hosts in the order of their lowest surviving rank, then
    new hosts; on each host survivors, then new processes. Rank 0 is thus a survivor if there is one, and has the state.
    """
    infinity = float("inf")

    def old_rank(worker: WorkerRecord) -> float:
        return worker.rank if worker.rank is not None else infinity

    # The ranks of a host stay neighbours, as in the plan of other jobs (placement.py).
    lowest: dict[str, float] = {}
    for worker in workers:
        lowest[worker.host] = min(lowest.get(worker.host, infinity), old_rank(worker))
    places = {host: place for place, host in enumerate(host_order)}

    def order(worker: WorkerRecord) -> tuple[float, float, float, int]:
        return lowest[worker.host], places.get(worker.host, infinity), old_rank(worker), worker.slot

    return sorted(workers, key=order)


def chosen(ready: Sequence[WorkerRecord], max_processes: int, host_order: Sequence[str]) -> list[WorkerRecord]:
    """Returns at most max_processes of the workers, survivors first, in the order of their new ranks."""
    # A survivor is never replaced by a new process, which would first have to get the state.
    survivors = [worker for worker in ready if worker.rank is not None]
    new = [worker for worker in ready if worker.rank is None]
    room = max(0, max_processes - len(survivors))
    return in_rank_order([*survivors, *new[:room]], host_order)


def worlds_by_worker(members: Sequence[WorkerRecord]) -> dict[int, World]:
    """Returns the world of each member, keyed by worker. members: in the order of their ranks."""
    worlds = worlds_of([(member.host, member.slot) for member in members])
    return {member.number: world for member, world in zip(members, worlds, strict=True)}


def publication(
    generation: Generation, members: Sequence[WorkerRecord], previous_size: int, *, has_progressed: bool
) -> Message:
    """Returns the message that makes the members' agents tell them their places; the worlds of a host are added per agent."""
    # Survivors that left together after a commit have the same state; one that failed went back to its last commit.
    needs_sync = any(member.rank is None or member.why is not Why.CHANGED for member in members)
    return {
        "do": "publish",
        "generation": generation.number,
        "token": generation.token,
        **generation.where(),
        "members": [{"host": member.host, "slot": member.slot, "previous_rank": member.rank} for member in members],
        "previous_size": previous_size,
        "needs_sync": needs_sync,
        "has_progressed": has_progressed,
    }


def listed(members: Sequence[WorkerRecord]) -> str:
    """Returns the hosts with the number of their ranks: "h1:2, h2:1"."""
    # A Counter keeps the order of insertion, which is that of the ranks.
    counts = Counter(member.host for member in members)
    return ", ".join(f"{host}:{count}" for host, count in counts.items())
