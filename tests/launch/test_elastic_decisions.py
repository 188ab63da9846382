"""Decisions of the driver of an elastic job, without processes: who is started, told, dismissed and killed, and when."""

from types import SimpleNamespace

import pytest

from megaclass_launch.driver.agent_pipe import PipeState
from megaclass_launch.driver.job_end import JobEnd
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.ssh import SshSettings
from megaclass_launch.elastic.agents import ElasticAgents
from megaclass_launch.elastic.decisions import Generations, HostUpdates, Leavers, NewWorkers, RankMinimum
from megaclass_launch.elastic.discovery import DiscoveryAnswer, HostTable
from megaclass_launch.elastic.job import ElasticJob, WorkerTable
from megaclass_launch.elastic.worker_events import WorkerEvents
from megaclass_launch.hosts import Host
from megaclass_launch.options import parse_options


class Pipe:
    """The pipe of an agent without an agent: `sent` has what the driver has told it."""

    def __init__(self, placement) -> None:
        self.placement, self.name = placement, placement.host.name
        self.state, self.hello, self.sent = PipeState.STARTING, {}, []

    def send(self, message) -> None:
        self.sent.append(message)

    def orders(self, kind: str) -> list:
        return [message for message in self.sent if message.get("do") == kind]


class Pipes:
    """The pipes of a driver that starts no processes."""

    def __init__(self) -> None:
        self.all, self.token = [], "greeting"

    def open(self, placement, command, checker) -> Pipe:
        self.all.append(Pipe(placement))
        return self.all[-1]

    def send(self, message) -> None:
        for pipe in self.all:
            pipe.send(message)


class Driver:
    """The parts of the driver that decide. Times are given by the tests, messages are those that agents would send."""

    def __init__(self, *hosts: str, options: str = "--min-np 1") -> None:
        self.said: list[str] = []
        messages = SimpleNamespace(say=self.said.append, detail=lambda text: None)
        output = SimpleNamespace(put=lambda *line: [], finish=lambda rank: [], where=lambda rank: "")
        io = SimpleNamespace(messages=messages, output=output, screen=None, signals=None)
        pipes, table = Pipes(), WorkerTable()
        parsed = parse_options([*options.split(), "-H", "localhost:1", "true"])
        self.job = ElasticJob(
            options=parsed,
            hosts=HostTable((100.0, 100.0), lambda: 0.0),
            agents=ElasticAgents(pipes, parsed, SshSettings()),
            table=table,
            end=JobEnd(pipes, table, io, parsed),
            io=io,
        )
        self.list_hosts(*hosts)
        self.events = WorkerEvents(self.job)
        self.minimum = RankMinimum(self.job, give_up=self.events.end_after_failure)
        self.leavers = Leavers(self.job)
        self.new_workers = NewWorkers(self.job, self.minimum)
        self.generations = Generations(self.job, self.events, self.minimum, self.leavers)

    def list_hosts(self, *hosts: str) -> None:
        named = [host.split(":") for host in hosts]
        self.job.hosts.update([Host(name=name, slots=int(slots), is_local=True) for name, slots in named])

    def step(self, now: float) -> None:
        """One pass of the driver's loop."""
        self.new_workers.open_agents(now)
        current = self.generations.current
        self.new_workers.start(now, current.facts if current else None, is_running=self.events.has_progressed)
        self.generations.advance(now)

    def agent(self, host: str) -> Pipe:
        return self.job.agents.by_host[host]

    def hear(self, host: str, **message) -> None:
        self.events.handle(self.agent(host), message, b"", self.generations.token)

    def greet(self, *hosts: str) -> None:
        for host in hosts:
            self.hear(host, say="hello", pid=1, port=1000, store_port=1001)

    def ready(self, *numbers: int, why: str = "start") -> None:
        for number in numbers:
            worker = self.job.table.alive[number]
            token = self.generations.token if worker.rank is not None else ""
            self.hear(worker.host, say="ready", rank=number, token=token, why=why)

    def exit(self, number: int, code: int) -> None:
        self.hear(self.job.table.alive[number].host, say="exit", rank=number, pid=100 + number, code=code)

    def spare_ports(self, host: str) -> None:
        self.hear(host, say="spare", port=2000, store_port=2001)

    def ranks(self) -> dict[int, int]:
        """Returns the members of the current generation: ranks by worker."""
        return {worker.number: worker.rank for worker in self.job.table.members()}

    def alive(self) -> list[tuple[str, int]]:
        return [(worker.host, worker.slot) for worker in self.job.table.staying()]


