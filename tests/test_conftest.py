"""The tool that tests the others: failures and hangs of ranks are shown, not waited for."""

import os
import time

import pytest
import torch.distributed as dist


def _rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the root cause")
    dist.barrier()


def _one_rank_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _hang() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_every_rank_runs_in_a_world_of_the_size_asked_for(run_ranks):
    for size in (1, 3, 2):
        assert run_ranks(size, _rank_and_size) == [(rank, size) for rank in range(size)]


def test_the_root_cause_of_a_failure_is_shown(run_ranks):
    with pytest.raises(pytest.fail.Exception, match="the root cause"):
        run_ranks(2, _one_rank_raises)


def test_a_rank_that_dies_is_named_with_its_exit_code(run_ranks):
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 ---\s+ended without a result, exit code 7"):
        run_ranks(2, _one_rank_dies)


def test_a_hang_ends_with_the_stack_of_the_rank_that_hangs(run_ranks):
    with pytest.raises(pytest.fail.Exception, match=r"ranks \[0\] did not finish(.|\n)*in _hang"):
        run_ranks(2, _hang, timeout_s=3)
    assert run_ranks(2, _rank_and_size) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("turn", ["first", "second"])
def test_an_environment_variable_that_a_test_sets_is_gone_in_the_next_one(turn):
    assert "MEGACLASS_LEFT_BEHIND" not in os.environ
    os.environ["MEGACLASS_LEFT_BEHIND"] = turn
