"""The coordinator's table: when operations are ready, what differs between ranks, joins, stalls. Time is an argument."""

import math
import re

import pytest

from horovod.common.settings import Settings
from horovod.engine.coordinator import CROSSED_S, Answer, Coordinator, Cycle
from horovod.engine.messages import JOIN, Request, packed, short_hash

SETS = {0: (0, 1, 2), 1: (0, 2), 2: (0, 1)}


def _coordinator(**settings) -> Coordinator:
    return Coordinator(["a", "b", "c"], Settings(**settings), dict(SETS))


def _request(
    name: str, kind: str = "allreduce", process_set: int = 0, shape: tuple[int, ...] = (4,), **more
) -> Request:
    op = 1 if kind in ("allreduce", "reducescatter") else -1
    return Request.of(kind, name, process_set, ("float32",), (shape,), op, **more)


def _announce(
    coordinator: Coordinator, rank: int, *requests: Request, now: float = 0.0, payload: bytes = b""
) -> Answer | None:
    content = packed(requests)
    return coordinator.announce(rank, Cycle(short_hash(content), content, now, payload))


def _names(answer: Answer | None) -> list[list[str]]:
    return [[request.name for request in response.requests] for response in answer.responses] if answer else []


def _errors(answer: Answer | None) -> list[str]:
    return [response.error for response in answer.responses] if answer else []


def test_an_operation_is_ready_when_all_members_have_announced_it():
    coordinator = _coordinator()
    assert _announce(coordinator, 2, _request("x")) is None
    assert _announce(coordinator, 0, _request("x")) is None
    assert _names(_announce(coordinator, 1, _request("x"))) == [["x"]]
    assert coordinator.next_check() == math.inf


def test_ranks_may_announce_in_different_orders_and_cut_their_cycles_differently():
    coordinator = _coordinator(fusion_threshold=0)
    assert _announce(coordinator, 0, _request("x"), _request("y")) is None
    assert _announce(coordinator, 1, _request("y")) is None
    assert _names(_announce(coordinator, 2, _request("y"), _request("x"))) == [["y"]]
    assert _names(_announce(coordinator, 1, _request("x"))) == [["x"]]


def test_a_process_set_needs_its_members_only():
    coordinator = _coordinator()
    assert _announce(coordinator, 0, _request("x", process_set=1)) is None
    assert _names(_announce(coordinator, 2, _request("x", process_set=1))) == [["x"]]


def test_sizes_of_all_members_come_with_gathers_and_exchanges():
    coordinator = _coordinator()
    for rank in (0, 1):
        assert _announce(coordinator, rank, _request("g", "allgather", shape=(rank, 2))) is None
    assert _announce(coordinator, 2, _request("g", "allgather", shape=(5, 2))).responses[0].sizes == ((0, 1, 5),)
    for rank in (0, 1):
        assert _announce(coordinator, rank, _request("e", "alltoall", splits=(rank, 1, 1))) is None
    answer = _announce(coordinator, 2, _request("e", "alltoall", splits=(2, 1, 1)))
    assert answer.responses[0].sizes == ((0, 1, 1), (1, 1, 1), (2, 1, 1))


@pytest.mark.parametrize(
    ("one", "two", "text"),
    [
        (
            _request("x"),
            _request("x", shape=(5,)),
            "allreduce tensor shapes .* rank 0 .a. sent shape .4., but rank 1 .b. ",
        ),
        (_request("x"), Request.of("allreduce", "x", 0, ("int64",), ((4,),), 1), "data types .*float32.*int64"),
        (
            _request("x"),
            Request.of("allreduce", "x", 0, ("float32",), ((4,),), 0),
            "reduction operations .*Sum.*Average",
        ),
        (_request("x"), _request("x", prescale=2.0), r"factors \(1\.0, 1\.0\).*factors \(2\.0, 1\.0\)"),
        (_request("x", "broadcast", root=0), _request("x", "broadcast", root=1), "broadcast root ranks"),
        (
            _request("x", "allgather", shape=(1, 2)),
            _request("x", "allgather", shape=(1, 3)),
            "shapes beyond dimension 0",
        ),
        (_request("x"), _request("x", device="cuda"), "CPU/GPU device selection .*on cpu.*on cuda"),
        (_request("x"), _request("x", wire="int8"), "compression .*none.*int8"),
    ],
)
def test_a_difference_between_ranks_is_an_error_that_names_both_sides(one, two, text):
    coordinator = _coordinator()
    assert _announce(coordinator, 0, one) is None
    assert _announce(coordinator, 2, one) is None
    answer = _announce(coordinator, 1, two)
    [error] = _errors(answer)
    assert re.match(f"Mismatched .*{text}", error), error
    assert coordinator.next_check() == math.inf, "the job continues"