def trains(*hosts: str, options: str = "--min-np 1") -> Driver:
    """A driver whose first generation has all slots of the hosts."""
    driver = Driver(*hosts, options=options)
    driver.step(0.0)
    driver.greet(*driver.job.agents.by_host)
    driver.step(1.0)
    driver.ready(*driver.job.table.alive)
    driver.step(2.0)
    assert driver.generations.current.facts.number == 1
    for host in driver.job.agents.by_host:
        driver.spare_ports(host)
    return driver


# ---- new workers ----


def test_the_first_workers_start_together_once_every_host_has_answered():
    driver = Driver("a:2", "b:1")
    driver.step(0.0)
    driver.greet("a")
    driver.step(1.0)
    assert driver.alive() == []
    driver.greet("b")
    driver.step(2.0)
    assert driver.alive() == [("a", 0), ("a", 1), ("b", 0)]
    driver.ready(0, 1)
    driver.step(3.0)
    assert driver.generations.current is None
    driver.ready(2)
    driver.step(4.0)
    assert driver.ranks() == {0: 0, 1: 1, 2: 2}
    assert driver.said == ["generation 1: 3 ranks on a:2, b:1."]


def test_no_more_agents_and_workers_than_max_np_allows():
    driver = trains("a:2", "b:2", "c:2", options="--min-np 1 --max-np 3")
    assert list(driver.job.agents.by_host) == ["a", "b"]
    assert driver.alive() == [("a", 0), ("a", 1), ("b", 0)]


def test_a_slot_is_filled_again_when_its_worker_has_ended_and_its_host_may_be_used():
    driver = trains("a:2", "b:1")
    driver.exit(2, 1)
    driver.step(3.0)
    assert driver.alive() == [("a", 0), ("a", 1)]
    # HostTable counts from the time of the failure, which is that of the clock.
    until = driver.job.hosts.next_return(0.0)
    driver.step(until - 0.1)
    assert len(driver.alive()) == 2
    driver.step(until)
    assert driver.alive() == [("a", 0), ("a", 1), ("b", 0)]
    assert driver.ranks().keys() == {0, 1} and 3 in driver.job.table.alive


def test_the_agent_of_a_removed_host_leaves_with_its_last_worker():
    driver = trains("a:1", "b:1")
    b = driver.agent("b")
    driver.list_hosts("a:1")
    driver.step(3.0)
    assert not b.orders("end")
    driver.exit(1, 1)
    driver.step(4.0)
    assert b.orders("end") and "b" not in driver.job.agents.by_host


# ---- generations ----


def test_after_a_failure_the_others_are_told_once_and_form_the_next_generation():
    driver = trains("a:2", "b:1")
    a = driver.agent("a")
    token = driver.generations.token
    driver.exit(0, -9)
    for now in (3.0, 4.0):
        driver.step(now)
    assert a.orders("broken") == [{"do": "broken", "token": token}] and driver.agent("b").orders("broken")
    driver.ready(1, why="failed")
    driver.step(5.0)
    assert driver.generations.token == token
    driver.ready(2, why="failed")
    driver.step(6.0)
    assert driver.generations.token != token and driver.ranks() == {1: 0, 2: 1}
    assert a.orders("publish")[-1]["previous_size"] == 3 and a.orders("publish")[-1]["needs_sync"]
    assert driver.said[-1] == "generation 2: 2 ranks on a:1, b:1; before: 3."


