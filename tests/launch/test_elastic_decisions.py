"""Decisions of the driver of an elastic job, without processes: who is started, told, dismissed and killed, and when."""

import time
from types import SimpleNamespace

import pytest

from megaclass_launch.driver import generations, job_end
from megaclass_launch.driver.agent_pipe import PipeState
from megaclass_launch.driver.discovery import DiscoveryAnswer
from megaclass_launch.driver.driver import on_message
from megaclass_launch.driver.generations import dismiss, is_enough, update_hosts
from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job import HostTable, JobState, Open, Order, Tell
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.hosts import Host
from megaclass_launch.options import parse_options
from megaclass_launch.wire.agent_messages import AgentMessageChecker


class Agent:
    """An agent of whom the driver knows only what it is told: `sent` has the orders that it got."""

    def __init__(self, host: Host) -> None:
        self.host, self.name = host, host.name
        self.state, self.hello, self.ports, self.sent = PipeState.STARTING, {}, {}, []
        self.checker = AgentMessageChecker(is_elastic=True)

    @property
    def is_over(self) -> bool:
        return self.state in (PipeState.DONE, PipeState.LOST)

    def orders(self, kind: str) -> list:
        return [message for message in self.sent if message.get("do") == kind]


class Driver:
    """The decisions of the driver. Times are given by the tests, messages are those that agents would send."""

    def __init__(self, *hosts: str, options: str = "--min-np 1") -> None:
        self.said: list[str] = []
        messages = SimpleNamespace(say=self.said.append, detail=lambda text: None)
        output = SimpleNamespace(
            put=lambda *line: [],
            finish=lambda rank: [],
            where=lambda rank: "",
            folder=None,
            write_stacks=lambda *_: None,
        )
        io = SimpleNamespace(messages=messages, output=output, screen=None, signals=None, call=None)
        self.job = JobState(parse_options([*options.split(), "-H", "localhost:1", "true"]), io)
        self.job.hosts = HostTable((100.0, 100.0), lambda: 0.0)
        self.watch = HangWatch(self.job)
        self.list_hosts(*hosts)

    def list_hosts(self, *hosts: str) -> None:
        named = [host.split(":") for host in hosts]
        self.job.hosts.update([Host(name=name, slots=int(slots), is_local=True) for name, slots in named])

    def step(self, now: float) -> None:
        """One pass of the driver's loop."""
        generations.advance(self.job, now)
        opened = self.carry_out(self.job.take_orders())
        if opened:
            self.step(now)

    def carry_out(self, orders: list[Order]) -> bool:
        """Carries out orders; returns whether an agent was opened."""
        for order in orders:
            match order:
                case Open(host):
                    self.job.agents[host.name] = Agent(host)
                    self.job.opened.append(self.job.agents[host.name])
                case Tell(agent, message):
                    agent.sent.append(message)
        return any(isinstance(order, Open) for order in orders)

    def check_for_hangs(self, now: float) -> None:
        self.watch.check(now)
        self.carry_out(self.job.take_orders())

    def agent(self, host: str) -> Agent:
        return self.job.agents[host]

    def hear(self, host: str, **message) -> None:
        self.carry_out(on_message(self.job, self.watch, self.agent(host), message, b""))

    def greet(self, *hosts: str) -> None:
        for host in hosts:
            self.hear(host, say="hello", pid=1, port=1000, store_port=1001)

    def ready(self, *numbers: int, why: str = "start") -> None:
        for number in numbers:
            worker = self.job.ranks.alive[number]
            token = self.job.generation_token if worker.rank is not None else ""
            self.hear(worker.host, say="ready", rank=number, token=token, why=why)

    def exit(self, number: int, code: int) -> None:
        self.hear(self.job.ranks.alive[number].host, say="exit", rank=number, pid=100 + number, code=code)

    def spare_ports(self, host: str) -> None:
        self.hear(host, say="spare", port=2000, store_port=2001)

    def ranks(self) -> dict[int, int]:
        """Returns the members of the current generation: ranks by worker."""
        return {worker.number: worker.rank for worker in self.job.ranks.members()}

    def alive(self) -> list[tuple[str, int]]:
        return [(worker.host, worker.slot) for worker in self.job.ranks.staying()]


