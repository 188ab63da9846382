"""Who becomes a member of a generation, with which rank, and which hosts may be used."""

import os
import signal
import threading
import time

import pytest

from megaclass_launch.driver import discovery
from megaclass_launch.driver.discovery import hosts_from_script, parse_lines
from megaclass_launch.driver.generations import chosen, publication, worlds_by_worker
from megaclass_launch.driver.job import Generation, HostTable, WorkerRecord
from megaclass_launch.elastic import Why
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host


def worker(number: int, host: str, slot: int, rank: int | None = None, why: Why = Why.CHANGED) -> WorkerRecord:
    return WorkerRecord(number, host, slot, rank=rank, is_ready=True, why=why)


def ranks_of(workers: list[WorkerRecord], most: int = 9) -> list[int]:
    return [member.number for member in chosen(workers, most, ["a", "b", "c"])]


def test_survivors_keep_their_order_and_new_ranks_follow_on_each_host():
    survivors = [worker(5, "b", 1, rank=3), worker(1, "a", 1, rank=1), worker(4, "b", 0, rank=2)]
    assert ranks_of(survivors) == [1, 4, 5]
    # The slot that was lost on a is filled again: rank 0 is still a survivor, and the ranks of a host stay together.
    assert ranks_of([*survivors, worker(6, "a", 0), worker(7, "c", 0)]) == [1, 6, 4, 5, 7]
    # All of host a is new: the state comes from b.
    assert ranks_of([worker(8, "a", 0), *survivors[::2]]) == [4, 5, 8]
    assert ranks_of([*survivors, worker(6, "a", 0), worker(7, "c", 0)], most=4) == [1, 6, 4, 5]


def test_a_process_keeps_its_gpu():
    members = chosen([worker(1, "a", 1, rank=1), worker(2, "a", 2, rank=2), worker(6, "a", 0)], 9, ["a"])
    worlds = worlds_by_worker(members)
    assert {number: world.local_rank for number, world in worlds.items()} == {1: 1, 2: 2, 6: 0}
    assert {number: world.rank for number, world in worlds.items()} == {1: 0, 2: 1, 6: 2}
    assert {world.local_size for world in worlds.values()} == {3}
    two = worlds_by_worker([worker(0, "a", 0), worker(1, "a", 1), worker(2, "b", 0)])
    assert [(w.cross_rank, w.cross_size) for w in two.values()] == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("members", "needs_sync"),
    [
        ([worker(0, "a", 0, rank=0), worker(1, "a", 1, rank=1)], False),
        ([worker(0, "a", 0, rank=0), worker(1, "a", 1)], True),
        ([worker(0, "a", 0, rank=0), worker(1, "a", 1, rank=1, why=Why.FAILED)], True),
    ],
)
def test_the_state_is_sent_if_a_rank_is_new_or_has_gone_back_to_its_last_commit(members, needs_sync):
    generation = Generation(number=2, token="t", secret="s", address="127.0.0.1", port=1, store_port=2)
    message = publication(generation, members, 3, has_progressed=True)
    assert message["needs_sync"] is needs_sync and message["previous_size"] == 3


def test_a_script_prints_hosts_with_or_without_slots():
    found = parse_lines("gpu-1:8\n\n  gpu-2  \n[fd00::1]\n[fd00::2]:3\n", 4)
    assert [(host.name, host.slots) for host in found] == [
        ("gpu-1", 8),
        ("gpu-2", 4),
        ("[fd00::1]", 4),
        ("[fd00::2]", 3),
    ]


@pytest.mark.parametrize(
    "text", ["", "\n \n", "gpu-1:x", "gpu-1:0", "gpu 1", "-oProxyCommand=x", "a\na:2", "a,b", "<html>", "a:2:2"]
)
def test_an_answer_that_cannot_be_meant_is_none(text):
    with pytest.raises(LaunchError):
        parse_lines(text, 1)


@pytest.mark.ranks
def test_a_script_that_prints_without_end_is_ended_and_fills_no_memory():
    with pytest.raises(LaunchError, match="printed more than"):
        hosts_from_script("yes localhost:2", 1, threading.Event())


@pytest.mark.ranks
@pytest.mark.parametrize("hangs", [False, True], ids=["answers", "hangs"])
def test_processes_that_a_script_leaves_behind_are_not_waited_for(tmp_path, monkeypatch, hangs):
    monkeypatch.setattr(discovery, "_SCRIPT_S", 0.5 if hangs else 60.0)
    left = tmp_path / "pid"
    command = f"setsid sleep 1000 & echo $! > {left}; echo localhost:2"
    try:
        if hangs:
            with pytest.raises(LaunchError, match="did not end"):
                hosts_from_script(f"{command}; exec sleep 1000", 1, threading.Event())
        else:
            assert [(host.name, host.slots) for host in hosts_from_script(command, 1, threading.Event())] == [
                ("localhost", 2)
            ]
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


@pytest.mark.ranks
def test_a_script_that_runs_when_the_job_ends_is_ended(tmp_path):
    pid = tmp_path / "pid"
    asked = discovery.Discovery(discovery.source_of(f"echo $$ > {pid}; exec sleep 1000", None, [], 1))
    while not pid.exists() or not pid.read_text():
        time.sleep(0.01)
    asked.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_failed_host_returns_after_a_cooldown_that_doubles():
    table = HostTable((10.0, 60.0), lambda: 0.0)
    table.update([Host(name="a", slots=2), Host(name="b", slots=1)])
    assert [table.ban("a", now=100.0) for _ in range(4)] == [10.0, 20.0, 40.0, 60.0]
    assert not table.is_usable("a", 159.9) and table.is_usable("a", 160.0) and table.is_usable("b", 100.0)
    assert table.next_return(100.0) == 160.0
    forever = HostTable(None, lambda: 0.0)
    forever.update([Host(name="a", slots=2)])
    forever.ban("a", now=0.0)
    assert not forever.is_usable("a", 1e12) and forever.next_return(0.0) == float("inf")


def test_hosts_keep_the_order_in_which_they_appeared():
    table = HostTable(None, lambda: 0.0)
    table.update([Host(name="a", slots=2), Host(name="b", slots=2)])
    added, removed = table.update([Host(name="c", slots=1), Host(name="b", slots=1), Host(name="a", slots=3)])
    assert [host.name for host in added] == ["c", "a"] and [host.name for host in removed] == ["b"]
    assert list(table.listed) == ["a", "b", "c"] and table.slots("a") == 3
    assert table.update([Host(name="b", slots=1)]) == ([], [Host(name="a", slots=3), Host(name="c", slots=1)])
    assert table.slots("a") == 0
