"""The table of operations that wait for some of their members."""

import pytest

from horovod.engine.messages import JOIN, Request
from horovod.engine.rank0.pending_table import PendingTable


@pytest.fixture
def table() -> PendingTable:
    return PendingTable(["a", "b", "c"], {0: (0, 1, 2), 1: (0, 2)})


def _request(name: str, process_set: int = 0) -> Request:
    return Request.of("allreduce", name, process_set, ("float32",), ((4,),), 1)


def _names(table: PendingTable) -> list[list[str]]:
    return [[request.name for request in response.requests] for response in table.take_ready()]


def test_an_operation_waits_for_the_members_that_have_neither_announced_it_nor_joined(table):
    x = _request("x")
    table.open(1, [x], now=5.0)
    assert table.missing(x.key) == [0, 2]
    table.open(0, [JOIN], 0.0)
    assert table.missing(x.key) == [2]
    assert _names(table) == []
    table.open(2, [x], now=6.0)
    assert table.pending == {}
    assert _names(table) == [["x"]]
    assert _names(table) == [], "a response is taken once"


def test_the_age_of_an_operation_counts_from_its_first_announcement(table):
    x = _request("x")
    table.open(0, [x], now=5.0)
    table.pending[x.key].was_compared = True
    table.open(1, [x], now=7.0)
    pending = table.pending[x.key]
    assert (pending.since, pending.changed, pending.was_compared) == (5.0, 7.0, False)


def test_an_operation_that_fails_leaves_the_table_as_an_error_of_its_process_set(table):
    x = _request("x", process_set=1)
    table.open(2, [x], now=0.0)
    table.fail(x.key, "Mismatched operations")
    assert table.pending == {}
    [response] = table.take_ready()
    assert (response.error, response.process_set, response.requests) == ("Mismatched operations", 1, (x,))


def test_when_the_last_rank_joins_all_are_told_and_none_counts_as_joined_any_more(table):
    for rank in (2, 0, 1):
        assert table.take_ready() == []
        table.open(rank, [JOIN], 0.0)
    [response] = table.take_ready()
    assert response.last_joined == 1 and table.joined == []


def test_an_unknown_process_set_has_no_members(table):
    """Its removal may overtake an operation that a rank announced before it."""
    assert table.members(7) == ()