def trains(*hosts: str, options: str = "--min-np 1") -> Driver:
    """A driver whose first generation has all slots of the hosts."""
    driver = Driver(*hosts, options=options)
    driver.step(0.0)
    driver.greet(*driver.job.agents)
    driver.step(1.0)
    driver.ready(*driver.job.ranks.alive)
    driver.step(2.0)
    assert driver.job.generation == 1
    for host in driver.job.agents:
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
    assert driver.job.current is None
    driver.ready(2)
    driver.step(4.0)
    assert driver.ranks() == {0: 0, 1: 1, 2: 2}
    assert driver.said == ["generation 1: 3 ranks on a:2, b:1."]


def test_no_more_agents_and_workers_than_max_np_allows():
    driver = trains("a:2", "b:2", "c:2", options="--min-np 1 --max-np 3")
    assert list(driver.job.agents) == ["a", "b"]
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
    assert driver.ranks().keys() == {0, 1} and 3 in driver.job.ranks.alive


def test_a_host_that_cannot_start_its_workers_is_given_up_with_them():
    driver = Driver("a:1", "b:1")
    driver.step(0.0)
    driver.greet("a", "b")
    driver.step(1.0)
    b = driver.agent("b")
    driver.hear("b", say="refuse", why="Cannot start rank 1 with './train': Exec format error.")
    assert b.orders("end") and driver.alive() == [("a", 0)]
    driver.ready(0)
    driver.step(2.0)
    assert driver.job.generation == 1 and driver.ranks() == {0: 0}


def test_hosts_that_cannot_take_part_at_the_start_are_left_out_if_the_others_are_enough():
    driver = Driver("a:1", "b:1", "c:1", options="--min-np 1")
    driver.step(0.0)
    job_end.lose(driver.job, driver.agent("a"), "does not answer")
    driver.hear("b", say="refuse", why="There is no command 'train'.")
    driver.step(1.0)
    assert not driver.job.is_ending
    driver.greet("c")
    driver.step(2.0)
    driver.ready(0)
    driver.step(3.0)
    assert driver.said[-1] == "generation 1: 1 rank on c:1."


def test_the_first_generation_has_min_np_ranks_also_if_a_host_is_lost_before_it():
    driver = Driver("a:1", "b:1", options="--min-np 2")
    driver.step(0.0)
    driver.greet("a", "b")
    driver.step(1.0)
    job_end.lose(driver.job, driver.agent("b"), "was lost")
    driver.ready(0)
    driver.step(2.0)
    assert driver.job.current is None
    assert driver.said[-1].startswith("1 rank(s) can run, but 2 are needed (--min-np): waiting for hosts")
    driver.list_hosts("a:1", "b:1", "c:1")
    driver.step(3.0)
    driver.greet("c")
    driver.step(4.0)
    assert driver.alive() == [("a", 0), ("c", 0)]
    [start] = driver.agent("c").orders("start")
    assert [entry["world"]["rank"] for entry in start["workers"]] == [1]
    driver.ready(2)
    driver.step(5.0)
    assert driver.ranks() == {0: 0, 2: 1}


def test_an_agent_that_was_told_to_leave_refuses_in_vain():
    """Its host was removed and added again, and has ranks under a newer agent."""
    driver = Driver("a:1", "b:1")
    driver.step(0.0)
    older = driver.agent("b")
    driver.list_hosts("a:1")
    driver.step(1.0)
    driver.list_hosts("a:1", "b:1")
    driver.step(2.0)
    driver.greet("a", "b")
    driver.step(3.0)
    assert driver.agent("b") is not older and driver.alive() == [("a", 0), ("b", 0)]
    driver.carry_out(on_message(driver.job, driver.watch, older, {"say": "refuse", "why": "no folder."}, b""))
    assert driver.alive() == [("a", 0), ("b", 0)]


