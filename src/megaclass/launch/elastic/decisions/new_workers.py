"""Agents on the hosts of an elastic job, and new workers in the free slots there. Standard library only."""

from megaclass.launch.driver.agents.agent_pipe import PipeState
from megaclass.launch.elastic.decisions.rank_minimum import RankMinimum
from megaclass.launch.elastic.generation import Generation, in_rank_order, listed, worlds_of
from megaclass.launch.elastic.job import ElasticJob


class NewWorkers:
    """Opens agents on usable hosts and starts workers there. It has no state of its own: it acts on the shared tables."""

    def __init__(self, job: ElasticJob, minimum: RankMinimum) -> None:
        self._job = job
        self._hosts, self._agents, self._table = job.hosts, job.agents, job.table
        self._minimum = minimum

    def open_agents(self, now: float) -> None:
        """Opens agents until their hosts have enough slots, and lets those leave whose hosts were removed."""
        # Those of banned hosts count, too: their agents stay, and so do the ranks that run there.
        num_slots = sum(self._hosts.slots(name) for name in self._agents.by_host)
        for name, host in list(self._hosts.listed.items()):
            if num_slots >= self._job.options.max_ranks:
                break
            if name not in self._agents.by_host and self._hosts.is_usable(name, now):
                self._agents.open(host)
                num_slots += host.slots
        for name, agent in list(self._agents.by_host.items()):
            # The last worker there leaves at a commit, possibly long after the host was removed.
            if name not in self._hosts.listed and not self._table.on_host(name):
                self._agents.end(agent)

    def start(self, now: float, generation: Generation | None, *, is_running: bool) -> None:
        """Starts workers in the free slots of usable hosts.

        generation: the current one; None before the first. is_running: the program has made progress already.
        """
        is_first = generation is None
        # The first workers start together, once every host has answered: they form one generation, not one per host.
        if is_first and (self._table.alive or self._agents.is_any_starting()):
            return
        free = self._free_slots(now)
        num_wanted = self._job.options.num_processes or self._job.options.min_ranks
        if is_first and not self._minimum.is_met(len(free), num_wanted, now):
            return
        if not free:
            return
        new = [self._table.add(host, slot, now) for host, slot in free]
        order = list(self._hosts.listed)
        # A guess, as if the next generation had exactly these members. The worker needs values before its rendezvous, for
        # its output and for programs that read the environment when they are imported; the rendezvous replaces them.
        worlds = worlds_of(in_rank_order([*self._table.members(), *new], order))
        for worker in new:
            worker.shown_rank = worlds[worker.number].rank
        generation = generation or self._agents.new_generation(1, in_rank_order(new, order))
        assert generation is not None, "an agent that has said hello has named its ports"
        self._agents.start(new, worlds, generation, is_running=is_running)
        if is_first:
            self._job.io.messages.detail(f"started {len(new)} workers on {listed(new)}")

    def _free_slots(self, now: float) -> list[tuple[str, int]]:
        """Returns hosts and slots for new workers, no more than --max-np allows."""
        # Workers that are leaving count in the slots, which they still hold, but not in the number of ranks.
        room = self._job.options.max_ranks - len(self._table.staying())
        free = [
            (name, slot)
            for name in self._hosts.listed
            if self._hosts.is_usable(name, now)
            and name in self._agents.by_host
            and self._agents.by_host[name].state is not PipeState.STARTING
            for slot in self._table.free_slots(name, self._hosts.slots(name))
        ]
        return free[: max(0, room)]