def test_operations_that_no_rank_can_run_are_errors():
    coordinator = _coordinator()
    for rank in (0, 1):
        assert _announce(coordinator, rank, _request("x", "allgather", shape=())) is None
    assert _errors(_announce(coordinator, 2, _request("x", "allgather", shape=()))) == [
        "Tried to allgather a tensor of no dimensions under the name 'allgather.x'."
    ]


# ---- joins ----


def test_a_rank_that_has_joined_is_not_waited_for():
    coordinator = _coordinator()
    assert _announce(coordinator, 1, JOIN) is None
    assert _announce(coordinator, 0, _request("x")) is None
    assert _names(_announce(coordinator, 2, _request("x"))) == [["x"]]


def test_a_join_completes_what_only_that_rank_was_missing_in():
    coordinator = _coordinator()
    assert _announce(coordinator, 0, _request("x")) is None
    assert _announce(coordinator, 1, _request("x")) is None
    assert _names(_announce(coordinator, 2, JOIN)) == [["x"]]


def test_the_last_rank_that_joins_is_told_to_all_and_the_next_epoch_starts_afresh():
    coordinator = _coordinator()
    assert _announce(coordinator, 2, JOIN) is None
    assert _announce(coordinator, 0, JOIN) is None
    assert [response.last_joined for response in _announce(coordinator, 1, JOIN).responses] == [1]
    assert _announce(coordinator, 0, _request("x")) is None


@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall", "reducescatter"])
def test_operations_that_zeros_cannot_stand_in_for_fail_after_a_join(kind):
    coordinator = _coordinator()
    _announce(coordinator, 1, JOIN)
    _announce(coordinator, 0, _request("x", kind))
    [error] = _errors(_announce(coordinator, 2, _request("x", kind)))
    assert error.startswith(f"{kind.capitalize()} is not supported with Join at this time.")


# ---- waiting ----


def test_ranks_that_use_one_name_for_different_operations_are_told_after_a_moment():
    coordinator = _coordinator()
    _announce(coordinator, 0, _request("x"), now=10.0)
    for rank in (1, 2):
        _announce(coordinator, rank, _request("x", "allgather"), now=10.0)
    assert coordinator.next_check() == 10.0 + CROSSED_S
    assert coordinator.check(10.0 + CROSSED_S / 2)[0] is None
    answer, warning, reason = coordinator.check(10.0 + CROSSED_S)
    expected = "Mismatched operations for the name 'x': rank 0 (a) called allreduce, but rank 1 (b) called allgather."
    assert _errors(answer) == [expected, expected]
    assert (warning, reason) == ("", "")


def test_ranks_that_use_one_name_in_different_process_sets_are_told():
    coordinator = _coordinator()
    _announce(coordinator, 0, _request("x", process_set=1))
    _announce(coordinator, 2, _request("x", process_set=1))
    _announce(coordinator, 0, _request("x", process_set=2))
    _announce(coordinator, 1, _request("x"))
    _announce(coordinator, 2, _request("x"))
    errors = _errors(coordinator.check(1.0)[0])
    text = (
        "Mismatched process sets for the name 'x': rank 0 (a) called allreduce on process set 2 [0, 1], but rank 1 (b) "
    )
    assert len(errors) == 2
    assert all(error.startswith(text) for error in errors), errors


def test_a_rank_that_may_still_come_keeps_crossed_operations_open():
    coordinator = _coordinator()
    _announce(coordinator, 0, _request("x"))
    _announce(coordinator, 1, _request("x", "allgather"))
    assert coordinator.check(10.0)[0] is None


def test_a_rank_that_comes_late_has_its_own_moment_for_the_other_operation():
    coordinator = _coordinator()
    _announce(coordinator, 0, _request("x"), now=0.0)
    _announce(coordinator, 2, _request("x", "allgather"), now=1.0)
    assert coordinator.check(2.0)[0] is None
    # Another of its threads is about to call allgather.
    _announce(coordinator, 1, _request("x"), now=10.0)
    assert coordinator.next_check() == 10.0 + CROSSED_S
    assert coordinator.check(10.0)[0] is None
    assert len(_errors(coordinator.check(10.0 + CROSSED_S)[0])) == 2