def test_a_generation_waits_for_the_ports_of_the_host_of_its_rank_0():
    driver = trains("a:2")
    driver.exit(1, 1)
    driver.ready(0, why="failed")
    driver.step(3.0)
    assert driver.generations.current.facts.number == 2
    # The second failure comes before the agent has held new ports.
    driver.ready(0, why="failed")
    driver.step(4.0)
    assert driver.generations.current.facts.number == 2
    driver.spare_ports("a")
    driver.step(5.0)
    assert driver.generations.current.facts.number == 3


def test_ranks_that_join_and_ranks_that_leave_are_announced_once_and_without_a_break():
    driver = trains("a:1", "b:1")
    a, b = driver.agent("a"), driver.agent("b")
    driver.list_hosts("a:1", "b:1", "c:1")
    driver.step(3.0)
    driver.greet("c")
    driver.step(4.0)
    # While the worker on c imports its modules, b is removed: its rank trains on, so that both changes are one.
    driver.list_hosts("a:1", "c:1")
    driver.step(5.0)
    assert not a.orders("changed")
    driver.ready(2)
    for now in (6.0, 7.0):
        driver.step(now)
    [told] = a.orders("changed")
    assert not told["only_removals"] and told["has_removals"]
    driver.ready(0, 1, why="changed")
    driver.step(8.0)
    assert not a.orders("broken") and not b.orders("broken")
    assert driver.ranks() == {0: 0, 2: 1}
    assert b.orders("dismiss") == [{"do": "dismiss", "workers": [1], "why": "its host has left the job"}]


def test_a_new_worker_that_takes_too_long_does_not_hold_up_the_others():
    driver = trains("a:1")
    driver.list_hosts("a:1", "b:1", "c:1")
    driver.step(3.0)
    driver.greet("b", "c")
    driver.step(4.0)
    driver.ready(1)
    driver.step(33.0)
    assert not driver.agent("a").orders("changed")
    driver.step(35.0)
    assert len(driver.agent("a").orders("changed")) == 1


def test_if_all_hosts_are_replaced_the_old_ranks_pass_on_their_state_first():
    driver = trains("a:2")
    a = driver.agent("a")
    driver.list_hosts("b:2")
    driver.step(3.0)
    assert not a.orders("changed")
    driver.greet("b")
    driver.step(4.0)
    driver.ready(2, 3)
    driver.step(5.0)
    assert a.orders("changed")
    driver.ready(0, 1, why="changed")
    driver.step(6.0)
    assert driver.ranks() == {0: 0, 1: 1, 2: 2, 3: 3} and not a.orders("dismiss")
    driver.spare_ports("a")
    driver.step(7.0)
    driver.ready(0, 1, 2, 3, why="changed")
    driver.step(8.0)
    assert driver.ranks() == {2: 0, 3: 1} and a.orders("dismiss")


@pytest.mark.parametrize(("is_hung", "limit_s"), [(False, 50.0), (True, 20.0)], ids=["failed", "hangs"])
def test_a_member_that_does_not_leave_a_broken_generation_is_killed(is_hung, limit_s):
    driver = trains("a:2", "b:1", options="--min-np 1 --elastic-timeout 50")
    b = driver.agent("b")
    if is_hung:
        driver.events.hung_s = 120.0
    else:
        driver.exit(0, 1)
    driver.step(10.0)
    assert b.orders("broken")
    driver.ready(1, why="failed")
    driver.step(10.0 + limit_s)
    assert not b.orders("kill")
    driver.step(10.1 + limit_s)
    driver.step(10.2 + limit_s)
    assert b.orders("kill") == [{"do": "kill", "workers": [2]}]
    assert "rank 2 on b did not leave generation 1 within" in driver.said[-1]


def test_the_job_ends_by_its_first_failure_if_no_member_is_left():
    driver = trains("a:2")
    driver.exit(1, 7)
    driver.step(3.0)
    assert not driver.job.end.is_ending
    driver.exit(0, 1)
    driver.step(4.0)
    assert driver.job.end.decision.final() == Outcome(exit_code=7, failed_hosts=("a",), may_restart=False)


