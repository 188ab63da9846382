"""Small tensors that travel with the negotiation, and the arithmetic of all transports, against float64."""

import pytest
import torch

from horovod.engine.kinds import Adasum, Average, Max, Min, Product, Sum
from horovod.engine.messages import Request
from horovod.engine.operation import Operation
from horovod.transport.arithmetic import (
    DTYPES,
    add_payloads,
    deliver_payload,
    finish_,
    scale_,
    small_payload,
)

TRUTH = {
    Average: lambda stacked: stacked.sum(0) / len(stacked),
    Sum: lambda stacked: stacked.sum(0),
    Min: lambda stacked: stacked.amin(0),
    Max: lambda stacked: stacked.amax(0),
    Product: lambda stacked: stacked.prod(0),
}
NUMBERS = [dtype for dtype in DTYPES if dtype is not torch.bool]


def _operation(*tensors: torch.Tensor, name: str = "x", op: int = Sum, **more) -> Operation:
    dtypes = tuple(DTYPES[tensor.dtype] for tensor in tensors)
    request = Request.of("allreduce", name, 0, dtypes, tuple(tuple(t.shape) for t in tensors), op, **more)
    return Operation(request, list(tensors), [torch.empty_like(tensor) for tensor in tensors])


@pytest.mark.parametrize("op", TRUTH)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_payloads_of_all_ranks_are_combined_and_delivered(dtype, op):
    generator = torch.Generator().manual_seed(1)
    by_rank = [torch.randint(0, 5, (2, 3), generator=generator).to(dtype) for _ in range(3)]
    operations = [_operation(tensor, op=op) for tensor in by_rank]
    total = add_payloads(operations[0].request, [small_payload([operation], 3) for operation in operations])
    expected = TRUTH[op](torch.stack(by_rank).double()).to(dtype)
    for operation in operations:
        deliver_payload([operation], total)
        torch.testing.assert_close(operation.outputs[0], expected)


def test_several_tensors_and_operations_travel_as_one_and_joined_ranks_receive_nothing():
    operations = [_operation(torch.ones(2), torch.ones(()), name="x"), _operation(torch.full((1, 3), 2.0), name="y")]
    payload = small_payload(operations, 2)
    assert torch.frombuffer(bytearray(payload), dtype=torch.float32).tolist() == [1, 1, 1, 2, 2, 2]
    deliver_payload(operations, add_payloads(operations[0].request, [payload, payload]))
    found = [out.tolist() for operation in operations for out in operation.outputs]
    assert found == [[2, 2], 2, [[4, 4, 4]]]


def test_the_inputs_are_scaled_before_and_the_result_after_and_the_inputs_stay():
    given = torch.tensor([1.0, 2.0])
    operation = _operation(given, prescale=0.5, postscale=10.0)
    deliver_payload([operation], add_payloads(operation.request, [small_payload([operation], 2)] * 2))
    assert operation.outputs[0].tolist() == [10.0, 20.0]
    assert given.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "operations",
    [
        [_operation(torch.ones(2), op=Adasum)],
        [_operation(torch.ones(2), wire="int8")],
        [_operation(torch.ones(100_000))],
        [_operation(torch.ones(2)), _operation(torch.ones(2), name="y", op=Max)],
        [_operation(torch.ones(2)), _operation(torch.ones(2), name="y", prescale=2.0)],
        [_operation(torch.ones(2)), _operation(torch.ones(2, dtype=torch.int64), name="y")],
        [Operation(Request.of("barrier", "b"))],
    ],
    ids=["adasum", "compressed", "large", "different ops", "different scales", "different dtypes", "no allreduce"],
)
def test_everything_else_travels_by_itself(operations):
    assert small_payload(operations, 2) == b""


def test_the_limit_is_shared_by_all_ranks_that_send():
    operation = _operation(torch.ones(32 * 1024))
    assert small_payload([operation], 3)
    assert not small_payload([operation], 4)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_scaling_truncates_integers_and_rounds_half_precision_once(dtype):
    numbers = torch.tensor([1, 5, 100], dtype=dtype)
    assert torch.equal(scale_(numbers.clone(), 0.3), (numbers.double() * 0.3).to(torch.float32).to(dtype)) or (
        dtype in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(scale_(numbers.clone(), 0.3).double(), (numbers.double() * 0.3).to(dtype).double())
    assert scale_(numbers, 1.0) is numbers


@pytest.mark.parametrize(("num_members", "expected"), [(2, [-3, 3]), (3, [-2, 2]), (4, [-1, 1])])
def test_averages_of_integers_are_truncated_towards_zero(num_members, expected):
    assert finish_(torch.tensor([-7, 7]), Average, 1.0, num_members).tolist() == expected
    as_floats = finish_(torch.tensor([-7.0, 7.0]), Average, 1.0, num_members)
    torch.testing.assert_close(as_floats, torch.tensor([-7.0, 7.0]) / num_members)