def test_a_job_whose_command_cannot_be_started_anywhere_ends():
    driver = Driver("a:2")
    driver.step(0.0)
    driver.greet("a")
    driver.step(1.0)
    driver.hear("a", say="refuse", why="Cannot start rank 0 with './train': Exec format error.")
    driver.step(2.0)
    driver.step(3.0)
    assert driver.job.is_closing and driver.job.decision.outcome.exit_code == 2


def test_a_spare_host_takes_the_place_of_a_rank_that_failed_on_another_at_max_np():
    driver = trains("a:2", "b:2", options="--min-np 1 --max-np 2")
    assert list(driver.job.agents) == ["a"]
    driver.exit(1, 1)
    driver.step(3.0)
    driver.greet("b")
    driver.step(4.0)
    assert driver.alive() == [("a", 0), ("b", 0)]


def test_a_new_host_that_cannot_name_the_address_of_rank_0_does_not_end_the_job():
    """A host behind a jump host sees the address of that one, and rank 0 is on this machine."""
    driver = trains("a:1")
    job = driver.job
    job.hosts.update([*job.hosts.listed.values(), Host(name="b", slots=1)])
    driver.step(3.0)
    b = driver.agent("b")
    driver.hear("b", say="hello", pid=1, port=1000, store_port=1001, ssh="192.0.2.7 4711 192.0.2.8 22")
    assert b.orders("end") and driver.said[-1].startswith("Cannot tell by which address the other hosts reach a: ")
    driver.step(4.0)
    assert driver.alive() == [("a", 0)] and not job.is_ending


def test_the_agent_of_a_removed_host_leaves_with_its_last_worker():
    driver = trains("a:1", "b:1")
    b = driver.agent("b")
    driver.list_hosts("a:1")
    driver.step(3.0)
    assert not b.orders("end")
    driver.exit(1, 1)
    driver.step(4.0)
    assert b.orders("end") and "b" not in driver.job.agents


# ---- generations ----


def test_after_a_failure_the_others_are_told_once_and_form_the_next_generation():
    driver = trains("a:2", "b:1")
    a = driver.agent("a")
    token = driver.job.generation_token
    driver.exit(0, -9)
    for now in (3.0, 4.0):
        driver.step(now)
    assert a.orders("broken") == [{"do": "broken", "token": token}] and driver.agent("b").orders("broken")
    driver.ready(1, why="failed")
    driver.step(5.0)
    assert driver.job.generation_token == token
    driver.ready(2, why="failed")
    driver.step(6.0)
    assert driver.job.generation_token != token and driver.ranks() == {1: 0, 2: 1}
    assert a.orders("publish")[-1]["previous_size"] == 3 and a.orders("publish")[-1]["needs_sync"]
    assert driver.said[-1] == "generation 2: 2 ranks on a:1, b:1; before: 3."


def test_a_generation_waits_for_the_ports_of_the_host_of_its_rank_0():
    driver = trains("a:2")
    driver.exit(1, 1)
    driver.ready(0, why="failed")
    driver.step(3.0)
    assert driver.job.generation == 2
    # The second failure comes before the agent has held new ports.
    driver.ready(0, why="failed")
    driver.step(4.0)
    assert driver.job.generation == 2
    driver.spare_ports("a")
    driver.step(5.0)
    assert driver.job.generation == 3


def test_ranks_that_join_and_ranks_that_leave_are_announced_once_and_without_a_break():
    driver = trains("a:1", "b:1")
    a, b = driver.agent("a"), driver.agent("b")
    driver.list_hosts("a:1", "b:1", "c:1")
    driver.step(3.0)
    driver.greet("c")
    driver.step(4.0)
    # While the worker on c imports its modules, b is removed: its rank trains on, so both changes are one.
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
        driver.job.current.hung = "no step has finished for 120 s"
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


