"""What may follow what within a step of a head."""

from typing import Any

import pytest

from megaclass.errors import HeadError
from megaclass.head.step import OpenStep

# The class keeps draws, parts and gradients without a look into them.
DRAW, OTHER, FIRST, SECOND, UPSTREAM = (object() for _ in range(5))


@pytest.fixture
def step() -> Any:
    return OpenStep()


def test_a_step_of_one_forward_is_open_from_its_backward_on(step):
    assert not step.is_open
    step.add(DRAW, FIRST, UPSTREAM)
    assert step.is_open
    assert step.for_update() == (DRAW, [FIRST])


def test_the_parts_of_an_opened_step_are_updated_together_and_in_their_order(step):
    step.opened = DRAW
    assert step.is_open
    step.add(DRAW, FIRST, UPSTREAM)
    step.add(DRAW, SECOND, UPSTREAM)
    assert step.for_update() == (DRAW, [FIRST, SECOND])


def test_two_forwards_with_draws_of_their_own_are_not_one_step(step):
    step.add(DRAW, FIRST, UPSTREAM)
    with pytest.raises(HeadError, match="a second time before step"):
        step.add(OTHER, SECOND, UPSTREAM)
    assert step.for_update() == (DRAW, [FIRST])


def test_an_update_needs_a_backward(step):
    step.opened = DRAW
    with pytest.raises(HeadError, match="without a forward and a backward"):
        step.for_update()


@pytest.mark.parametrize("opened_by", ["begin_step", "backward"])
def test_a_step_is_not_opened_inside_another_one(step, opened_by):
    step.check_closed()
    if opened_by == "begin_step":
        step.opened = DRAW
    else:
        step.add(DRAW, FIRST, UPSTREAM)
    with pytest.raises(HeadError, match="inside an open step"):
        step.check_closed()