def test_a_stall_is_warned_about_once_per_period_with_the_missing_ranks():
    coordinator = _coordinator(stall_warning_s=60.0)
    _announce(coordinator, 0, _request("x"), now=100.0)
    coordinator.check(101.0)
    assert coordinator.next_check() == 160.0
    answer, warning, reason = coordinator.check(160.0)
    assert answer is None and reason == ""
    assert "for more than 60 seconds" in warning
    assert warning.splitlines()[-2:] == ["1 (b): [allreduce.x]", "2 (c): [allreduce.x]"]
    assert coordinator.check(161.0)[1] == ""
    assert coordinator.next_check() == 220.0


def test_a_stall_ends_the_job_after_the_shutdown_time():
    coordinator = _coordinator(stall_warning_s=10.0, stall_shutdown_s=15.0)
    _announce(coordinator, 0, _request("x"))
    coordinator.check(1.0)
    assert "more than 10 seconds" in coordinator.check(10.0)[1]
    assert coordinator.next_check() == 15.0
    assert coordinator.check(15.0)[2].endswith("Will shutdown.")


def test_with_stall_checks_off_nothing_is_due_after_the_comparison():
    coordinator = _coordinator(stall_warning_s=0.0)
    _announce(coordinator, 0, _request("x"))
    coordinator.check(1.0)
    assert coordinator.next_check() == math.inf
    assert coordinator.check(1e9) == (None, "", "")


# ---- whole cycles ----


def test_an_answer_names_the_cycles_of_all_ranks_if_they_announced_one_list():
    coordinator = Coordinator(["h", "h"], Settings(), {0: (0, 1)})
    assert _announce(coordinator, 0, _request("x"), payload=b"from 0") is None
    answer = _announce(coordinator, 1, _request("x"), payload=b"from 1")
    assert [cycle.payload for cycle in answer.cycles] == [b"from 0", b"from 1"]
    # A list that some ranks do not announce is opened, and answered without cycles.
    assert _announce(coordinator, 0, _request("x"), _request("y")) is None
    assert _announce(coordinator, 1, _request("x")).cycles == ()


def test_the_coordinator_answers_a_known_cycle_by_its_hash_without_opening_it():
    coordinator = Coordinator(["h", "h"], Settings(), {0: (0, 1)})
    requests = [Request.of("allreduce", name, 0, ("float32",), ((4,),), 1) for name in "ab"]
    assert _announce(coordinator, 0, *requests) is None
    first = _announce(coordinator, 1, *requests)
    assert _announce(coordinator, 1, *requests) is None
    assert _announce(coordinator, 0, *requests).responses is first.responses
    # Another order on the other rank: opened, and right all the same.
    assert _announce(coordinator, 0, *requests) is None
    answer = _announce(coordinator, 1, *reversed(requests))
    assert answer is not None and {r.name for r in answer.responses[0].requests} == {"a", "b"}


def test_lists_that_do_not_repeat_are_not_remembered():
    coordinator = Coordinator(["h", "h"], Settings(), {0: (0, 1)})
    for number in range(3):
        request = Request.of("allreduce", f"noname.{number}", 0, ("float32",), ((4,),), 1, repeats=False)
        _announce(coordinator, 0, request)
        assert _names(_announce(coordinator, 1, request)) == [[f"noname.{number}"]]
    assert coordinator._answers == {}


def test_an_operation_of_a_set_that_does_not_exist_any_more_has_no_members():
    """Its removal may overtake an operation that a rank announced before it."""
    assert _names(_announce(_coordinator(), 0, _request("x", process_set=7))) == [["x"]]


def test_a_list_that_all_ranks_announce_is_fused_in_its_order_and_gathers_get_the_sizes_of_all():
    coordinator = Coordinator(["h", "h"], Settings(), {0: (0, 1)})
    requests = [_request("a"), _request("b", shape=(10**6,)), _request("c", shape=(3, 3))]
    assert _announce(coordinator, 0, *requests) is None
    answer = _announce(coordinator, 1, *requests)
    assert answer is not None and _names(answer) == [["a", "c"], ["b"]]
    gathers = [_request("g", kind="allgather")]
    assert _announce(coordinator, 0, *gathers) is None
    answer = _announce(coordinator, 1, *gathers)
    assert answer is not None and answer.responses[0].sizes