@pytest.mark.parametrize("by_option", [False, True], ids=["by-its-own-limit", "--hang-timeout"])
def test_a_rank_that_hangs_is_named_and_the_generation_is_left(by_option):
    driver = trains("a:2", "b:1", options="--min-np 1" + " --hang-timeout 30" * by_option)
    now = time.monotonic()
    driver.hear("a", say="started", pids={0: 10, 1: 11})
    driver.job.current.published_at = now - 60.0
    driver.job.printed_at = now - 40.0
    if not by_option:
        driver.hear(
            "b", say="status", idle_s=40.0, silent_s=40.0, missing="no step has finished", setting="train.hang_after_s"
        )
    driver.check_for_hangs(now)
    [asked] = driver.agent("a").orders("stacks")
    assert asked["ranks"] == {"0": 0, "1": 1, "2": 2} and asked["may_abort"] is False
    # While it is asked, and once it is to be left, it is not asked again.
    driver.check_for_hangs(now + 1.0)
    report = {
        "pid": 10,
        "step": 7,
        "phase": "",
        "detail": "",
        "main_thread": 0,
        "file_wait": "",
        "package": "",
        "is_late": True,
    }
    for number, state in ((0, "kernel"), (1, "stopped"), (2, "kernel")):
        host = driver.job.ranks.alive[number].host
        driver.hear(host, say="stacks", rank=number, state=state, waits_for="futex", **report)
    driver.check_for_hangs(now + 2.0)
    assert len(driver.agent("a").orders("stacks")) == 1
    assert driver.said[-1].startswith("generation 1 hangs. ") and "rank 1 (a): stopped" in driver.said[-1]
    driver.step(now + 2.0)
    assert driver.agent("b").orders("broken") and not driver.job.is_ending
    assert ": the ranks leave generation 1, and one that has not left within 20 s is killed." in driver.said[-1]
    assert ("--hang-timeout" if by_option else "train.hang_after_s") in driver.said[-1]
    # Without any of its ranks the job ends because of the hang.
    for number in (0, 1, 2):
        driver.exit(number, -9)
    driver.step(now + 3.0)
    assert driver.job.decision.outcome.exit_code == 134 and driver.job.decision.report.startswith("generation 1 hangs.")


def test_ranks_that_wait_for_the_next_generation_do_not_hang():
    driver = trains("a:2", options="--min-np 2 --hang-timeout 30")
    driver.hear("a", say="started", pids={0: 10, 1: 11})
    driver.exit(0, 1)
    driver.ready(1, why="failed")
    driver.step(3.0)
    driver.job.printed_at = driver.job.current.published_at = 0.0
    driver.check_for_hangs(time.monotonic())
    assert not driver.agent("a").orders("stacks") and not driver.job.is_ending


def test_the_job_ends_by_its_first_failure_if_no_member_is_left():
    driver = trains("a:2")
    driver.exit(1, 7)
    driver.step(3.0)
    assert not driver.job.is_ending
    driver.exit(0, 1)
    driver.step(4.0)
    assert driver.job.decision.outcome == Outcome(exit_code=7, failed_hosts=("a",), may_restart=False)


def test_no_generation_after_the_reset_limit():
    driver = trains("a:2", options="--min-np 1 --reset-limit 1")
    for number in (2, 3):
        driver.ready(*driver.ranks(), why="failed")
        driver.step(float(number))
        driver.spare_ports("a")
    assert driver.job.generation == 2 and driver.job.is_ending
    assert driver.said[-1] == "no new generation: the ranks have changed 1 times (--reset-limit)."
    assert driver.job.decision.outcome.exit_code == 255


# ---- too few ranks ----


