"""Which starts of a program go to one that was compiled before. The program itself is a stand-in: GPUs are not here."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from megaclass.backbones.layers import norm_launch


class Program:
    """Notes what it was asked to compile, and how what it compiled was started."""

    __name__ = "stand_in"

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*arguments: Any, **options: int) -> Any:
            self.compiled.append((grid, arguments, options))
            return {(4, 1, 1): lambda *given: self.started.append(given)}

        return compile_and_run


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(norm_launch, "_compiled", {})
    return Program()


def start(program: Program, *tensors: Tensor | None, count: int = 7, width: int = 16) -> None:
    norm_launch.start(program, 4, tensors, (count, 0.1), {"C": width}, {"num_warps": 8})


def test_the_second_start_with_the_same_kinds_needs_no_look_at_the_arguments(program):
    one, other = torch.zeros(8), torch.ones(8)
    start(program, one, None)
    start(program, other, None, count=9)
    assert program.compiled == [((4,), (one, None, 7, 0.1), {"C": 16, "num_warps": 8})]
    ((tensor, absent, *numbers),) = program.started
    assert tensor is other and absent is None and numbers == [9, 0.1, 16]


@pytest.mark.parametrize(
    ("tensors", "more"),
    [
        ([torch.zeros(8, dtype=torch.float16), None], {}),
        ([torch.zeros(8), torch.zeros(8)], {}),
        ([torch.zeros(8), None], {"width": 32}),
        ([torch.zeros(8)[1:], None], {}),
        ([torch.zeros(8), None], {"count": 2**31}),
    ],
    ids=["another dtype", "not absent", "another width", "not aligned", "more than 32 bits"],
)
def test_other_kinds_are_looked_at_anew(program, tensors, more):
    start(program, torch.zeros(8), None)
    start(program, *tensors, **more)
    assert len(program.compiled) == 2 and not program.started


def test_what_is_unusual_is_not_taken_for_the_usual_later(program):
    start(program, torch.zeros(8)[1:], None)
    start(program, torch.zeros(8), None)
    assert len(program.compiled) == 2 and not program.started