def test_no_generation_after_the_reset_limit():
    driver = trains("a:2", options="--min-np 1 --reset-limit 1")
    for number in (2, 3):
        driver.ready(*driver.ranks(), why="failed")
        driver.step(float(number))
        driver.spare_ports("a")
    assert driver.generations.current.facts.number == 2 and driver.job.end.is_ending
    assert driver.said[-1] == "no new generation: the ranks have changed 1 times (--reset-limit)."
    assert driver.job.end.decision.final().exit_code == 255


# ---- too few ranks ----


def test_too_few_ranks_are_reported_once_and_end_the_job_after_the_elastic_timeout():
    driver = Driver("a:2", options="--min-np 3 --elastic-timeout 50")
    assert not driver.minimum.is_met(2, 3, 10.0)
    assert not driver.minimum.is_met(2, 3, 60.0)
    assert len(driver.said) == 1 and "waiting for hosts for up to 50 s" in driver.said[0]
    # Enough for a moment: the next shortage has the whole time again.
    assert driver.minimum.is_met(3, 3, 61.0)
    assert not driver.minimum.is_met(2, 3, 70.0) and not driver.minimum.is_met(2, 3, 120.0)
    assert len(driver.said) == 2 and not driver.job.end.is_ending
    driver.minimum.is_met(2, 3, 120.1)
    assert driver.said[-1].startswith("no new generation: 2 rank(s) can run, 3 are needed") and driver.job.end.is_ending
    assert driver.job.end.decision.final().exit_code == 255


def test_too_few_ranks_after_a_failure_end_with_its_exit_code():
    driver = trains("a:2", options="--min-np 2 --elastic-timeout 50")
    driver.exit(1, 7)
    driver.minimum.is_met(1, 2, 10.0)
    driver.minimum.is_met(1, 2, 70.0)
    assert driver.job.end.decision.final().exit_code == 7


def test_too_few_ranks_are_no_news_while_a_host_is_being_connected_to():
    driver = Driver("a:2", options="--min-np 3")
    driver.new_workers.open_agents(0.0)
    assert not driver.minimum.is_met(0, 3, 1.0)
    assert driver.said == []


# ---- leavers ----


def test_a_dismissed_worker_is_killed_if_it_stays_and_its_end_is_no_failure():
    driver = trains("a:2")
    worker = driver.job.table.alive[1]
    driver.leavers.dismiss([worker], "the job is finished")
    driver.leavers.kill_late(worker.since + 10.0)
    assert not driver.agent("a").orders("kill")
    late = worker.since + 10.1
    driver.leavers.kill_late(late)
    driver.leavers.kill_late(late + 0.1)
    assert driver.agent("a").orders("kill") == [{"do": "kill", "workers": [1]}]
    driver.exit(1, -9)
    assert driver.events.first_failure is None


# ---- hosts ----


def discovery(driver: Driver, *answers: DiscoveryAnswer) -> HostUpdates:
    return HostUpdates(SimpleNamespace(name="hosts.sh", news=lambda: answers), driver.job)


def test_hosts_that_come_and_go_are_named_but_not_those_of_the_start():
    driver = Driver()
    first = DiscoveryAnswer((Host(name="a", slots=2), Host(name="b", slots=2)))
    second = DiscoveryAnswer((Host(name="a", slots=1), Host(name="c", slots=4)))
    discovery(driver, first, second).take()
    assert list(driver.job.hosts.listed) == ["a", "c"]
    assert driver.said == [
        "c:4 was added; new ranks there join at the next commit.",
        "a has 1 slot(s) now; its ranks that are not needed leave at the next commit.",
        "b was removed; its ranks that are not needed leave at the next commit.",
    ]


def test_a_discovery_that_fails_ends_the_job_only_before_it_has_named_hosts():
    driver = Driver("a:1")
    discovery(driver, DiscoveryAnswer(problem="it ended with exit code 1")).take()
    assert not driver.job.end.is_ending and driver.said[-1].endswith("its last good answer stands.")
    driver = Driver()
    discovery(driver, DiscoveryAnswer(problem="it printed no host")).take()
    assert driver.job.end.decision.final().exit_code == 2
