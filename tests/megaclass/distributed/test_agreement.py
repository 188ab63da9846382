"""What one rank finds, all ranks learn."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaclass.distributed import agreement
from megaclass.distributed.agreement import (
    on_every_rank,
    on_every_rank_for_long,
    on_main_rank,
    on_main_rank_for_long,
    paths_of_main_rank,
    text_of_main_rank,
)
from megaclass.errors import DataError
from megaclass_launch.errors import AgreedError, UserError

CPU = torch.device("cpu")


def _outcome(errors):
    """Every rank raises what the list holds for it; what came of it, by kind and text."""
    error = errors[dist.get_rank()]

    def action():
        if error is not None:
            raise error
        return f"result of rank {dist.get_rank()}"

    try:
        return "fine", on_every_rank(action, CPU)
    except (UserError, OSError) as raised:
        return type(raised).__name__, str(raised)


def _on_main(error):
    def action():
        assert dist.get_rank() == 0
        if error is not None:
            raise error

    try:
        on_main_rank(action, CPU)
    except (UserError, OSError) as raised:
        return type(raised).__name__, str(raised)
    return "fine"


def test_every_rank_gets_the_result_of_its_own_action(run_ranks):
    assert run_ranks(3, _outcome, [None] * 3) == [("fine", f"result of rank {rank}") for rank in range(3)]


def test_an_error_of_one_rank_is_raised_there_and_ends_the_others_with_its_text_and_rank(run_ranks):
    error = DataError("the record ü is broken")
    first, second, third = run_ranks(3, _outcome, [None, error, None])
    assert second == ("DataError", "the record ü is broken")
    assert first == third == ("AgreedError", "rank 1: the record ü is broken")


def test_what_the_system_refuses_counts_too(run_ranks):
    first, second = run_ranks(2, _outcome, [None, OSError(28, "No space left on device")])
    assert second == ("OSError", "[Errno 28] No space left on device")
    assert first == ("AgreedError", "rank 1: [Errno 28] No space left on device")


def test_what_all_ranks_find_is_raised_as_such_by_one_of_them(run_ranks):
    error = DataError("there is no data")
    assert run_ranks(3, _outcome, [error] * 3) == [
        ("DataError", "there is no data"),
        ("AgreedError", "rank 0: there is no data"),
        ("AgreedError", "rank 0: there is no data"),
    ]


def test_different_errors_are_each_raised_where_they_happened(run_ranks):
    errors = [None, DataError("one"), DataError("two")]
    assert run_ranks(3, _outcome, errors) == [
        ("AgreedError", "rank 1: one"),
        ("DataError", "one"),
        ("DataError", "two"),
    ]


def test_an_error_without_text_or_with_much_of_it_is_not_lost(run_ranks):
    assert run_ranks(2, _outcome, [None, DataError()])[0] == ("AgreedError", "rank 1: DataError")
    kind, text = run_ranks(2, _outcome, [None, DataError("ü" * 10_000)])[0]
    assert kind == "AgreedError" and text.startswith("rank 1: üüü")


def test_the_main_rank_acts_alone_and_its_failure_is_that_of_all(run_ranks):
    assert run_ranks(2, _on_main, None) == ["fine", "fine"]
    assert run_ranks(2, _on_main, DataError("no")) == [("DataError", "no"), ("AgreedError", "rank 0: no")]


def _told(text):
    def tell():
        assert dist.get_rank() == 0
        if text is None:
            raise DataError("nothing to tell")
        return text

    try:
        return text_of_main_rank(tell, CPU)
    except UserError as error:
        return f"error: {error}"


def test_what_the_main_rank_says_all_ranks_hear(run_ranks):
    for text in ("", "ü", "a path with \udce9", "long " * 5000):
        assert run_ranks(3, _told, text) == [text] * 3
    assert run_ranks(2, _told, None) == ["error: nothing to tell", "error: rank 0: nothing to tell"]


def _listed(names):
    def list_paths():
        assert dist.get_rank() == 0
        return [Path(name) for name in names]

    return [str(path) for path in paths_of_main_rank(list_paths, CPU)]


def test_all_ranks_get_the_paths_that_rank_0_lists(run_ranks):
    for names in ([], ["/a/b.jpg", "relative/ü \udce9.png", "with\nbreak"], [f"/x/{n}.jpg" for n in range(3000)]):
        assert run_ranks(3, _listed, names) == [names] * 3


def _work_longer_than_collectives_may():
    """First rank 1 alone, which succeeds, then rank 0 alone, which fails; the group still works."""
    group = dist.new_group(timeout=timedelta(seconds=2))

    def work_on_rank_1():
        time.sleep(3.0 * dist.get_rank())
        return dist.get_rank()

    def fail():
        time.sleep(3.0)
        raise DataError("late")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(agreement, "_SIGN_OF_LIFE_S", 0.3)
        result = on_every_rank_for_long(work_on_rank_1, CPU, group)
        try:
            on_main_rank_for_long(fail, CPU, group)
        except UserError as error:
            return result, str(error), on_every_rank(lambda: "there", CPU, group)


def test_work_may_take_longer_than_the_time_out_of_collectives(run_ranks):
    assert run_ranks(2, _work_longer_than_collectives_may) == [(0, "late", "there"), (1, "rank 0: late", "there")]


def test_without_a_process_group_an_action_is_just_run():
    assert on_every_rank(lambda: 7, CPU) == 7
    assert on_every_rank_for_long(lambda: 7, CPU) == 7
    assert text_of_main_rank(lambda: "seven", CPU) == "seven"
    assert issubclass(AgreedError, UserError)
