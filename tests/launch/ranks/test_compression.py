"""The codecs against float64, and what error feedback promises: that nothing is lost for good."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaclass.distributed.data_parallel import data_parallel
from megaclass_launch.ranks.wire_formats import WIRE_FORMATS, compressed_all_reduce_, compression_hook


def _blocks(wire: str) -> Tensor:
    """Blocks of many sizes of number, each with a few large and many small ones."""
    numbers = torch.randn(600, WIRE_FORMATS[wire].block, generator=torch.Generator().manual_seed(0)) ** 3
    return numbers * torch.logspace(-37, 36, 600)[:, None]


def _round_trip(wire: str, blocks: Tensor) -> Tensor:
    return WIRE_FORMATS[wire].decode(WIRE_FORMATS[wire].encode(blocks), blocks.shape[1]).double()


def _scale(blocks: Tensor, limit: float) -> Tensor:
    """The smallest power of two, of those float32 has, of which `limit` reach the largest number of a block; in float64."""
    largest = blocks.double().abs().amax(-1, keepdim=True)
    return torch.exp2(torch.log2(largest / limit).ceil().clamp(min=-126))


def test_int8_is_the_nearest_of_255_even_steps():
    blocks = _blocks("int8")
    got = _round_trip("int8", blocks)
    step = _scale(blocks, 127)
    whole = got / step
    assert torch.equal(whole, whole.round()) and whole.abs().max() <= 127
    assert ((got - blocks.double()).abs() <= step / 2).all()


def test_fp8_keeps_four_significant_bits_down_to_its_smallest_step():
    blocks = _blocks("fp8")
    got = _round_trip("fp8", blocks)
    truth = blocks.double()
    # 448 is the largest E4M3; below 2^-6 its steps stay 2^-9.
    half_step = torch.maximum(truth.abs() * 2.0**-4, _scale(blocks, 448) * 2.0**-10)
    assert ((got - truth).abs() <= half_step).all()


def test_every_code_of_fp8_means_what_torch_says_it_does():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127]  # NaN, which is never sent
    padded = torch.cat([codes, torch.zeros(2, dtype=torch.uint8)])
    exponent_of_1 = torch.full((2,), 127, dtype=torch.uint8)
    decoded = WIRE_FORMATS["fp8"].decode(torch.cat([padded, exponent_of_1])[None], 256)[0, : len(codes)]
    assert torch.equal(decoded, codes.view(torch.float8_e4m3fn).float())


def _vectors(step: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3001, generator=generator) * torch.logspace(-6, 0, 3001)


def _reduce_often(wire: str, num_steps: int) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    remainder = torch.zeros(3001)
    total = torch.zeros(3001, dtype=torch.float64)
    for step in range(num_steps):
        mine = _vectors(step, size)[rank].clone()
        total += compressed_all_reduce_(mine, WIRE_FORMATS[wire], None, divisor=size, remainder_N=remainder)
    return total, remainder


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("wire", list(WIRE_FORMATS))
def test_what_both_roundings_lose_is_kept_to_the_last_bit_of_float32(run_ranks, wire, size):
    results = run_ranks(size, _reduce_often, wire, 12)
    assert all(torch.equal(total, results[0][0]) for total, _ in results)
    truth = sum(_vectors(step, size).double().sum(0) for step in range(12))
    arrived = results[0][0] * size
    kept = sum(remainder.double() for _, remainder in results)
    scale = truth.norm()
    assert float((arrived + kept - truth).norm() / scale) < 1e-6
    # And it is the remainders that make it whole.
    assert float((arrived - truth).norm() / scale) > 1e-5


def _one_overflow() -> tuple[bool, bool]:
    remainder = torch.zeros(300)
    broken = torch.ones(300)
    broken[dist.get_rank()] = float("inf")
    wire = WIRE_FORMATS["int8"]
    first = compressed_all_reduce_(broken, wire, None, remainder_N=remainder)
    second = compressed_all_reduce_(torch.ones(300), wire, None, remainder_N=remainder)
    return bool(first[:2].isnan().all()), bool(second.isfinite().all())


def test_an_overflow_arrives_once_and_is_not_remembered(run_ranks):
    assert run_ranks(2, _one_overflow) == [(True, True)] * 2


def _hooked_gradients(wire: str) -> list[Tensor]:
    """Of three steps, as the hook left them; compared with the same vectors through the all-reduce itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(40, 30, bias=False)
    parallel = data_parallel(model)
    parallel.register_comm_hook(*compression_hook(wire))
    remainder, hooked = torch.zeros(1200), []
    for step in range(3):
        # Whole numbers: their sums, which are the gradients, are exact in any order.
        inputs = torch.randint(-999, 999, (5, 40), generator=torch.Generator().manual_seed(10 * rank + step)).float()
        model.zero_grad()
        parallel(inputs).sum().backward()
        hooked.append(model.weight.grad.flatten().clone())
        own = inputs.sum(0).expand(30, 40).reshape(-1)
        assert torch.equal(
            compressed_all_reduce_(own, WIRE_FORMATS[wire], None, divisor=size, remainder_N=remainder), hooked[-1]
        )
    return hooked


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("wire", list(WIRE_FORMATS))
def test_the_hook_of_data_parallel_is_the_same_all_reduce(run_ranks, wire, size):
    results = run_ranks(size, _hooked_gradients, wire)
    assert all(torch.equal(*pair) for hooked in results for pair in zip(hooked, results[0], strict=True))