def test_too_few_ranks_are_reported_once_and_end_the_job_after_the_elastic_timeout():
    driver = Driver("a:2", options="--min-np 3 --elastic-timeout 50")
    assert not is_enough(driver.job, 2, 3, 10.0)
    assert not is_enough(driver.job, 2, 3, 60.0)
    assert len(driver.said) == 1 and "waiting for hosts for up to 50 s" in driver.said[0]
    # Enough for a moment: the next shortage has the whole time again.
    assert is_enough(driver.job, 3, 3, 61.0)
    assert not is_enough(driver.job, 2, 3, 70.0) and not is_enough(driver.job, 2, 3, 120.0)
    assert len(driver.said) == 2 and not driver.job.is_ending
    is_enough(driver.job, 2, 3, 120.1)
    assert driver.said[-1].startswith("no new generation: 2 rank(s) can run, 3 are needed") and driver.job.is_ending
    assert driver.job.decision.outcome.exit_code == 255


def test_the_option_that_asks_for_the_missing_ranks_is_named():
    driver = Driver("a:1", options="-np 2 --min-np 1")
    driver.step(0.0)
    driver.greet("a")
    driver.step(1.0)
    assert driver.said == [
        "1 rank(s) can run, but 2 are needed (-np): waiting for hosts for up to 600 s (--elastic-timeout)."
    ]


def test_too_few_ranks_after_a_failure_end_with_its_exit_code():
    driver = trains("a:2", options="--min-np 2 --elastic-timeout 50")
    driver.exit(1, 7)
    is_enough(driver.job, 1, 2, 10.0)
    is_enough(driver.job, 1, 2, 70.0)
    assert driver.job.decision.outcome.exit_code == 7


def test_too_few_ranks_are_no_news_while_a_host_is_being_connected_to():
    driver = Driver("a:2", options="--min-np 3")
    driver.step(0.0)
    assert not is_enough(driver.job, 0, 3, 1.0)
    assert driver.said == []


# ---- leavers ----


def test_a_dismissed_worker_is_killed_if_it_stays_and_its_end_is_no_failure():
    driver = trains("a:2")
    worker = driver.job.ranks.alive[1]
    dismiss(driver.job, [worker], "the job is finished")
    driver.step(worker.since + 10.0)
    assert not driver.agent("a").orders("kill")
    late = worker.since + 10.1
    driver.step(late)
    driver.step(late + 0.1)
    assert driver.agent("a").orders("kill") == [{"do": "kill", "workers": [1]}]
    driver.exit(1, -9)
    assert driver.job.first_failure is None


# ---- hosts ----


def test_hosts_that_come_and_go_are_named_but_not_those_of_the_start():
    driver = Driver()
    first = DiscoveryAnswer((Host(name="a", slots=2), Host(name="b", slots=2)))
    second = DiscoveryAnswer((Host(name="a", slots=1), Host(name="c", slots=4)))
    update_hosts(driver.job, "hosts.sh", [first, second])
    assert list(driver.job.hosts.listed) == ["a", "c"]
    assert driver.said == [
        "c:4 was added; new ranks there join at the next commit.",
        "a has 1 slot(s) now; its ranks that are not needed leave at the next commit.",
        "b was removed; its ranks that are not needed leave at the next commit.",
    ]


def test_a_discovery_that_fails_ends_the_job_only_before_it_has_named_hosts():
    driver = Driver("a:1")
    update_hosts(driver.job, "hosts.sh", [DiscoveryAnswer(problem="it ended with exit code 1")])
    assert not driver.job.is_ending and driver.said[-1].endswith("its last good answer stands.")
    driver = Driver()
    update_hosts(driver.job, "hosts.sh", [DiscoveryAnswer(problem="it printed no host")])
    assert driver.job.decision.outcome.exit_code == 2


@pytest.mark.ranks
def test_what_a_lost_host_has_left_is_ended_however_many_hosts_were_lost_before(monkeypatch):
    monkeypatch.setattr(job_end, "_MAX_ORPHAN_KILLERS", 1)
    host = Host(name="localhost", slots=1, is_local=True)
    agent = SimpleNamespace(host=host, run_id="1", hello={"pid": 1})
    killers = job_end.OrphanKillers(parse_options(["--python", "/bin/true", "program"]))
    for _ in range(2):
        killers.start(agent)
        [(process, _)] = killers._running
        process.wait()
    killers.start(agent)
    assert killers._running[-1][0].pid != process.pid
    killers.wait()
