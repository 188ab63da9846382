"""Which launches of a program go to one that was compiled before. The program itself is a stand-in: GPUs are not here."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.tools.tensor_descriptor import TensorDescriptor

from megaclass import triton_launch


class Program:
    """Notes what it was asked to compile, and how what it compiled was launched."""

    __name__ = "stand_in"

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        names = ("x", "y", "count", "lr", "C", "KIND")
        self.params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in names]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*arguments: Any, **options: Any) -> Any:
            self.compiled.append((grid, arguments, options))
            return {(4, 1, 1): lambda *given: self.launched.append(given)}

        return compile_and_run


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(triton_launch, "_compiled", {})
    return Program()


def launch(program: Program, x: Any, y: Any, count: int = 7, lr: Any = 0.1, width: int = 16) -> None:
    triton_launch.launch(program, 4, x, y, count, lr, C=width, KIND="sgd", num_warps=8)


def test_the_second_launch_with_the_same_kinds_needs_no_look_at_the_arguments(program):
    one, other = torch.zeros(8), torch.ones(8)
    launch(program, one, None)
    launch(program, other, None, count=9, lr=0.2)
    assert program.compiled == [((4,), (one, None, 7, 0.1), {"C": 16, "KIND": "sgd", "num_warps": 8})]
    ((tensor, absent, *numbers),) = program.launched
    assert tensor is other and absent is None and numbers == [9, 0.2, 16, "sgd"]


def described(block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(torch.zeros(64, 64), block)


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ([torch.zeros(8, dtype=torch.float16), None], {}),
        ([torch.zeros(8), torch.zeros(8)], {}),
        ([described([16, 16]), None], {}),
        ([torch.zeros(8), None], {"width": 32}),
        ([torch.zeros(8)[1:], None], {}),
        ([torch.zeros(8), None], {"count": 2**31}),
        ([torch.zeros(8), None], {"count": 1}),
        ([torch.zeros(8), None], {"count": 32}),
        ([torch.zeros(8), None], {"lr": torch.zeros(())}),
    ],
    ids=[
        "another dtype", "not absent", "a descriptor", "another constant", "not aligned", "more than 32 bits", "one",
        "a multiple of 16", "a tensor for a number",
    ],
)  # fmt: skip
def test_other_kinds_are_looked_at_anew(program, arguments, more):
    launch(program, torch.zeros(8), None)
    launch(program, *arguments, **more)
    assert len(program.compiled) == 2 and not program.launched


def test_descriptors_are_told_apart_by_their_blocks(program):
    for block in ([16, 16], [16, 32], [16, 16]):
        launch(program, described(block), None)
    assert len(program.compiled) == 2 and len(program.launched) == 1


def test_tensors_that_are_not_aligned_have_a_program_of_their_own(program):
    for first in (1, 0, 2, 4):
        launch(program, torch.zeros(8)[first:], None)
    assert len(program.compiled) == 2 and len(program.launched) == 2


def test_constants_in_another_order_than_in_the_signature_are_refused(program):
    with pytest.raises(AssertionError, match="constants of stand_in in their order"):
        triton_launch.launch(program, 4, torch.zeros(8), None, 7, 0.1, KIND="sgd", C=16)


class OnSecondGpu(torch.Tensor):
    """Says that it is on cuda:1, which is not here."""

    def get_device(self) -> int:
        return 1


@pytest.mark.parametrize(("current", "entered"), [(0, [1, 1]), (1, [])], ids=["another GPU", "the same GPU"])
def test_a_program_is_compiled_and_launched_on_the_device_of_its_tensors(program, monkeypatch, current, entered):
    devices = []

    @contextmanager
    def device(index: int) -> Any:
        devices.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(triton_launch, "_current_device", lambda: current)
    for _ in range(2):
        launch(program, torch.zeros(8).as_subclass(OnSecondGpu), None)
    assert devices == entered and len(program.compiled) == len(program.launched) == 1
